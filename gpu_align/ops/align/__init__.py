"""Find the place of a request in its prediction. README.md has the loop; here are its numbers."""

from ..layout import WINDOW

#: The LCS row with all bits set, and the lanes of a kernel for its bits and for half of them.
EVERY_BIT, ROW_LANES, HALF_ROW = (1 << WINDOW) - 1, 64, 32
#: What a matching token adds to the cursor's score; a skipped token of the prediction costs 1.
MATCH_WEIGHT = 4
#: The output is in sync again where its last `LOCAL_MATCH` tokens end within `LOCAL_RANGE` positions of the
#: anchor, or, checked at every `GLOBAL_EVERY`-th output token, its last `GLOBAL_MATCH` tokens end anywhere.
LOCAL_RANGE, LOCAL_MATCH = 32, 4
GLOBAL_EVERY, GLOBAL_MATCH = 8, 8
#: Tokens of a diverged output in a turn of a kernel's loop, which looks at `LOCAL_RANGE` at once, a lane each.
TURN = 4
#: The most tokens of either side of an edit, and the most edits that one divergence records.
MAX_EDIT_LEN, MAX_EDITS_AT_ONCE = 16, 8
#: `EDIT_AT` of an entry without an edit.
NO_EDIT = -1
#: Positions whose keys a kernel compares with all edits at once.
EDIT_LOOKUPS = 32

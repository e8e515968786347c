"""Write the draft from the chosen text. README.md has the loop; here are its numbers."""

from ..rules import rule

#: Edits that are replayed in one draft.
MAX_REPLAYS = 4
#: What a token does to a line, in ``indents``: it ends it, it is a run of n spaces (2 n) or of n tabs (2 n + 1),
#: below `NUM_RUNS`, or neither (0). In front of that stands the token of each run, -1 where there is none.
LINE_END, NUM_RUNS = -1, 256


@rule
def wraps_around(matched: int, period: int) -> bool:
    """Whether the output repeats itself: a match as long as the text after its position, `period` tokens."""
    return matched >= period

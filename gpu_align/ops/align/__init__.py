"""Find the place of a request in its prediction. README.md has the loop; here are its numbers."""

from typing import Any, NamedTuple

from .. import lcs
from ..layout import Alignment
from ..rules import rule

#: The output is in sync again where its last `LOCAL_MATCH` tokens end at the anchor or at most `WINDOW` positions
#: after it, or, checked at every `GLOBAL_EVERY`-th output token, its last `GLOBAL_MATCH` tokens end anywhere.
LOCAL_MATCH = 4
GLOBAL_EVERY, GLOBAL_MATCH = 8, 8
#: Positions of the prediction's index that are compared for that, those around the anchor.
NEAREST = 32
#: Tokens after the anchor that the LCS row covers: with `LOCAL_MATCH` before it, a word of 32 bits.
WINDOW = 28
#: What a matching token adds to the cursor's score; a skipped token of the prediction costs 1.
MATCH_WEIGHT = 4
#: The most tokens of either side of an edit, and the most edits that one divergence records.
MAX_EDIT_LEN, MAX_EDITS_AT_ONCE = 16, 8
#: `EDIT_AT` of an entry without an edit.
NO_EDIT = -1


class Edits(NamedTuple):
    """A request's edits: tokens of the prediction and those in their place; number i is at i % `MAX_EDITS`.

    All but the first field and the last are columns of ``edits``, [MAX_EDITS] int32. A kernel holds them in
    registers until it stores them; a reference reads and writes ``edits`` itself.
    """

    count: Any  # edits recorded
    at: Any  # token at its position; `NO_EDIT` where there is no edit, or none any more
    after: Any  # ... and after that
    start: Any  # output position of its first new token
    old: Any  # old tokens
    new: Any  # new tokens
    seen_before: Any  # 1: an edit with the same key was remembered when this one was made
    is_changed: Any  # whether one has changed since they were loaded


@rule
def in_sync_at(a: Alignment, cursor: int, num_in_sync: int, num_common: int) -> Alignment:
    """The alignment in sync at a cursor; it keeps where the output diverged last."""
    return Alignment(1, cursor, a.anchor, a.diverged_at, num_in_sync, num_common, a.lcs_row * 0 - 1)


@rule
def diverge(a: Alignment, done: int) -> Alignment:
    """The alignment diverged at its cursor, after `done` output tokens."""
    return Alignment(0, a.cursor, a.cursor, done, a.num_in_sync, a.num_common, a.lcs_row)


@rule
def at_cursor(a: Alignment, cursor: int, row: int) -> Alignment:
    """The diverged alignment with another cursor and row."""
    return Alignment(0, cursor, a.anchor, a.diverged_at, a.num_in_sync, a.num_common, row)


@rule
def score_at(row: int, j: int) -> int:
    """Of the position j after the anchor, ``0 <= j <= WINDOW``: `MATCH_WEIGHT` for each common token, less j."""
    return lcs.count_ones(~row & (((j * 0 + 1) << j) - 1)) * MATCH_WEIGHT - j

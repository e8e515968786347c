"""Find the place of a request in its prediction. README.md has the loop; here are its numbers."""

from typing import Any, NamedTuple

from ..layout import Alignment
from ..rules import rule, where

#: Of the tokens before the cursor so many are known to be the last of the output, at most.
MAX_COMMON = 64
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
#: Score deficit of a position that the row of a diverged output does not cover.
FAR_DEFICIT = 17
#: The most tokens of either side of an edit, and the most edits that one divergence records.
MAX_EDIT_LEN, MAX_EDITS_AT_ONCE = 16, 8
#: The token at the position of an entry without an edit.
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
def start_over(a: Alignment, is_fresh: int) -> Alignment:
    """The alignment; of a fresh request in sync at the beginning."""
    return Alignment(
        where(is_fresh, 1, a.in_sync), where(is_fresh, 0, a.cursor), where(is_fresh, 0, a.anchor),
        where(is_fresh, 0, a.diverged_at), where(is_fresh, 0, a.num_in_sync), where(is_fresh, 0, a.num_common),
        where(is_fresh, -1, a.lcs_row),
    )  # fmt: skip


@rule
def with_keys(edits: Edits, count: int, at: int, is_changed: int) -> Edits:
    """The edits with another number and other tokens at their positions."""
    return Edits(count, at, edits.after, edits.start, edits.old, edits.new, edits.seen_before, is_changed)


@rule
def rank_of(position: int, anchor: int) -> int:
    """Ties: the position nearest to the anchor has the lowest rank; at the same distance the one ahead of it."""
    return where(position >= anchor, 2 * (position - anchor), 2 * (anchor - position) + 1)


@rule
def position_of(rank: int, anchor: int) -> int:
    """The position that has this rank."""
    return anchor + where(rank % 2 == 0, rank // 2, -(rank // 2))


@rule
def extend_row(row: int, matches: int) -> int:
    """The LCS row after one more output token (Hyyrö 2004).

    Bit j of a row is 0 where the LCS of the output since it diverged and the first j + 1 tokens after the anchor
    is longer than that with the first j, else 1. matches: bit j is 1 where token j after the anchor is the new.
    """
    taken = row & matches
    # One addition: a carry runs through the run of ones up to the next 0.
    return (row + taken) | (row - taken)


@rule
def count_ones(word: int) -> int:
    """The bits of an int32 that are 1: neighbouring fields of 1, 2, 4, … bits, each a count, become one."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@rule
def score_at(row: int, j: int) -> int:
    """Of the position j after the anchor, ``0 <= j <= WINDOW``: `MATCH_WEIGHT` for each common token, less j."""
    return count_ones(~row & (((j * 0 + 1) << j) - 1)) * MATCH_WEIGHT - j


@rule
def deficit_of(ahead: int) -> int:
    """The score deficit of a position while the output is in sync: the tokens skipped, and more to go back."""
    return where(ahead > 0, ahead, -ahead + 2)

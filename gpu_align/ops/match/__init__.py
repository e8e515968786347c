"""Find the positions before which a text ends like the output. README.md defines a match, and the order."""

from ..rules import rule, where

#: A longer match counts as this long.
MAX_MATCH = 64
#: The order of matches is one key of 31 bits: ``(length - 1) * TIE`` plus the tie order, which is below `TIE`.
TIE = 1 << 25

#: Candidates: the best matches in the prediction, then the cursor and the position after it, then the best matches
#: in the context.
NUM_MATCHES = AT_CURSOR = 4
FIRST_CONTEXT = AT_CURSOR + 2
NUM_CANDIDATES = FIRST_CONTEXT + NUM_MATCHES


@rule
def rank_of(position: int, anchor: int) -> int:
    """Ties: the position nearest to the anchor has the lowest rank; at the same distance the one ahead of it."""
    return where(position >= anchor, 2 * (position - anchor), 2 * (anchor - position) + 1)


@rule
def position_of(rank: int, anchor: int) -> int:
    """The position that has this rank."""
    return anchor + where(rank % 2 == 0, rank // 2, -(rank // 2))

"""Find the positions before which a text ends like the output. README.md defines a match, and the order."""

from typing import Any, NamedTuple

from .. import align
from ..layout import Alignment, IntArray
from ..rules import rule

#: A longer match counts as this long.
MAX_MATCH = align.MAX_COMMON
#: Before a match, the LCS of so many tokens of the text and of the output is what they have in common, 0 to 7.
COMMON_WINDOW = 7
#: The order of matches is one key of 31 bits: ``(length - 1) * TIE``, ``common * COMMON_TIE``, and the tie order,
#: which is below `COMMON_TIE`.
TIE, COMMON_TIE = 1 << 25, 1 << 22
#: Tokens of a context at most: the distance of two of its positions is below `COMMON_TIE`.
MAX_CONTEXT_LEN = COMMON_TIE - 1

#: Candidates: the best matches in the prediction, then the cursor and the position after it, then the best matches
#: in the context.
NUM_MATCHES = AT_CURSOR = 4
FIRST_CONTEXT = AT_CURSOR + 2
NUM_CANDIDATES = FIRST_CONTEXT + NUM_MATCHES
#: A kernel's lanes for them.
CANDIDATE_LANES = 16


class Candidates(NamedTuple):
    """The positions from which the next tokens may be read, in the order that ties prefer; [lanes] each."""

    source: Any  # of the text
    position: Any  # -1: there is no candidate
    matched: Any  # tokens before the position that agree with the last ones
    strength: Any  # `matched`; in the context, half a token more for each of `common`
    deficit: Any  # of one in the prediction: how much worse than the cursor the alignment finds it
    token: Any  # what it expects next; anything without a candidate


class Workspace(NamedTuple):
    """Arrays that a step writes, as compiled code allocates none; int64 [NUM_CANDIDATES] each."""

    found: Candidates
    key: IntArray  # of matches: the one with the larger key comes first; -1 for none
    margin: IntArray  # see `choose.margins`
    class_id: IntArray  # -1 where there is no candidate


@rule
def is_settled(alignment: Alignment) -> Any:
    """Whether the output has followed the prediction for so long that nothing before a match is compared."""
    return (alignment.in_sync > 0) & (alignment.num_common >= MAX_MATCH)


@rule
def key_of(matched: int, common: int, tie: int) -> int:
    """The place of a match in the order, the best last."""
    return (matched - 1) * TIE + common * COMMON_TIE + tie

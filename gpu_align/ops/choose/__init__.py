"""Which candidate is drafted, and how many of its tokens? README.md has the classes; here are their numbers."""

from typing import Any

from .. import match
from ..layout import Alignment
from ..rules import int32, rule, where

#: Matched length -> bucket: the first length of each bucket; bucket 0 is "nothing matched".
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
#: Margin -> bucket likewise; bucket 0 is "a match that disagrees is four or more tokens longer".
MARGIN_EDGES = (-3, -1, 0, 1, 2, 3, 5, 9, 17)
NUM_LENGTHS, NUM_MARGINS = len(LENGTH_EDGES) + 1, len(MARGIN_EDGES) + 1
#: Alignment buckets: 0 at the cursor; 1 next to it; elsewhere in the prediction with a score deficit up to
#: `CLOSE_DEFICIT`, above; in the context.
ALIGNMENT_CLOSE, ALIGNMENT_FAR, ALIGNMENT_CONTEXT, NUM_ALIGNMENTS = range(2, 6)
CLOSE_DEFICIT = 16
#: Adherence: how much of the output was in sync, from `ADHERENCE_LOST` up.
ADHERENCE_LOST, NUM_ADHERENCES = 0, 3
NUM_CLASSES = NUM_LENGTHS * NUM_MARGINS * NUM_ALIGNMENTS * NUM_ADHERENCES
#: Probabilities are integers over this, so that kernel and reference add them up to the same bits.
SURVIVAL_ONE = 1 << 16
#: K at most: expected drafts, ``K * SURVIVAL_ONE`` of them at most, are below `EXACT_PREFIX`.
MAX_DRAFT_TOKENS = 256
#: More than any candidate is expected to get accepted, and small enough to be part of a key of 31 bits.
EXACT_PREFIX = (1 << 26) - 1


@rule
def pack_class(length: int, margin: int, alignment: int, adherence: int) -> int:
    """The class of a candidate with these four buckets."""
    return ((length * NUM_MARGINS + margin) * NUM_ALIGNMENTS + alignment) * NUM_ADHERENCES + adherence


def unpack_class(class_id: Any) -> tuple[Any, Any, Any, Any]:
    """The buckets of length, margin, alignment and adherence of a class, or of an array of classes: the inverse of
    `pack_class`."""
    rest, adherence = class_id // NUM_ADHERENCES, class_id % NUM_ADHERENCES
    rest, alignment = rest // NUM_ALIGNMENTS, rest % NUM_ALIGNMENTS
    return rest // NUM_MARGINS, rest % NUM_MARGINS, alignment, adherence


@rule
def deficit_of(ahead: int) -> int:
    """The score deficit of a position while the output is in sync: the tokens skipped, and more to go back."""
    return where(ahead > 0, ahead, -ahead + 2)


@rule
def alignment_bucket(ahead: int, deficit: int) -> int:
    """Alignment bucket of a position in the prediction, so far ahead of the cursor and with this score deficit."""
    bucket = where(deficit <= CLOSE_DEFICIT, ALIGNMENT_CLOSE, ALIGNMENT_FAR)
    return where((ahead == 0) | (ahead == 1), ahead, bucket)


@rule
def adherence_of(num_in_sync: int, num_output: int) -> int:
    """Which of the shares 1/8 and 1/2 of the output were in sync with the prediction: 0, 1 or 2 of them."""
    return int32(num_in_sync * 8 >= num_output) + int32(num_in_sync * 2 >= num_output)


@rule
def is_exact_prefix(alignment: Alignment, num_output: int) -> Any:
    """Whether the whole output, at most `MAX_MATCH` tokens, is the beginning of the prediction.

    With an adherence prior in `num_output` it never is: the beginning of a memory says nothing.
    """
    is_all = (alignment.cursor == num_output) & (alignment.num_in_sync == num_output)
    return (alignment.in_sync > 0) & is_all & (num_output <= match.MAX_MATCH)

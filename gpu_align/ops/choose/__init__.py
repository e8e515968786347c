"""Which candidate is drafted, and how many of its tokens? README.md has the classes; here are their numbers."""

from typing import Any

from ..layout import TEXT_MEMORY, TEXT_PREDICTION, Alignment
from ..match import MAX_MATCH
from ..rules import rule, where

#: Matched length -> bucket: the first length of each bucket; bucket 0 is "nothing matched".
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
#: Margin -> bucket likewise; bucket 0 is "a match that disagrees is four or more tokens longer".
MARGIN_EDGES = (-3, -1, 0, 1, 2, 3, 5, 9, 17)
NUM_LENGTHS, NUM_MARGINS = len(LENGTH_EDGES) + 1, len(MARGIN_EDGES) + 1
#: Alignment buckets: at the cursor; 1 ahead; elsewhere in the prediction with a score deficit up to
#: `CLOSE_DEFICIT`, above; in the context.
(
    ALIGNMENT_AT_CURSOR, ALIGNMENT_NEXT, ALIGNMENT_CLOSE, ALIGNMENT_FAR, ALIGNMENT_CONTEXT, NUM_ALIGNMENTS,
) = range(6)  # fmt: skip
CLOSE_DEFICIT = 16
#: Score deficit of a position before the cursor while in sync, beside the distance; and outside of the LCS row.
BACKWARD_DEFICIT, NO_SCORE = 2, 99
#: Adherence: the share of the output that was in sync: below 1/`LOST_SHARE`, below 1/`LOOSE_SHARE`, above.
LOST_SHARE, LOOSE_SHARE = 8, 2
ADHERENCE_LOST, ADHERENCE_LOOSE, ADHERENCE_CLOSE, NUM_ADHERENCES = range(4)
#: Output tokens that count as out of sync before the first, where the text is a memory.
MEMORY_PRIOR = 32
NUM_CLASSES = NUM_LENGTHS * NUM_MARGINS * NUM_ALIGNMENTS * NUM_ADHERENCES
#: Probabilities are integers over this, so that kernel and reference add them up to the same bits.
SURVIVAL_ONE = 1 << 16
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
    return where(ahead > 0, ahead, -ahead + BACKWARD_DEFICIT)


@rule
def alignment_bucket(ahead: int, deficit: int) -> int:
    """Alignment bucket of a position in the prediction, so far ahead of the cursor and with this score deficit."""
    bucket = where(deficit <= CLOSE_DEFICIT, ALIGNMENT_CLOSE, ALIGNMENT_FAR)
    # At the cursor and next to it the distance is the bucket.
    return where((ahead == 0) | (ahead == ALIGNMENT_NEXT), ahead, bucket)


@rule
def prior_of(text_kind: int) -> int:
    """Output tokens that count as out of sync before the first."""
    return where(text_kind == TEXT_PREDICTION, 0, MEMORY_PRIOR)


@rule
def adherence_of(num_in_sync: int, num_output: int) -> int:
    """Bucket of the share of the output that was in sync with the prediction."""
    is_loose = num_in_sync * LOOSE_SHARE < num_output
    adherence = where(is_loose, ADHERENCE_LOOSE, ADHERENCE_CLOSE)
    return where(num_in_sync * LOST_SHARE < num_output, ADHERENCE_LOST, adherence)


@rule
def is_exact_prefix(alignment: Alignment, num_output: int) -> Any:
    """Whether the whole output, at most `MAX_MATCH` tokens, is the beginning of the prediction.

    With an adherence prior in `num_output` it never is: the beginning of a memory says nothing.
    """
    is_all = (alignment.cursor == num_output) & (alignment.num_in_sync == num_output)
    return (alignment.in_sync > 0) & is_all & (num_output <= MAX_MATCH)


@rule
def limits_of(text_kind: int) -> int:
    """The row at which the limits of a text kind begin in the survival tables."""
    return where(text_kind > TEXT_MEMORY, (text_kind - TEXT_MEMORY) * NUM_CLASSES, 0)

"""Which candidate is drafted, and how many of its tokens? README.md has the classes; here are their numbers."""

from typing import Any

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


def unpack_class(class_id: Any) -> tuple[Any, Any, Any, Any]:
    """The buckets of length, margin, alignment and adherence of a class, or of an array of classes: the inverse of
    `pack_class`."""
    rest, adherence = class_id // NUM_ADHERENCES, class_id % NUM_ADHERENCES
    rest, alignment = rest // NUM_ALIGNMENTS, rest % NUM_ALIGNMENTS
    return rest // NUM_MARGINS, rest % NUM_MARGINS, alignment, adherence

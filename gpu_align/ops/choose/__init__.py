"""Which candidate is drafted, and how many of its tokens? README.md has the classes; here are their numbers."""

from typing import Any, NamedTuple

from .. import match
from ..layout import Alignment
from ..rules import int32, int64, rule, where

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
#: `TextRules.limits` from here on: the text is several samples of one prompt. There the dissent takes the place of
#: the margin, and the agreement on the next `AHEAD` tokens that of the adherence.
SAMPLES, AHEAD = 3, 8
NUM_CLASSES = NUM_LENGTHS * NUM_MARGINS * NUM_ALIGNMENTS * NUM_ADHERENCES
#: Probabilities are integers over this, so that kernel and reference add them up to the same bits.
SURVIVAL_ONE = 1 << 16
#: K at most: expected drafts, ``K * SURVIVAL_ONE`` of them at most, are below `EXACT_PREFIX`.
MAX_DRAFT_TOKENS = 256
#: More than any candidate is expected to get accepted, and small enough to be part of a key of 31 bits.
EXACT_PREFIX = (1 << 26) - 1


class Choice(NamedTuple):
    """The text that is drafted from: a candidate's, or a recipe's tokens."""

    lane: Any  # of the candidate; -1 of a recipe
    source: Any  # of the text
    position: Any  # in the text; of a recipe: which one it is
    matched: Any  # tokens before the position that agree; 0 of a recipe
    #: Of the confidences: the class, `NUM_CLASSES` more of a hot request; or which recipe it is.
    table_row: Any
    num: Any  # drafts that it is good for; 0 without a candidate
    expected: Any  # how many of them are expected to be accepted, in units of 1/SURVIVAL_ONE


@rule
def better(a: Choice, b: Choice) -> Choice:
    """The choice of which more drafts are expected to be accepted; `a` of equal ones."""
    is_b = b.expected > a.expected
    return Choice(
        where(is_b, b.lane, a.lane), where(is_b, b.source, a.source), where(is_b, b.position, a.position),
        where(is_b, b.matched, a.matched), where(is_b, b.table_row, a.table_row), where(is_b, b.num, a.num),
        where(is_b, b.expected, a.expected),
    )  # fmt: skip


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
def alignment_bucket(ahead: int, deficit: int) -> int:
    """Alignment bucket of a position in the prediction, so far ahead of the cursor and with this score deficit."""
    bucket = where(deficit <= CLOSE_DEFICIT, ALIGNMENT_CLOSE, ALIGNMENT_FAR)
    return where((ahead == 0) | (ahead == 1), ahead, bucket)


@rule
def adherence_of(num_in_sync: int, num_output: int) -> int:
    """Which of the shares 1/8 and 1/2 of the output were in sync with the prediction: 0, 1 or 2 of them."""
    return int32(num_in_sync * 8 >= num_output) + int32(num_in_sync * 2 >= num_output)


@rule
def ahead_of(ahead: int, token: int) -> int:
    """A hash of tokens and of one more, 0 to 2**31 - 1."""
    return int32((int64(ahead) * 16777619 + token) & 0x7FFFFFFF)


@rule
def is_exact_prefix(alignment: Alignment, num_output: int) -> Any:
    """Whether the whole output, at most `MAX_MATCH` tokens, is the beginning of the prediction.

    With an adherence prior in `num_output` it never is: the beginning of a memory says nothing.
    """
    is_all = (alignment.cursor == num_output) & (alignment.num_in_sync == num_output)
    return (alignment.in_sync > 0) & is_all & (num_output <= match.MAX_MATCH)


def survival_units(probability: float) -> int:
    """A probability as the tables hold it."""
    return round(probability * SURVIVAL_ONE)


class SurvivalTables(NamedTuple):
    """Tensors of one drafter, on its device, for its K and its thresholds."""

    #: [6 * NUM_CLASSES] int32, 0 to K: drafts after which the survival is below the threshold, for each value of
    #: `TextRules.limits`.
    max_draft_len: Any
    #: [6 * NUM_CLASSES, K + 1] int32 in units of 1/`SURVIVAL_ONE`: how many of the first ``min(n, max_draft_len)``
    #: drafts are accepted. A kernel loads this beside `max_draft_len`, not after it.
    expected_accepted: Any
    #: [5 * NUM_CLASSES, K] float32: P(draft k is accepted | the ones before it are), 0 < p <= 1; then that of a
    #: hot request; then those of samples, from the coolest up.
    confidence: Any

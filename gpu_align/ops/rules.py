"""The scalar rules that kernels and references share, each written once, in plain Python.

`ops.host` compiles them by Numba for the references, `ops.device` by Triton for the kernels, where arguments may
be blocks: so a rule has no branch but `where`, and no loop. Integer division of what may be below 0 differs
between the two: no rule does it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from .align import EVERY_BIT, MATCH_WEIGHT
from .choose import (
    ADHERENCE_CLOSE,
    ADHERENCE_LOOSE,
    ADHERENCE_LOST,
    ALIGNMENT_CLOSE,
    ALIGNMENT_FAR,
    ALIGNMENT_NEXT,
    BACKWARD_DEFICIT,
    CLOSE_DEFICIT,
    LOOSE_SHARE,
    LOST_SHARE,
    MEMORY_PRIOR,
    NUM_ADHERENCES,
    NUM_ALIGNMENTS,
    NUM_CLASSES,
    NUM_MARGINS,
)
from .layout import (
    HASH,
    SOURCE_CONTEXT,
    SOURCE_MEMORY,
    SOURCE_NONE,
    SOURCE_PREDICTION,
    SOURCE_RECIPE,
    TEXT_CONTEXT,
    TEXT_MEMORY,
    TEXT_PREDICTION,
    TEXT_RECIPE,
    WAYS,
    WINDOW,
    Alignment,
    Choice,
)
from .match import MAX_MATCH


def where(condition: int, a: int, b: int) -> int:
    return a if condition else b


def int64(value: int) -> int:
    return int(value)


def int32(value: int) -> int:
    return int(value)


def bucket_of(token: int, shift: int) -> int:
    """The upper ``32 - shift`` bits of the token's product with `HASH`, modulo 2**32."""
    return int32(((int64(token) * HASH) & 0xFFFFFFFF) >> shift)


def num_ways(shift: int) -> int:
    """Entries of a context's index: `WAYS` for each of ``2 ** (32 - shift)`` buckets."""
    return (shift * 0 + WAYS) << (32 - shift)


def rank_of(position: int, anchor: int) -> int:
    """Ties: the position nearest to the anchor has the lowest rank; at the same distance the one ahead of it."""
    return where(position >= anchor, 2 * (position - anchor), 2 * (anchor - position) + 1)


def position_of(rank: int, anchor: int) -> int:
    """The position that has this rank."""
    return anchor + where(rank % 2 == 0, rank // 2, -(rank // 2))


def starts_over(total: int, seen: int) -> bool:
    """Whether nothing is known of a request: it is new, or tokens of it were taken back."""
    return (seen <= 0) | (total < seen)


def extend_row(row: int, matches: int) -> int:
    """The LCS row after one more output token.

    Bit j of a row is 1 where the LCS of the output since it diverged and the first j + 1 tokens after the anchor
    is longer than that with the first j. matches: bit j is 1 where token j after the anchor is the new one.
    """
    flat = ~row & EVERY_BIT
    taken = flat & matches
    # One addition: a carry runs through the run of bits up to the next that the row has (Hyyrö 2004).
    return ~((flat + taken) | (flat - taken)) & EVERY_BIT


def count_ones(word: int) -> int:
    """The bits of an int64 that are 1: neighbouring fields of 1, 2, 4, … bits, each a count, become one."""
    word = (word & 0x5555555555555555) + ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    return int32((word + (word >> 32)) & 0x7F)


def score_at(row: int, j: int) -> int:
    """Of the position j after the anchor, ``0 <= j <= WINDOW``: `MATCH_WEIGHT` for each common token, less j."""
    return count_ones((row << int64(-j + WINDOW)) & EVERY_BIT) * MATCH_WEIGHT - j


def deficit_of(ahead: int) -> int:
    """The score deficit of a position while the output is in sync: the tokens skipped, and more to go back."""
    return where(ahead > 0, ahead, -ahead + BACKWARD_DEFICIT)


def alignment_bucket(ahead: int, deficit: int) -> int:
    """Alignment bucket of a position in the prediction, so far ahead of the cursor and with this score deficit."""
    bucket = where(deficit <= CLOSE_DEFICIT, ALIGNMENT_CLOSE, ALIGNMENT_FAR)
    # At the cursor and next to it the distance is the bucket.
    return where((ahead == 0) | (ahead == ALIGNMENT_NEXT), ahead, bucket)


def prior_of(text_kind: int) -> int:
    """Output tokens that count as out of sync before the first."""
    return where(text_kind == TEXT_PREDICTION, 0, MEMORY_PRIOR)


def adherence_of(num_in_sync: int, num_output: int) -> int:
    """Bucket of the share of the output that was in sync with the prediction."""
    is_loose = num_in_sync * LOOSE_SHARE < num_output
    adherence = where(is_loose, ADHERENCE_LOOSE, ADHERENCE_CLOSE)
    return where(num_in_sync * LOST_SHARE < num_output, ADHERENCE_LOST, adherence)


def pack_class(length: int, margin: int, alignment: int, adherence: int) -> int:
    """The class of a candidate with these four buckets."""
    return ((length * NUM_MARGINS + margin) * NUM_ALIGNMENTS + alignment) * NUM_ADHERENCES + adherence


def is_exact_prefix(alignment: Alignment, num_output: int) -> Any:
    """Whether the whole output, at most `MAX_MATCH` tokens, is the beginning of the prediction.

    With an adherence prior in `num_output` it never is: the beginning of a memory says nothing.
    """
    is_all = (alignment.cursor == num_output) & (alignment.num_in_sync == num_output)
    return (alignment.in_sync > 0) & is_all & (num_output <= MAX_MATCH)


def limits_of(text_kind: int) -> int:
    """The row at which the limits of a text kind begin in the survival tables."""
    return where(text_kind > TEXT_MEMORY, (text_kind - TEXT_MEMORY) * NUM_CLASSES, 0)


def wraps_around(matched: int, period: int) -> bool:
    """Whether the output repeats itself: a match as long as the text after its position, `period` tokens."""
    return matched >= period


def source_of(kind: int, length: int) -> int:
    """The `Source` of a draft of `length` tokens from a text of this kind."""
    source = where(kind == TEXT_PREDICTION, SOURCE_PREDICTION, SOURCE_MEMORY)
    source = where(kind == TEXT_CONTEXT, SOURCE_CONTEXT, source)
    source = where(kind == TEXT_RECIPE, SOURCE_RECIPE, source)
    return where(length > 0, source, SOURCE_NONE)


def better(a: Choice, b: Choice) -> Choice:
    """The choice of which more drafts are expected to be accepted; `a` of equal ones."""
    is_b = b.expected > a.expected
    return Choice(
        where(is_b, b.lane, a.lane), where(is_b, b.kind, a.kind), where(is_b, b.position, a.position),
        where(is_b, b.matched, a.matched), where(is_b, b.row, a.row), where(is_b, b.num, a.num),
        where(is_b, b.expected, a.expected),
    )  # fmt: skip


def compile_all(compile_rule: Callable[[FunctionType], Any], names: dict[str, Any]) -> dict[str, Any]:
    """Every rule, compiled, by name; a rule that `names` has is taken from there, as is what rules refer to."""
    twins = {**globals(), **names}
    for name, rule in globals().items():
        if isinstance(rule, FunctionType) and name not in (*names, "compile_all"):
            twins[name] = compile_rule(FunctionType(rule.__code__, twins, name))
    return twins

"""Device functions that look up where a text ends like the output.

In the interpreter a constexpr on the left of a tensor makes a constexpr, so constants stand on the right.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..align.kernel import score_deficit
from ..device import align, layout, match
from ..index.kernel import load_back_clamped, nearest
from . import Candidates

#: Lanes for all positions that are compared, which are those of a warp; tokens that are compared at once, first
#: and then.
LOOKUP_LANES = tl.constexpr(32)
FIRST_BACK, NEXT_BACK = tl.constexpr(3), tl.constexpr(8)


@triton.jit
def _compare_back(p_text, b_most, p_last, num_last, BACK: tl.constexpr):
    """How many of BACK tokens from `p_text` and `p_last` on backwards agree, [lanes] int32, at most `b_most`.

    No load has a mask: a compiler gives each of many masks a predicate, has few of them, and loads in turns.
    """
    # Lanes that are done load one token all together: each place in memory takes a load longer.
    p_text = tl.where(b_most > 0, p_text, p_last)
    last = load_back_clamped(p_last, num_last - 1, BACK)
    texts = load_back_clamped(p_text, tl.maximum(b_most - 1, 0), BACK)
    b_run = tl.full(b_most.shape, BACK, tl.int32)
    for i in tl.static_range(BACK - 1, -1, -1):  # the nearest that differs decides
        b_run = tl.where(texts[i] == last[i], b_run, i)
    return tl.minimum(b_run, b_most)


class Lookups(NamedTuple):
    """All positions that are compared, a lane each: of the prediction's bucket, then of the context's."""

    m_context: Any  # [LOOKUP_LANES]: whether the position is one of the context
    position: Any  # [LOOKUP_LANES] int32
    m_live: Any  # [LOOKUP_LANES]


@triton.jit
def _lookups(request, bucket, cursor):
    prediction, context = request.prediction, request.context
    o_c = tl.arange(0, LOOKUP_LANES)
    o_way = o_c - layout.WAYS
    m_context = (o_way >= 0) & (o_way < tl.where(context.length > 0, layout.WAYS, 0))
    p_ways = context.index.ways + layout.bucket_of(request.last, context.index.shift) * layout.WAYS
    b_way = tl.load(p_ways + o_way, mask=m_context, other=0)
    o_one = tl.arange(0, 1)
    begin, end = nearest(prediction, (bucket[0] + o_one, bucket[1] + o_one), cursor, layout.WAYS)
    m_prediction = o_c < tl.minimum(end - begin, layout.WAYS)
    b_near = tl.load(prediction.index.positions + begin + o_c, mask=m_prediction, other=0)
    m_context &= (b_way > 0) & (b_way < context.length)
    return Lookups(m_context, tl.where(m_context, b_way, b_near), m_prediction | m_context)


@triton.jit
def _compare(request, lookups, alignment):
    """How many of the tokens before each position are the last ones of the request, [LOOKUP_LANES] int32."""
    num_last = tl.where(lookups.m_context, request.total, request.total - request.output_start)
    b_most = tl.where(lookups.m_live, tl.minimum(tl.minimum(lookups.position, num_last), match.MAX_MATCH), 0)
    b_most = tl.maximum(b_most, 0)
    num_common = tl.where(alignment.in_sync > 0, alignment.num_common, 0)
    m_known = (lookups.position == alignment.cursor) & ~lookups.m_context & (num_common >= b_most)
    b_known = tl.where(m_known, b_most, 0)
    b_most -= b_known
    p_text = tl.where(lookups.m_context, request.tokens, request.prediction.tokens) + lookups.position - 1
    p_last = request.tokens + request.total - 1
    # Most matches end among the first `FIRST_BACK`.
    b_length = _compare_back(p_text, b_most, p_last, request.total, FIRST_BACK)
    b_left = tl.where(b_length < FIRST_BACK, 0, b_most - FIRST_BACK)
    done = FIRST_BACK
    while tl.max(b_left, axis=0) > 0:
        b_run = _compare_back(p_text - done, b_left, p_last - done, request.total - done, NEXT_BACK)
        b_length += b_run
        b_left = tl.where(b_run < NEXT_BACK, 0, b_left - NEXT_BACK)
        done += NEXT_BACK
    return b_known + b_length


@triton.jit
def _compare_before(request, lookups, b_matched):
    """Count what is in common before each match, [LOOKUP_LANES] int32."""
    b_before = tl.where(lookups.m_live, lookups.position - b_matched, 0)
    num_last = tl.where(lookups.m_context, request.total, request.total - request.output_start)
    b_last = tl.where(lookups.m_live, num_last - b_matched, 0)
    # A lane that has no tokens before its match loads the last ones of the request, and compares none.
    p_last = request.tokens + request.total - 1 - tl.where(b_last > 0, b_matched, 0)
    p_text = tl.where(lookups.m_context, request.tokens, request.prediction.tokens) + b_before - 1
    p_text = tl.where(b_before > 0, p_text, p_last)
    b_most = tl.where(b_last > 0, b_last, request.total) - 1
    lasts = load_back_clamped(p_last, b_most, match.COMMON_WINDOW)
    texts = load_back_clamped(p_text, tl.where(b_before > 0, b_before - 1, b_most), match.COMMON_WINDOW)
    b_row = tl.full(b_matched.shape, -1, tl.int32)
    for b in tl.static_range(match.COMMON_WINDOW):
        b_matches = tl.zeros_like(b_row)
        for a in tl.static_range(match.COMMON_WINDOW):
            m_same = (texts[a] == lasts[b]) & (b_before > a) & (b_last > b)
            b_matches |= m_same.to(tl.int32) << a
        b_row = align.extend_row(b_row, b_matches)
    return align.count_ones(~b_row)


@triton.jit
def _best_keys(lookups, b_matched, b_common, cursor, min_match):
    """The `NUM_MATCHES` largest keys of each text in its lanes, [CANDIDATE_LANES] int32; -1 for none."""
    o_lookup = tl.arange(0, LOOKUP_LANES)
    o_c = tl.arange(0, match.CANDIDATE_LANES)
    b_rank = align.rank_of(lookups.position, cursor)
    b_tie = tl.where(lookups.m_context, lookups.position, -b_rank + (match.COMMON_TIE - 1))
    m_match = lookups.m_live & (b_matched >= min_match)
    b_key = tl.where(m_match, match.key_of(b_matched, b_common, b_tie), -1)
    b_prediction = tl.where(o_lookup < layout.WAYS, b_key, -1)
    b_context = tl.where(o_lookup < layout.WAYS, -1, b_key)
    b_best = tl.full([match.CANDIDATE_LANES], -1, tl.int32)
    for i in tl.static_range(match.NUM_MATCHES):
        top = tl.max(b_prediction, axis=0)
        top_context = tl.max(b_context, axis=0)
        b_best = tl.where(o_c == i, top, tl.where(o_c == match.FIRST_CONTEXT + i, top_context, b_best))
        b_prediction = tl.where(b_prediction == top, -1, b_prediction)
        b_context = tl.where(b_context == top_context, -1, b_context)
    return b_best


@triton.jit
def candidates(request, bucket, alignment, settings):
    cursor = alignment.cursor
    lookups = _lookups(request, bucket, cursor)
    b_matched = _compare(request, lookups, alignment)
    b_common = tl.zeros_like(b_matched)
    if match.is_settled(alignment) == 0:
        b_common = _compare_before(request, lookups, b_matched)
    b_key = _best_keys(lookups, b_matched, b_common, cursor, settings.min_match)
    o_c = tl.arange(0, match.CANDIDATE_LANES)
    b_source = tl.where(o_c < match.FIRST_CONTEXT, request.prediction.rules.source, layout.TEXT_CONTEXT)
    b_tie = b_key % match.COMMON_TIE
    b_rank = -b_tie + (match.COMMON_TIE - 1)
    b_position = tl.where(b_source == layout.TEXT_CONTEXT, b_tie, align.position_of(b_rank, cursor))
    b_position = tl.where(b_key >= 0, b_position, -1)
    b_length = tl.where(b_key >= 0, b_key // match.TIE + 1, 0)
    b_before = tl.where(
        (b_key >= 0) & (b_source == layout.TEXT_CONTEXT), b_key % match.TIE // match.COMMON_TIE, 0
    )
    for i in tl.static_range(match.FIRST_CONTEXT - match.AT_CURSOR):
        # Where anything matches there, the position is in the bucket of the last token, among the nearest.
        m_lookup = lookups.m_live & ~lookups.m_context & (lookups.position == cursor + i)
        m_here = (o_c == match.AT_CURSOR + i) & (cursor + i < request.prediction.length)
        b_position = tl.where(m_here, cursor + i, b_position)
        b_length = tl.where(m_here, tl.max(tl.where(m_lookup, b_matched, 0), axis=0), b_length)
    p_next = tl.where(b_source == layout.TEXT_CONTEXT, request.tokens, request.prediction.tokens) + b_position
    b_token = tl.load(p_next, mask=b_position >= 0, other=0)
    b_deficit = score_deficit(b_position, alignment)
    return Candidates(b_source, b_position, b_length, b_length + b_before // 2, b_deficit, b_token)

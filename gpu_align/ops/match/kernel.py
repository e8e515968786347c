"""Device functions that look up where a text ends like the output.

In the interpreter a constexpr on the left of a tensor makes a constexpr, so constants stand on the right.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import (
    AT_CURSOR,
    CURSOR_AHEAD,
    FIRST_BACK,
    FIRST_CONTEXT,
    LANES,
    LOOKUP_LANES,
    MAX_MATCH,
    NEAREST,
    NEXT_BACK,
    NUM_MATCHES,
    TIE,
    WAYS,
    bucket_of,
    position_of,
    rank_of,
)
from ..index.kernel import load_back_clamped, nearest
from ..layout import Bucket


@triton.jit
def _common_run(last, texts, BACK: tl.constexpr):
    """How many of the first of BACK tokens agree, [lanes] int32."""
    b_run = tl.full(texts[0].shape, BACK, tl.int32)
    for i in tl.static_range(BACK - 1, -1, -1):  # the nearest that differs decides
        b_run = tl.where(texts[i] == last[i], b_run, i)
    return b_run


@triton.jit
def match_lengths(b_text_ptr, b_position, b_most, p_last, num_last):
    """[lanes] int32. b_text_ptr: [lanes], beginnings of texts that have a token. b_most: [lanes], at most the
    position and `num_last`, the tokens before `p_last`.

    The first `FIRST_BACK` tokens are compared at once: most matches end among them; then `NEXT_BACK` at once. No
    load has a mask: a compiler gives each of many masks a predicate, has few of them, and loads in turns.
    """
    # The tokens that are compared, from the last on; without any, the first token of the text.
    p_first = b_text_ptr + tl.where(b_most > 0, b_position - 1, 0)
    last = load_back_clamped(p_last - 1, num_last - 1, FIRST_BACK)
    texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), FIRST_BACK)
    b_length = tl.minimum(_common_run(last, texts, FIRST_BACK), b_most)
    b_most = tl.where(b_length < FIRST_BACK, 0, b_most - FIRST_BACK)
    p_first -= FIRST_BACK
    p_last -= FIRST_BACK
    num_last -= FIRST_BACK
    while tl.max(b_most, axis=0) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        p_first = tl.where(b_most > 0, p_first, p_last - 1)
        next_last = load_back_clamped(p_last - 1, num_last - 1, NEXT_BACK)
        next_texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), NEXT_BACK)
        b_run = tl.minimum(_common_run(next_last, next_texts, NEXT_BACK), b_most)
        b_length += b_run
        b_most = tl.where(b_run < NEXT_BACK, 0, b_most - NEXT_BACK)
        p_first -= NEXT_BACK
        p_last -= NEXT_BACK
        num_last -= NEXT_BACK
    return b_length


class Lookups(NamedTuple):
    """All positions that are compared, a lane each: of the prediction's bucket, the context's, at the cursor."""

    m_context: Any  # [LOOKUP_LANES]: whether the position is one of the context
    m_cursor: Any  # [LOOKUP_LANES]: whether it is a candidate however much matches
    position: Any  # [LOOKUP_LANES] int32
    m_live: Any  # [LOOKUP_LANES]


@triton.jit
def _lookups(request, bucket, cursor):
    prediction, context = request.prediction, request.context
    o_c = tl.arange(0, LOOKUP_LANES)
    o_way = o_c - NEAREST
    token = tl.load(context.tokens + context.length - 1, mask=context.length > 0, other=0)
    m_context = (o_way >= 0) & (o_way < tl.where(context.is_used, WAYS, 0))
    p_ways = context.index.ways + bucket_of(token, context.index.shift) * WAYS
    b_way = tl.load(p_ways + o_way, mask=m_context, other=0)
    o_one = tl.arange(0, 1)
    begin, end = nearest(prediction, Bucket(bucket.begin + o_one, bucket.end + o_one), cursor)
    m_prediction = o_c < tl.minimum(end - begin, NEAREST)
    b_near = tl.load(prediction.index.positions + begin + o_c, mask=m_prediction, other=0)
    ahead = o_way - WAYS
    o_cursor = cursor + ahead
    m_cursor = (ahead >= 0) & (ahead <= CURSOR_AHEAD) & (o_cursor < prediction.length)
    m_context &= (b_way > 0) & (b_way < context.length)
    o_position = tl.where(m_cursor, o_cursor, tl.where(m_context, b_way, b_near))
    return Lookups(m_context, m_cursor, o_position, m_prediction | m_context | m_cursor)


@triton.jit
def _keys(lookups, b_matched, cursor, settings):
    """The order of the matches, [LOOKUP_LANES] int32, -1 for none."""
    b_rank = rank_of(lookups.position, cursor)
    b_key = (b_matched - 1) * TIE + tl.where(lookups.m_context, lookups.position, -b_rank + (TIE - 1))
    b_least = tl.where(lookups.m_context, settings.min_context_match, settings.min_match)
    return tl.where(lookups.m_live & ~lookups.m_cursor & (b_matched >= b_least), b_key, -1)


@triton.jit
def _best_matches(b_key, cursor):
    """``(position, matched)`` of the `NUM_MATCHES` largest keys of each text, [LANES] int32; -1, 0 for none."""
    o_lookup = tl.arange(0, LOOKUP_LANES)
    o_c = tl.arange(0, LANES)
    b_prediction = tl.where(o_lookup < NEAREST, b_key, -1)
    b_context = tl.where(o_lookup < NEAREST, -1, b_key)
    b_best = tl.full([LANES], -1, tl.int32)
    for i in tl.static_range(NUM_MATCHES):
        top = tl.max(b_prediction, axis=0)
        top_context = tl.max(b_context, axis=0)
        b_best = tl.where(o_c == i, top, tl.where(o_c == FIRST_CONTEXT + i, top_context, b_best))
        b_prediction = tl.where(b_prediction == top, -1, b_prediction)
        b_context = tl.where(b_context == top_context, -1, b_context)
    b_tie = b_best % TIE
    o_position = tl.where(o_c < FIRST_CONTEXT, position_of(-b_tie + (TIE - 1), cursor), b_tie)
    return tl.where(b_best >= 0, o_position, -1), tl.where(b_best >= 0, b_best // TIE + 1, 0)


@triton.jit
def at_lane(b_values, lane):
    """One lane's value."""
    return tl.sum(tl.where(tl.arange(0, LANES) == lane, b_values, 0), axis=0)


class Candidates(NamedTuple):
    """The positions from which the next tokens may be read, in the order that ties prefer."""

    in_context: Any  # [LANES]: whether the position is one of the context
    position: Any  # [LANES] int32; -1: there is no candidate
    matched: Any  # [LANES] int32
    token: Any  # [LANES] int32: what it expects next


@triton.jit
def candidates(request, bucket, alignment, settings):
    """All candidates of a request that stands where `alignment` says. bucket: of the output's last token."""
    prediction, context, cursor = request.prediction, request.context, alignment.cursor
    lookups = _lookups(request, bucket, cursor)
    p_last = context.tokens + context.length
    num_last = tl.where(lookups.m_context, context.length, context.length - request.output_start)
    b_most = tl.where(lookups.m_live, tl.minimum(tl.minimum(lookups.position, num_last), MAX_MATCH), 0)
    b_most = tl.maximum(b_most, 0)
    num_common = tl.where(alignment.in_sync > 0, alignment.num_common, 0)
    m_known = (lookups.position == cursor) & ~lookups.m_context & (num_common >= b_most)
    b_known = tl.where(m_known, b_most, 0)
    p_text = tl.where(lookups.m_context, context.tokens, prediction.tokens)
    b_matched = b_known + match_lengths(p_text, lookups.position, b_most - b_known, p_last, context.length)
    o_c = tl.arange(0, LANES)
    o_lookup = tl.arange(0, LOOKUP_LANES)
    b_position, b_length = _best_matches(_keys(lookups, b_matched, cursor, settings), cursor)
    for i in tl.static_range(CURSOR_AHEAD + 1):
        m_lookup = lookups.m_cursor & (o_lookup == NEAREST + WAYS + i)
        matched = tl.max(tl.where(m_lookup, b_matched, -1), axis=0)
        m_here = (o_c == AT_CURSOR + i) & (matched >= 0)
        b_position = tl.where(m_here, cursor + i, b_position)
        b_length = tl.where(m_here, matched, b_length)
    m_live, m_context = b_position >= 0, o_c >= FIRST_CONTEXT
    p_next = tl.where(m_context, context.tokens, prediction.tokens) + b_position
    return Candidates(m_context, b_position, b_length, tl.load(p_next, mask=m_live, other=0))

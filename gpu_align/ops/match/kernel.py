"""Device functions that look up where a text ends like the output.

In the interpreter a constexpr on the left of a tensor makes a constexpr, so constants stand on the right.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import (
    AT_CURSOR,
    FIRST_CONTEXT,
    LANES,
    LOOKUP_LANES,
    MAX_MATCH,
    NEAREST,
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
def match_lengths(
    b_text_ptr, b_position, b_most, p_last, num_last, last, FIRST: tl.constexpr, BACK: tl.constexpr
):
    """[lanes] int32. b_text_ptr: [lanes] or one, beginnings of texts that have a token. b_most: [lanes], at most
    the position and `num_last`, the tokens before `p_last`. last: the first FIRST of these, `load_back_clamped`,
    or more. These are compared at once: most matches end among them; then BACK tokens at once.

    No load has a mask: a compiler gives each of many masks a predicate, has few of them, and loads in turns.
    """
    # The tokens that are compared, from the last on; without any, the first token of the text.
    p_first = b_text_ptr + tl.where(b_most > 0, b_position - 1, 0)
    b_length = tl.zeros_like(b_most)
    if FIRST > 0:
        nearest_texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), FIRST)
        b_length = tl.minimum(_common_run(last, nearest_texts, FIRST), b_most)
        b_most = tl.where(b_length < FIRST, 0, b_most - FIRST)
        p_first -= FIRST
        p_last -= FIRST
        num_last -= FIRST
    while tl.max(b_most, axis=0) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        p_first = tl.where(b_most > 0, p_first, p_last - 1)
        next_last = load_back_clamped(p_last - 1, num_last - 1, BACK)
        texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), BACK)
        b_run = tl.minimum(_common_run(next_last, texts, BACK), b_most)
        b_length += b_run
        b_most = tl.where(b_run < BACK, 0, b_most - BACK)
        p_first -= BACK
        p_last -= BACK
        num_last -= BACK
    return b_length


@triton.jit
def _load_ways(context):
    """Latest positions behind the last token in the context, [LOOKUP_LANES] int32: from lane `NEAREST` on."""
    o_way = tl.arange(0, LOOKUP_LANES) - NEAREST
    token = tl.load(context.tokens + context.length - 1, mask=context.length > 0, other=0)
    m_way = (o_way >= 0) & (o_way < tl.where(context.is_used, WAYS, 0))
    b_way = tl.load(
        context.index.ways + bucket_of(token, context.index.shift) * WAYS + o_way, mask=m_way, other=0
    )
    return tl.where(b_way < context.length, b_way, 0)


@triton.jit
def _lane_keys(request, bucket, cursor, num_common, settings, last, o_way):
    """Keys of all matches, [LOOKUP_LANES] int32, -1 for none: lanes below `NEAREST` are in the prediction."""
    prediction, context = request.prediction, request.context
    o_c = tl.arange(0, LOOKUP_LANES)
    num_output = context.length - request.output_start
    m_context = (o_c >= NEAREST) & (o_c < tl.where(context.is_used, NEAREST + WAYS, 0))
    o_one = tl.arange(0, 1)
    begin, end = nearest(prediction, Bucket(bucket.begin + o_one, bucket.end + o_one), cursor)
    m_prediction = o_c < tl.minimum(end - begin, NEAREST)
    o_position = tl.load(prediction.index.positions + begin + o_c, mask=m_prediction, other=0)
    o_position = tl.where(m_context, o_way, o_position)
    num_last = tl.where(m_context, context.length, num_output)
    b_most = tl.maximum(tl.minimum(tl.minimum(o_position, num_last), MAX_MATCH), 0)
    b_known = tl.where(m_prediction & (o_position == cursor) & (num_common >= b_most), b_most, 0)
    p_text = tl.where(m_context, context.tokens, prediction.tokens)
    p_last = context.tokens + context.length
    b_matched = b_known + match_lengths(
        p_text, o_position, b_most - b_known, p_last, context.length, last, 3, 8
    )
    b_rank = rank_of(o_position, cursor)
    b_key = (b_matched - 1) * TIE + tl.where(m_context, o_position, -b_rank + (TIE - 1))
    b_least = tl.where(m_context, settings.min_context_match, settings.min_match)
    return tl.where(b_matched >= b_least, b_key, -1)


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
    """Where the next tokens may be read from, in the order that ties prefer."""

    in_context: Any  # [LANES]: whether the position is one of the context
    position: Any  # [LANES] int32; -1: there is no candidate
    matched: Any  # [LANES] int32
    token: Any  # [LANES] int32: what it expects next


@triton.jit
def candidates(request, bucket, alignment, settings):
    """All candidates of a request that stands where `alignment` says. bucket: of the output's last token."""
    prediction, context, cursor = request.prediction, request.context, alignment.cursor
    num_common = tl.where(alignment.in_sync > 0, alignment.num_common, 0)
    o_c = tl.arange(0, LANES)
    o_near = cursor + o_c - AT_CURSOR
    m_near = (o_c >= NUM_MATCHES) & (o_c < FIRST_CONTEXT) & (o_near >= 0) & (o_near < prediction.length)
    num_output = context.length - request.output_start
    b_most = tl.where(m_near, tl.maximum(tl.minimum(tl.minimum(o_near, num_output), MAX_MATCH), 0), 0)
    b_known = tl.where((o_c == AT_CURSOR) & (num_common >= b_most), b_most, 0)
    p_last = context.tokens + context.length
    o_way = _load_ways(context)  # before what takes long
    last = load_back_clamped(p_last - 1, context.length - 1, 16)
    b_near = b_known + match_lengths(
        prediction.tokens, o_near, b_most - b_known, p_last, num_output, last, 16, 16
    )
    b_key = _lane_keys(request, bucket, cursor, num_common, settings, last, o_way)
    b_position, b_matched = _best_matches(b_key, cursor)
    b_matched += b_near
    b_position = tl.where(m_near, o_near, b_position)
    m_live, m_context = b_position >= 0, o_c >= FIRST_CONTEXT
    b_token = tl.load(context.tokens + b_position, mask=m_live & m_context, other=0)
    p_prediction = prediction.tokens + b_position
    b_token = tl.load(p_prediction, mask=m_live & (o_c < FIRST_CONTEXT), other=0) + b_token
    return Candidates(m_context, b_position, b_matched, b_token)

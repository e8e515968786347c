"""Triton kernel of `draft`: one program weighs the candidates of one request and writes its drafts."""

import triton
import triton.language as tl

from ..suffix_match.kernels import _match_lengths
from .tables import (
    MAX_MATCH,
    NUM_MARGINS,
    NUM_PLACES,
    NUM_TRUSTS,
    PLACE_CONTEXT,
    TRUST_FROM,
    WINDOW_AHEAD,
    WINDOW_BEHIND,
)

_MAX_MATCH = tl.constexpr(MAX_MATCH)
_NUM_MARGINS = tl.constexpr(NUM_MARGINS)
_NUM_PLACES = tl.constexpr(NUM_PLACES)
_NUM_TRUSTS = tl.constexpr(NUM_TRUSTS)
_PLACE_CONTEXT = tl.constexpr(PLACE_CONTEXT)
_TRUST_FROM = tl.constexpr(TRUST_FROM)
_BEHIND = tl.constexpr(WINDOW_BEHIND)
#: Lanes: two matches in the prediction, the window around the cursor, two matches in the context, then nothing.
_OWN = tl.constexpr(2 + WINDOW_BEHIND + 1 + WINDOW_AHEAD)
_LANES = tl.constexpr(32)


@triton.jit
def _at(b_values, lane):
    """One lane's value."""
    o_c = tl.arange(0, _LANES)
    return tl.sum(tl.where(o_c == lane, b_values, 0), axis=0)


@triton.jit
def _lay_out(first, second, b_window, own, own_second):
    """[_LANES]: the values of the matches and of the window in the order of the lanes."""
    o_c = tl.arange(0, _LANES)
    b_values = tl.where(o_c == 0, first, tl.where(o_c == 1, second, b_window))
    return tl.where(o_c == _OWN, own, tl.where(o_c == _OWN + 1, own_second, b_values))


@triton.jit
def _class_of(
    o_position, b_matched, b_margin, m_own, cursor, followed, num_output,
    length_bucket_ptr, margin_bucket_ptr,
):  # fmt: skip
    """Class of every candidate, [_LANES] int32."""
    away = o_position - cursor
    behind = tl.where(away < -2, 5, 4)
    ahead = tl.where(away <= 1, away, tl.where(away <= 4, 2, tl.where(away <= 16, 3, 6)))
    place = tl.where(m_own, _PLACE_CONTEXT, tl.where(away < 0, behind, ahead))
    trust = tl.where(8 * followed < num_output, 0, tl.where(2 * followed < num_output, 1, 2))
    trust = tl.where(num_output < _TRUST_FROM, 2, trust)
    evidence = tl.load(length_bucket_ptr + b_matched) * _NUM_MARGINS
    evidence += tl.load(margin_bucket_ptr + b_margin + _MAX_MATCH)
    return (evidence * _NUM_PLACES + place) * _NUM_TRUSTS + trust


@triton.jit
def _margins(b_token, b_matched, m_live):
    """Matched tokens ahead of the longest match that expects another token next, [_LANES] int32."""
    o_c = tl.arange(0, _LANES)
    b_reach = tl.where(m_live, b_matched, -1)
    reach = tl.max(b_reach, axis=0)
    first = tl.min(tl.where(b_reach == reach, o_c, _LANES), axis=0)
    m_agrees = b_token == _at(b_token, first)
    rival = tl.max(tl.where(m_agrees, 0, tl.where(m_live, b_matched, 0)), axis=0)
    return tl.where(m_live, b_matched - tl.where(m_agrees, rival, reach), 0)


@triton.jit(do_not_specialize=["length_quarters", "context_capacity", "vocab_size"])
def _draft_kernel(
    prediction_ptr, stride_prediction_s, prediction_len_ptr,
    context_ptr, stride_context_s, context_start_ptr, context_len_ptr,
    slots_ptr, active_ptr, cursor_ptr, followed_ptr,
    prediction_end_ptr, prediction_matched_ptr, prediction_second_end_ptr, prediction_second_matched_ptr,
    context_end_ptr, context_matched_ptr, context_second_end_ptr, context_second_matched_ptr,
    length_bucket_ptr, margin_bucket_ptr, keep_ptr, gain_ptr, confidence_ptr,
    token_ids_ptr, length_ptr, confidence_out_ptr, source_ptr,
    length_quarters, context_capacity, vocab_size,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (B,). See `gpu_align.ops.draft.draft` for the loop that this computes."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    total = tl.load(context_len_ptr + i_slot)
    num_output = tl.maximum(total - tl.load(context_start_ptr + i_slot), 0)
    p_prediction = prediction_ptr + i_slot * stride_prediction_s
    p_context = context_ptr + i_slot * stride_context_s
    # A request that is not active has nothing to read on from.
    is_active = tl.load(active_ptr + i_b) > 0
    num_text = tl.where(is_active, tl.load(prediction_len_ptr + i_slot), 0)
    num_own = tl.where(is_active, total, 0)
    cursor = tl.load(cursor_ptr + i_b)
    end = tl.load(prediction_end_ptr + i_b)
    matched = tl.load(prediction_matched_ptr + i_b)

    # The candidates: where they are, how much of the output they match, what they expect next.
    o_c = tl.arange(0, _LANES)
    m_own = (o_c >= _OWN) & (o_c < _OWN + 2)
    m_window = (o_c >= 2) & (o_c < _OWN)
    o_window = cursor + o_c - (2 + _BEHIND)
    m_window = m_window & (o_window >= 0) & (o_window < num_text)
    o_position = _lay_out(
        end, tl.load(prediction_second_end_ptr + i_b), tl.where(m_window, o_window, -1),
        tl.load(context_end_ptr + i_b), tl.load(context_second_end_ptr + i_b),
    )  # fmt: skip
    b_room = tl.where(m_own, num_own, num_text) - o_position
    m_live = (o_position >= 0) & (b_room > 0)
    b_matched = _lay_out(
        matched, tl.load(prediction_second_matched_ptr + i_b),
        _match_lengths(p_prediction, o_position, m_window, p_context, total, num_output, _MAX_MATCH),
        tl.load(context_matched_ptr + i_b), tl.load(context_second_matched_ptr + i_b),
    )  # fmt: skip
    b_own = tl.load(p_context + o_position, mask=m_live & m_own, other=-1)
    b_text = tl.load(p_prediction + o_position, mask=m_live & (o_c < _OWN), other=-1)
    b_margin = _margins(tl.where(m_own, b_own, b_text), b_matched, m_live)

    # What each is worth, and the best.
    b_class = _class_of(
        o_position, tl.where(m_live, b_matched, 0), b_margin, m_own, cursor, followed=tl.load(followed_ptr + i_b),
        num_output=num_output, length_bucket_ptr=length_bucket_ptr, margin_bucket_ptr=margin_bucket_ptr,
    )  # fmt: skip
    is_whole = (end == num_output) & (matched == _MAX_MATCH) & (num_output <= _MAX_MATCH)
    m_whole = (o_c == 0) & (tl.where(o_c == 0, is_whole.to(tl.int32), 0) > 0)
    b_num = tl.minimum(length_quarters * b_matched // 4 + 1, K)
    b_num = tl.where(b_matched >= _MAX_MATCH, K, b_num)
    b_num = tl.minimum(b_num, tl.load(keep_ptr + b_class))
    b_num = tl.where(m_whole, K, b_num)
    b_gain = tl.load(gain_ptr + b_class * (K + 1) + b_num)
    b_gain = tl.where(m_whole, 0x7FFFFFFF, b_gain)
    b_key = tl.where(m_live, b_gain.to(tl.int64) * _LANES + (_LANES - 1 - o_c), 0)
    top = tl.max(b_key, axis=0)
    lane = _LANES - 1 - (top % _LANES).to(tl.int32)
    live = top >= _LANES  # a gain above 0
    is_own = (lane >= _OWN) & live
    position = _at(o_position, lane)
    klass = _at(b_class, lane)
    length = tl.minimum(_at(b_num, lane), _at(b_room, lane))
    length = tl.where(live, tl.minimum(length, context_capacity - total), 0)

    o_k = tl.arange(0, BLOCK_K)
    m_draft = o_k < length
    # Only one of the two loads has lanes: the other's length is 0.
    b_own = tl.load(p_context + position + o_k, mask=o_k < tl.where(is_own, length, 0), other=0)
    b_text = tl.load(p_prediction + position + o_k, mask=o_k < tl.where(is_own, 0, length), other=0)
    b_tokens = tl.where(is_own, b_own, b_text)
    # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
    m_bad = m_draft & ((b_tokens < 0) | (b_tokens >= vocab_size))
    length = tl.minimum(length, tl.min(tl.where(m_bad, o_k, BLOCK_K), axis=0))
    length = tl.maximum(length, 0)
    m_draft = o_k < length
    last = tl.load(p_context + total - 1, mask=total > 0, other=0)
    last = tl.where((last >= 0) & (last < vocab_size), last, 0)
    b_confidence = tl.load(confidence_ptr + klass * K + o_k, mask=m_draft, other=0.0)
    m_k = o_k < K
    o_out = i_b.to(tl.int64) * K + o_k
    tl.store(token_ids_ptr + o_out, tl.where(m_draft, b_tokens, last).to(tl.int64), mask=m_k)
    tl.store(confidence_out_ptr + o_out, tl.where(m_draft, b_confidence, 0.0), mask=m_k)
    tl.store(length_ptr + i_b, length)
    source = tl.where(length > 0, tl.where(is_own, 2, 1), 0)
    tl.store(source_ptr + i_b, source.to(tl.int8))

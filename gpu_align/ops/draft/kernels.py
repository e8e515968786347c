"""Triton kernel of `draft`: one program weighs the candidates of one request and writes its drafts."""

import triton
import triton.language as tl

from .tables import (
    CLASS_CONTEXT,
    CLASS_CURSOR_ALONE,
    CLASS_CURSOR_BESIDE_MATCH,
    CLASS_WHOLE,
    MAX_MATCH,
    NUM_DISTANCES,
)

_CONTEXT = tl.constexpr(CLASS_CONTEXT)
_CURSOR_ALONE = tl.constexpr(CLASS_CURSOR_ALONE)
_CURSOR_BESIDE_MATCH = tl.constexpr(CLASS_CURSOR_BESIDE_MATCH)
_WHOLE = tl.constexpr(CLASS_WHOLE)
_MAX_MATCH = tl.constexpr(MAX_MATCH)
_NUM_DISTANCES = tl.constexpr(NUM_DISTANCES)


@triton.jit
def _prediction_class(end, matched, cursor, num_output, bucket_ptr):
    """Class of a match in the prediction."""
    away = end - cursor
    distance = tl.where(away < 0, 4, tl.where(away <= 1, away, tl.where(away <= 16, 2, 3)))
    near = tl.load(bucket_ptr + matched) * _NUM_DISTANCES + distance
    is_whole = (end == num_output) & (matched == _MAX_MATCH) & (num_output <= _MAX_MATCH)
    return tl.where(is_whole, _WHOLE, near)


@triton.jit
def _weigh(
    position, room, matched, klass, survival_ptr,
    length_factor, min_survival, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``(gain, length)`` of one candidate; a gain of -1 marks one that cannot be drafted from."""
    o_k = tl.arange(0, BLOCK_K)
    limit = tl.where(matched >= _MAX_MATCH, K, tl.minimum(length_factor * matched + 1, K))
    b_survival = tl.load(survival_ptr + klass * K + o_k, mask=o_k < K, other=0)
    m_keep = (b_survival >= min_survival) & (o_k < limit)
    gain = tl.sum(tl.where(m_keep, b_survival, 0), axis=0)
    gain = tl.where(klass == _WHOLE, 0x7FFFFFFF, gain)
    possible = (position >= 0) & (room > 0)
    return tl.where(possible, gain, -1), tl.minimum(tl.sum(m_keep.to(tl.int32), axis=0), room)


@triton.jit(do_not_specialize=["length_factor", "min_survival", "context_capacity", "vocab_size"])
def _draft_kernel(
    prediction_ptr, stride_prediction_s, prediction_len_ptr,
    context_ptr, stride_context_s, context_start_ptr, context_len_ptr,
    slots_ptr, active_ptr, cursor_ptr,
    prediction_end_ptr, prediction_matched_ptr, context_end_ptr, context_matched_ptr,
    bucket_ptr, survival_ptr, confidence_ptr,
    token_ids_ptr, length_ptr, confidence_out_ptr, source_ptr,
    length_factor, min_survival, context_capacity, vocab_size,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (B,). See `gpu_align.ops.draft.draft` for the loop that this computes."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    total = tl.load(context_len_ptr + i_slot)
    num_output = total - tl.load(context_start_ptr + i_slot)
    num_text = tl.load(prediction_len_ptr + i_slot)
    p_prediction = prediction_ptr + i_slot * stride_prediction_s
    p_context = context_ptr + i_slot * stride_context_s
    cursor = tl.load(cursor_ptr + i_b)
    end = tl.load(prediction_end_ptr + i_b)
    matched = tl.load(prediction_matched_ptr + i_b)
    own_end = tl.load(context_end_ptr + i_b)
    own_matched = tl.load(context_matched_ptr + i_b)

    # Candidate 0: the longest match in the prediction.
    position = end
    klass = _prediction_class(end, matched, cursor, num_output, bucket_ptr)
    gain, length = _weigh(
        end, num_text - end, matched, klass, survival_ptr, length_factor, min_survival, K, BLOCK_K
    )
    # Candidate 1: the cursor, where that is another place.
    cursor_class = tl.where(end < 0, _CURSOR_ALONE, _CURSOR_BESIDE_MATCH)
    other_gain, other_length = _weigh(
        tl.where(cursor == end, -1, cursor), num_text - cursor, 0, cursor_class, survival_ptr,
        length_factor, min_survival, K, BLOCK_K,
    )  # fmt: skip
    better = other_gain > gain
    position = tl.where(better, cursor, position)
    klass = tl.where(better, cursor_class, klass)
    length = tl.where(better, other_length, length)
    gain = tl.where(better, other_gain, gain)
    # Candidate 2: the longest match in the request's own context.
    own_class = _CONTEXT + tl.load(bucket_ptr + own_matched)
    own_gain, own_length = _weigh(
        own_end, total - own_end, own_matched, own_class, survival_ptr,
        length_factor, min_survival, K, BLOCK_K,
    )  # fmt: skip
    is_own = own_gain > gain
    position = tl.where(is_own, own_end, position)
    klass = tl.where(is_own, own_class, klass)
    length = tl.where(is_own, own_length, length)
    gain = tl.where(is_own, own_gain, gain)

    live = (gain > 0) & (tl.load(active_ptr + i_b) > 0)
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

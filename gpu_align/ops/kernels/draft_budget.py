"""Triton kernel that cuts the drafts of a batch to a budget."""

import triton
import triton.language as tl

from .constexprs import *


@triton.jit
def survival_of(confidence_ptr, survival_ptr, o_row, b_length, num_draft_tokens):
    """Write in units of 1/`SURVIVAL_ONE` that all drafts up to each are accepted."""
    b_units = tl.full(b_length.shape, SURVIVAL_ONE, tl.int64)
    for k in range(num_draft_tokens):
        b_p = tl.load(confidence_ptr + o_row + k, mask=k < b_length, other=0.0)
        b_units = b_units * (b_p * SURVIVAL_ONE).to(tl.int64) // SURVIVAL_ONE
        tl.store(survival_ptr + o_row + k, b_units.to(tl.int32), mask=k < b_length)


@triton.jit
def count_with(p_units, b_length, units, SEARCHES: tl.constexpr):
    """How many drafts of each request have so many units, [BLOCK_B] int32: units never rise along a draft."""
    b_low = tl.zeros_like(b_length)
    b_high = b_length
    for _ in tl.static_range(SEARCHES):
        b_middle = (b_low + b_high) // 2
        m_open = b_low < b_high
        m_more = tl.load(p_units + b_middle, mask=m_open, other=-1) >= units
        b_low = tl.where(m_open & m_more, b_middle + 1, b_low)
        b_high = tl.where(m_open & (m_more == 0), b_middle, b_high)
    return b_low


@triton.jit
def last_tokens(token_ids_ptr, stride_token_ids_s, p_slots, total_len_ptr, max_context_len, vocab_size, m_b):
    """What drafts are padded with, [BLOCK_B] int32: the last token, 0 if it is not in the vocabulary."""
    i_slot = tl.load(p_slots, mask=m_b, other=0)
    b_total = tl.minimum(tl.load(total_len_ptr + i_slot, mask=m_b, other=0), max_context_len)
    p_last = token_ids_ptr + i_slot * stride_token_ids_s + b_total - 1
    b_last = tl.load(p_last, mask=m_b & (b_total > 0), other=0)
    return tl.where((b_last >= 0) & (b_last < vocab_size), b_last, 0)


@triton.jit(
    do_not_specialize=[
        "draft_ptr", "draft_length_ptr", "draft_confidence_ptr", "draft_source_ptr", "survival_ptr",
        "token_ids_ptr", "stride_token_ids_s", "total_len_ptr", "slots_ptr", "budget_ptr", "num_requests",
        "num_draft_tokens", "max_context_len", "vocab_size",
    ]
)  # fmt: skip
def limit_drafts_kernel(
    draft_ptr,  # [B, K] int64, written
    draft_length_ptr,  # [B] int32, written
    draft_confidence_ptr,  # [B, K] float32, written
    draft_source_ptr,  # [B] int8, written
    survival_ptr,  # [B, K] int32, scratch
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    total_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    budget_ptr,  # [1] int32
    num_requests,  # B
    num_draft_tokens,  # K
    max_context_len,  # T
    vocab_size,
    BLOCK_B: tl.constexpr,
    SEARCHES: tl.constexpr,
):
    """Grid (1,)::

    units[b, k] = SURVIVAL_ONE * P(drafts 0 to k of b are accepted), rounded down at each k
    threshold   = the least for which at most `budget` drafts have so many units
    length[b]   = those with at least `threshold`, and what is left of the budget for those with one unit less
    """
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_requests
    b_length = tl.load(draft_length_ptr + o_b, mask=m_b, other=0)
    o_row = o_b * num_draft_tokens
    survival_of(draft_confidence_ptr, survival_ptr, o_row, b_length, num_draft_tokens)
    tl.debug_barrier()  # the units are read below, by whichever threads the compiler chooses

    p_units = survival_ptr + o_row
    budget = tl.maximum(tl.load(budget_ptr), 0)
    low = 0
    threshold = SURVIVAL_ONE + 1
    while low < threshold:
        middle = (low + threshold) // 2
        fits = tl.sum(count_with(p_units, b_length, middle, SEARCHES), axis=0) <= budget
        low = tl.where(fits, low, middle + 1)
        threshold = tl.where(fits, middle, threshold)
    b_kept = count_with(p_units, b_length, threshold, SEARCHES)
    b_tied = count_with(p_units, b_length, threshold - 1, SEARCHES) - b_kept
    b_before = tl.cumsum(b_tied, axis=0) - b_tied
    rest = budget - tl.sum(b_kept, axis=0)
    b_kept += tl.minimum(tl.maximum(rest - b_before, 0), b_tied)

    b_last = last_tokens(
        token_ids_ptr, stride_token_ids_s, slots_ptr + o_b, total_len_ptr, max_context_len, vocab_size, m_b
    )
    tl.store(draft_length_ptr + o_b, b_kept, mask=m_b)
    tl.store(draft_source_ptr + o_b, tl.full([BLOCK_B], SOURCE_NONE, tl.int8), mask=m_b & (b_kept == 0))
    for k in range(num_draft_tokens):
        m_cut = (k >= b_kept) & (k < b_length)
        tl.store(draft_ptr + o_row.to(tl.int64) + k, b_last.to(tl.int64), mask=m_cut)
        tl.store(draft_confidence_ptr + o_row + k, tl.zeros([BLOCK_B], tl.float32), mask=m_cut)

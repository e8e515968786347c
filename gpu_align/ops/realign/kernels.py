"""Triton kernel of `realign`: one program reads the carried LCS row of one request."""

import triton
import triton.language as tl


@triton.jit
def _best_cursor(row, num_text, BLOCK_N: tl.constexpr):
    """Smallest j in 0..num_text with the largest ``2 * H[j] - j``, from the bits of one row.

    Bit j is 0 where H rises from j to j + 1, so the score goes up by 1 there and down by 1 elsewhere. The
    order of two positions is one int64 key: score in the upper half, the complement of j in the lower.
    """
    o_block = tl.arange(0, BLOCK_N)
    best = tl.zeros([], tl.int64) + 0x7FFFFFFF  # j = 0, score 0
    score = 0
    for i_block in range(0, num_text, BLOCK_N):
        o_j = i_block + o_block
        m_j = o_j < num_text
        b_word = tl.load(row + o_j // 32, mask=m_j, other=-1)
        b_step = tl.where(m_j, 1 - 2 * ((b_word >> (o_j % 32)) & 1), 0)
        b_score = score + tl.cumsum(b_step, axis=0)
        b_key = b_score.to(tl.int64) * 0x100000000 + (0x7FFFFFFF - (o_j + 1)).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(m_j, b_key, best), axis=0))
        score += tl.sum(b_step, axis=0)
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _realign_kernel(
    row_ptr, stride_row_s,  # [S, W] int32
    prediction_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    active_ptr,  # [B] int32
    cursor_ptr,  # [B] int32
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (B,). See `gpu_align.ops.realign.realign` for the loop that this computes."""
    i_b = tl.program_id(0)
    cursor = 0
    if tl.load(active_ptr + i_b) > 0:
        i_slot = tl.load(slots_ptr + i_b)
        cursor = _best_cursor(row_ptr + i_slot * stride_row_s, tl.load(prediction_len_ptr + i_slot), BLOCK_N)
    tl.store(cursor_ptr + i_b, cursor)

"""Triton kernel of `realign`: one program reads the carried LCS row of one request."""

import triton
import triton.language as tl

from .reference import MATCH_WEIGHT

_WEIGHT = tl.constexpr(MATCH_WEIGHT)


@triton.jit
def _scan_row(row, num_text, BLOCK_N: tl.constexpr):
    """``(cursor, followed)`` from the bits of one row, see `_realign_kernel`.

    Bit j is 0 where H rises from j to j + 1. With rises[j] = H[j], both scores are ``w * H[j] - j``. The order
    of two positions is one int64 key: score in the upper half, the complement of j in the lower.
    """
    o_block = tl.arange(0, BLOCK_N)
    best = tl.zeros([], tl.int64) + 0x7FFFFFFF  # j = 0, score 0
    followed = 0
    common = 0
    for i_block in range(0, num_text, BLOCK_N):
        o_j = i_block + o_block
        m_j = o_j < num_text
        b_word = tl.load(row + o_j // 32, mask=m_j, other=-1)
        b_rise = tl.where(m_j, 1 - ((b_word >> (o_j % 32)) & 1), 0)
        b_common = common + tl.cumsum(b_rise, axis=0)
        b_score = _WEIGHT * b_common - (o_j + 1)
        b_key = b_score.to(tl.int64) * 0x100000000 + (0x7FFFFFFF - (o_j + 1)).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(m_j, b_key, best), axis=0))
        followed = tl.maximum(followed, tl.max(tl.where(m_j, 2 * b_common - (o_j + 1), 0), axis=0))
        common += tl.sum(b_rise, axis=0)
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), followed


@triton.jit
def _realign_kernel(
    row_ptr, stride_row_s,  # [S, W] int32
    prediction_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    active_ptr,  # [B] int32
    cursor_ptr,  # [B] int32
    followed_ptr,  # [B] int32
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (B,). See `gpu_align.ops.realign.realign` for the loop that this computes."""
    i_b = tl.program_id(0)
    cursor = 0
    followed = 0
    if tl.load(active_ptr + i_b) > 0:
        i_slot = tl.load(slots_ptr + i_b)
        cursor, followed = _scan_row(
            row_ptr + i_slot * stride_row_s, tl.load(prediction_len_ptr + i_slot), BLOCK_N
        )
    tl.store(cursor_ptr + i_b, cursor)
    tl.store(followed_ptr + i_b, followed)

"""Raw launches: no checks and no allocation, for callers who check once and launch every step."""

from __future__ import annotations

import torch
import triton

# Words a program holds at once, a lane each: past these the registers of a thread no longer hold the 32
# tokens of its word and everything else (README.md has the table). Wider predictions go through in panels.
_MAX_BLOCK_WORDS = 512
_MIN_BLOCK_WORDS = 4
# The interpreter pays by the operation, not by its width.
_INTERPRETER_REQUESTS = 64


def launch_extend(
    row: torch.Tensor,
    row_len: torch.Tensor,
    token_ids: torch.Tensor,
    start: torch.Tensor,
    total_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    *,
    block_words: int,
) -> None:
    """Launch `_lcs_extend_kernel`; arguments as in `lcs_extend_inplace`."""
    # Imported here: a kernel module reads TRITON_INTERPRET when it is loaded, and the CPU path needs none.
    from gpu_align.ops.lcs.kernels import _lcs_extend_kernel

    B = slots.shape[0]
    block_requests = _block_requests(B, row)
    if B:
        _lcs_extend_kernel[(triton.cdiv(B, block_requests),)](
            row,
            row.stride(0),
            row_len,
            token_ids,
            token_ids.stride(0),
            start,
            total_len,
            prediction,
            prediction.stride(0),
            1,
            prediction_len,
            slots,
            active,
            B,
            row.shape[1],
            token_ids.shape[1],
            prediction.shape[1],
            BLOCK_B=block_requests,
            BLOCK_W=block_words,
            num_warps=_num_warps(block_words),
        )


def launch_wavefront(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    length: torch.Tensor,
    row: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    carry: torch.Tensor | None,
    block_words: int,
) -> None:
    """Launch `_lcs_wavefront_kernel`; `carry` is needed where a prediction spans several panels."""
    from gpu_align.ops.lcs.kernels import _lcs_wavefront_kernel

    B, M = context.shape
    block_requests = _block_requests(B, context)
    if B:
        _lcs_wavefront_kernel[(triton.cdiv(B, block_requests),)](
            context,
            context.stride(0),
            context_len,
            prediction,
            prediction.stride(0),
            1,
            prediction_len,
            length,
            row,
            0 if row is None else row.stride(0),
            history,
            0 if history is None else history.stride(0),
            0 if history is None else history.stride(1),
            carry,
            0 if carry is None else carry.stride(0),
            B,
            M,
            prediction.shape[1],
            BLOCK_B=block_requests,
            BLOCK_W=block_words,
            num_warps=_num_warps(block_words),
        )


def launch_walk(
    history: torch.Tensor,
    context_len: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    op: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Launch `_lcs_walk_kernel` on what the wavefront left in `history` and `length`."""
    from gpu_align.ops.lcs.kernels import _lcs_walk_kernel

    B, M = history.shape[:2]
    block_requests = _block_requests(B, history)
    if B:
        _lcs_walk_kernel[(triton.cdiv(B, block_requests),)](
            history,
            history.stride(0),
            history.stride(1),
            context_len,
            prediction_len,
            length,
            op,
            op.stride(0),
            B,
            M,
            op.shape[1] - M,
            BLOCK_B=block_requests,
            BLOCK_O=256,
            num_warps=1,  # one thread walks
        )


def choose_block_words(prediction_len: int, block_words: int | None) -> int:
    """Return the lanes of a program: enough for the widest prediction, within what registers hold."""
    if block_words is None:
        words = max((prediction_len + 31) // 32, _MIN_BLOCK_WORDS)
        return min(1 << (words - 1).bit_length(), _MAX_BLOCK_WORDS)
    if not 1 <= block_words <= _MAX_BLOCK_WORDS or block_words & (block_words - 1):
        raise ValueError(
            f"block_words: expected a power of two up to {_MAX_BLOCK_WORDS}, found {block_words}"
        )
    return block_words


def _block_requests(B: int, t: torch.Tensor) -> int:
    """Return how many requests share a program: one on a GPU, a whole batch under the interpreter."""
    return 1 if t.device.type == "cuda" else min(triton.next_power_of_2(max(B, 1)), _INTERPRETER_REQUESTS)


def _num_warps(block_words: int) -> int:
    """Return the warps of a program: one word a thread, so that its 32 tokens fit in registers."""
    return max(block_words // 32, 1)

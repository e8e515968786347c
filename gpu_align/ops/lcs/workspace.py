"""The scratch of the LCS operations, and the words of a panel, which shape it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

# Words of a panel, two a lane: what a program holds at once. Wider predictions go through in several panels. With
# more words a code would need more than the 15 bits that it has beside its sign.
_MAX_BLOCK_WORDS = 512
_MIN_BLOCK_WORDS = 4


class LcsWorkspace(NamedTuple):
    """Scratch of a call, from `lcs_workspace`. The contents before and after mean nothing.

    The tokens of a prediction are numbered in P panels of W words of 32 tokens:

    - `table` [B, P, 64 · W] int32, a hash table of the tokens of a panel;
    - `codes` [B, P, ceil(M / 4)] int64, the numbers of the context's tokens, four in each;
    - `planes` [B, P, log2(32 · W), W] int32, the numbers of the panel's tokens, bit by bit.
    """

    table: torch.Tensor
    codes: torch.Tensor
    planes: torch.Tensor


def lcs_workspace(
    batch: int,
    max_context_len: int,
    max_prediction_len: int,
    *,
    device: torch.device | str,
    block_words: int | None = None,
) -> LcsWorkspace:
    """Allocate the scratch of the LCS operations for one shape of tensors, that a call may be given.

    Args:
        batch, max_context_len, max_prediction_len: B, M and N of the call.
        device: where its tensors are.
        block_words: as the call has it.

    Returns:
        About 10 · N + 2 · M bytes a request, N rounded up to a power of two. Where N is more than 16,384, it is
        rounded up to a multiple of that, and each 16,384 tokens take 2 · M bytes more.

    Raises:
        ValueError: a negative length, or a bad `block_words`.
    """
    if batch < 0 or max_context_len < 0:
        raise ValueError(f"batch, max_context_len: expected 0 or more, found {batch}, {max_context_len}")
    words = choose_block_words(32 * lcs_row_words(max_prediction_len), block_words)
    shapes = workspace_shapes(batch, max_context_len, max_prediction_len, words)
    return LcsWorkspace(*(torch.empty(s, dtype=dtype, device=device) for dtype, s in shapes.values()))


def lcs_row_words(max_prediction_len: int) -> int:
    """Return how many int32 words a carried row of `max_prediction_len` tokens takes: ceil(len / 32).

    Raises:
        ValueError: a negative length.
    """
    if max_prediction_len < 0:
        raise ValueError(f"max_prediction_len: expected 0 or more, found {max_prediction_len}")
    return (max_prediction_len + 31) // 32


def workspace_shapes(B: int, M: int, N: int, block_words: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of every tensor of an `LcsWorkspace`."""
    panels = max(triton.cdiv(lcs_row_words(N), block_words), 1)
    return {
        "table": (torch.int32, [B, panels, 2 * 32 * block_words]),
        "codes": (torch.int64, [B, panels, triton.cdiv(M, 4)]),
        "planes": (torch.int32, [B, panels, (32 * block_words - 1).bit_length(), block_words]),
    }


def choose_block_words(prediction_len: int, block_words: int | None) -> int:
    """Return the words of a panel, two a lane: enough for the widest prediction, within what registers hold."""
    if block_words is None:
        words = max((prediction_len + 31) // 32, _MIN_BLOCK_WORDS)
        return min(1 << (words - 1).bit_length(), _MAX_BLOCK_WORDS)
    if not 1 <= block_words <= _MAX_BLOCK_WORDS or block_words & (block_words - 1):
        raise ValueError(
            f"block_words: expected a power of two up to {_MAX_BLOCK_WORDS}, found {block_words}"
        )
    return max(block_words, 2)

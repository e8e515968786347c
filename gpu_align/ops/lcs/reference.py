"""References of the LCS operations: same arguments as the launchers, CPU tensors, no copies.

A row is one Python integer of n bits and takes a token in by Hyyrö's formula: where the kernels have words and
carries here is one addition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]


def lcs_length_reference(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the LCS length of every request to `out`; see `lcs_length`."""
    lengths = out.numpy()
    for b, (tokens, text) in enumerate(_requests(context, context_len, prediction, prediction_len)):
        lengths[b] = len(text) - _fold(_ones(len(text)), tokens, text).bit_count()
    return out


def lcs_prefix_row_reference(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the prefix row of every request to `out`; see `lcs_prefix_row`."""
    rows = out.numpy()
    for b, (tokens, text) in enumerate(_requests(context, context_len, prediction, prediction_len)):
        n = len(text)
        row = _fold(_ones(n), tokens, text).to_bytes((n + 7) // 8, "little")
        bits = np.unpackbits(np.frombuffer(row, np.uint8), count=n, bitorder="little")
        rows[b] = 0
        rows[b, 1 : n + 1] = bits ^ 1
        np.cumsum(rows[b], out=rows[b])
    return out


def _requests(
    context: torch.Tensor, context_len: torch.Tensor, prediction: torch.Tensor, prediction_len: torch.Tensor
) -> list[tuple[IntArray, IntArray]]:
    """(context, prediction) of every request, cut to their lengths (and those to their tensors)."""
    tokens, texts = context.numpy(), prediction.numpy()
    m = context_len.clamp(0, tokens.shape[1]).tolist()
    n = prediction_len.clamp(0, texts.shape[1]).tolist()
    return [(tokens[b, : m[b]], texts[b, : n[b]]) for b in range(len(m))]


def _ones(n: int) -> int:
    return (1 << n) - 1


def _fold(row: int, tokens: IntArray, text: IntArray) -> int:
    """The row of len(text) bits after `tokens` more."""
    found = np.empty(len(text), np.bool_)
    for token in tokens:
        np.equal(text, token, out=found)
        matched = row & int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")
        # row - matched is row & ~matched. What carries past the end stays there: carries only run upwards.
        row = (row + matched) | (row - matched)
    return row & _ones(len(text))

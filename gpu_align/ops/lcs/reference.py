"""The reference of the LCS operations: CPU tensors, no copies.

A row is one Python integer of n bits and takes a token in by Hyyrö's formula: where the kernels have words and
carries here is one addition.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from ..layout import IntArray

#: context [B, M], context_len [B], prediction [B, N], prediction_len [B]; int32 each, see `lcs_length`.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def lcs_reference(batch: Batch, length: torch.Tensor, row: torch.Tensor | None) -> None:
    """Write the LCS length of every request, and its prefix row; see `lcs_length` and `lcs_prefix_row`."""
    context, context_len, prediction, prediction_len = batch
    lengths, rows = length.numpy(), None if row is None else row.numpy()
    tokens, texts = context.numpy(), prediction.numpy()
    m = context_len.clamp(0, tokens.shape[1]).tolist()
    for b, n in enumerate(prediction_len.clamp(0, texts.shape[1]).tolist()):
        bits = _fold(tokens[b, : m[b]], texts[b, :n])
        lengths[b] = n - bits.bit_count()
        if rows is not None:
            packed = np.frombuffer(bits.to_bytes((n + 7) // 8, "little"), np.uint8)
            rows[b] = 0
            rows[b, 1 : n + 1] = np.unpackbits(packed, count=n, bitorder="little") ^ 1
            np.cumsum(rows[b], out=rows[b])


def _fold(tokens: IntArray, text: IntArray) -> int:
    """The row of len(text) bits after these tokens."""
    ones = row = (1 << len(text)) - 1

    @cache
    def places_of(token: int) -> int:
        return int.from_bytes(np.packbits(text == token, bitorder="little").tobytes(), "little")

    for token in tokens.tolist():
        matched = row & places_of(token)
        # row - matched is row & ~matched. What carries past the end stays there: carries only run upwards.
        row = (row + matched) | (row - matched)
    return row & ones

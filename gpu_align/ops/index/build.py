"""The index of a prediction, built where its tokens are, once, off the critical path."""

from __future__ import annotations

import torch

from ..layout import HASH


def build_index(
    text: torch.Tensor, order: torch.Tensor, first: torch.Tensor, base: int, num_tokens: int, bits: int
) -> None:
    """Index the prediction ``text[base : base + num_tokens]``.

    ::

        ends = sorted(range(1, n), key=lambda end: (bucket(tokens[end - 1]), end))
        order[base : base + n - 1] = ends
        first[base + b] = number of ends in the buckets before b            # 0 <= b <= 2**bits

    with ``bucket(token) = (token * HASH mod 2**32) >> (32 - bits)``.

    Args:
        text: [A] int32, tokens 0 or more.
        order: [A] int32, written.
        first: [A] int32, written.
        base: where the prediction begins in all three.
        num_tokens: n >= 1.
        bits: log2 of the number of buckets; ``2**bits + 1`` entries of `first` are the prediction's own.

    No sync. A radix sort of n keys of 32 bits, and a search of 2**bits values in them.
    """
    tokens = text[base : base + num_tokens - 1].to(torch.int64)
    bucket = ((tokens * HASH) & 0xFFFFFFFF) >> (32 - bits)
    ordered, at = torch.sort(bucket.to(torch.int32), stable=True)
    order[base : base + num_tokens - 1] = at + 1
    buckets = torch.arange((1 << bits) + 1, dtype=torch.int32, device=text.device)
    first[base : base + (1 << bits) + 1] = torch.searchsorted(ordered, buckets, out_int32=True)

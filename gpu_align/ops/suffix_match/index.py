"""The index of a prediction, built where its tokens are, once, off the critical path."""

from __future__ import annotations

import torch

from ..constants import HASH


def build_index(
    prediction_tokens: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    base: int,
    num_tokens: int,
    bits: int,
) -> None:
    """Index the prediction ``tokens = prediction_tokens[base : base + num_tokens]`` of n tokens.

    ::

        positions[base : base + n - 1] = sorted(range(1, n), key=lambda p: (bucket(tokens[p - 1]), p))
        offsets[base + b] = number of positions in the buckets before b     # 0 <= b <= 2**bits

    with ``bucket(token) = (token * HASH mod 2**32) >> (32 - bits)``.

    Args:
        prediction_tokens: [A] int32, tokens 0 or more.
        positions: [A] int32, written.
        offsets: [A] int32, written.
        base: where the prediction begins in all three.
        num_tokens: n >= 1.
        bits: log2 of the number of buckets; ``2**bits + 1`` entries of `offsets` are the prediction's own.

    No sync. A radix sort of n keys of 32 bits, and a search of 2**bits values in them.
    """
    tokens = prediction_tokens[base : base + num_tokens - 1].to(torch.int64)
    bucket = ((tokens * HASH) & 0xFFFFFFFF) >> (32 - bits)
    in_order, order = torch.sort(bucket.to(torch.int32), stable=True)
    positions[base : base + num_tokens - 1] = order + 1
    buckets = torch.arange((1 << bits) + 1, dtype=torch.int32, device=prediction_tokens.device)
    offsets[base : base + (1 << bits) + 1] = torch.searchsorted(in_order, buckets, out_int32=True)

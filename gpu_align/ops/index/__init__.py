"""The index of a prediction, built where its tokens are, once, off the critical path."""

from __future__ import annotations

import torch

from ..backend import Backend, launch, resolve_backend
from ..layout import HASH

#: Positions or buckets of one program.
BLOCK = 1024


def build_index(
    prediction_tokens: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    base: int,
    num_tokens: int,
    bits: int,
    backend: Backend = "auto",
) -> None:
    """Index the prediction ``tokens = prediction_tokens[base : base + num_tokens]`` of n tokens.

    ::

        positions[base : base + n - 1] = sorted(range(1, n), key=lambda p: (bucket(tokens[p - 1]), p))
        offsets[base + b] = number of positions in the buckets before b     # 0 <= b <= 2**bits

    with ``bucket(token) = (token * HASH mod 2**32) >> (32 - bits)``.

    Args:
        prediction_tokens: [A] int32, tokens 0 or more.
        positions, offsets: [A] int32, written; ``2**bits + 1`` entries of `offsets` are the prediction's own.
        base: where the prediction begins in all three.
        num_tokens: n >= 1.
        bits: log2 of the number of buckets.
        backend: "auto" runs two kernels around PyTorch's sort on CUDA tensors and the reference on CPU tensors.

    No sync. A stable radix sort of n keys of 16 or 32 bits, and a search of 2**bits values in them.
    """
    num_keys, num_buckets = num_tokens - 1, 1 << bits
    if resolve_backend(backend, prediction_tokens) == "reference":
        tokens = prediction_tokens[base : base + num_keys].to(torch.int64)
        bucket = ((tokens * HASH) & 0xFFFFFFFF) >> (32 - bits)
        in_order, order = torch.sort(bucket.to(torch.int32), stable=True)
        positions[base : base + num_keys] = order + 1
        buckets = torch.arange(num_buckets + 1, dtype=torch.int32)
        offsets[base : base + num_buckets + 1] = torch.searchsorted(in_order, buckets, out_int32=True)
        return
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernel import index_kernel, index_keys_kernel

    # A radix sort makes one pass for every 8 bits of the type.
    dtype = torch.int16 if bits < 16 else torch.int32
    keys = torch.empty(num_keys, dtype=dtype, device=prediction_tokens.device)
    launch(
        index_keys_kernel, (-(-num_keys // BLOCK),), (prediction_tokens, keys, base, num_keys, 32 - bits),
        {"BLOCK": BLOCK}, dtype, num_warps=4,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    launch(
        index_kernel, (-(-max(num_keys, num_buckets + 1) // BLOCK),),
        (keys, order, positions, offsets, base, num_keys, num_buckets, 1 << num_keys.bit_length() >> 1),
        {"BLOCK": BLOCK}, dtype, num_warps=4,
    )  # fmt: skip

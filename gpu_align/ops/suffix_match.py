"""The index of a prediction, built where its tokens are, once, off the critical path."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backend import Backend, check_tensor, launch, resolve_backend
from .constants import HASH

#: Positions, buckets or ends of one program.
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
    from .kernels.suffix_match import index_kernel, index_keys_kernel

    # A radix sort makes one pass for every 8 bits of the type.
    dtype = torch.int16 if bits < 16 else torch.int32
    keys = torch.empty(num_keys, dtype=dtype, device=prediction_tokens.device)
    launch(
        index_keys_kernel, -(-num_keys // BLOCK), prediction_tokens, keys, base, num_keys, 32 - bits,
        variant=dtype, num_warps=4, BLOCK=BLOCK,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    launch(
        index_kernel, -(-max(num_keys, num_buckets + 1) // BLOCK),
        keys, order, positions, offsets, base, num_keys, num_buckets, 1 << num_keys.bit_length() >> 1,
        variant=dtype, num_warps=4, BLOCK=BLOCK,
    )  # fmt: skip


class SuffixMatch(NamedTuple):
    """Where the longest suffix of each context ends in its text."""

    #: [B] int32, ``0 <= end < text_len``: ``text[:end]`` ends like the context, so ``text[end]`` may come
    #: next; -1 where there is no match.
    end: torch.Tensor
    #: [B] int32, ``min_match <= length <= max_match``: tokens that agree; 0 where there is no match.
    length: torch.Tensor


def allocate_suffix_match(batch_size: int, device: torch.device | str) -> SuffixMatch:
    """Output tensors for `suffix_match` with this batch size."""
    return SuffixMatch(
        end=torch.full((batch_size,), -1, dtype=torch.int32, device=device),
        length=torch.zeros((batch_size,), dtype=torch.int32, device=device),
    )


def suffix_match(
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    text: torch.Tensor,
    text_len: torch.Tensor,
    slots: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
    min_match: int = 1,
    max_match: int = 64,
    out: SuffixMatch | None = None,
    backend: Backend = "auto",
) -> SuffixMatch:
    """Find, for each request, the longest suffix of its context that occurs in a text.

    The plain scan, for tests and pictures: a step looks matches up in the indices of prediction and context.

    For every batch position ``b`` with ``s = slots[b]``, ``c = context[s, context_start[s]:context_len[s]]``
    and ``t = text[s, :text_len[s]]``::

        best = (-1, 0)
        for end in range(1, len(t)):                  # t[end] exists: something follows the match
            length = 0
            while length < min(max_match, end, len(c)) and t[end - 1 - length] == c[-1 - length]:
                length += 1
            best = the better of best and (end, length)
        (end[b], length[b]) = best if best.length >= min_match else (-1, 0)

    An empty context has no suffix.

    Ties: the longer match is better. Of equally long ones, with an `anchor` the one whose end is nearest
    to it, and at the same distance the one ahead of it (``end > anchor``); without, the latest. So
    ``anchor = 0`` prefers the earliest. The result does not depend on the batch order or the device.

    Args:
        context: [S, T] int32, rows contiguous: one row a slot.
        context_start: [S] int32, ``0 <= context_start <= context_len``: the suffix does not reach before it.
        context_len: [S] int32, ``<= T``: where each row's valid tokens end.
        text: [S, N] int32, rows contiguous. May be `context` itself: the trivial match of the context with
            its own end does not count, because nothing follows it.
        text_len: [S] int32, ``0 <= text_len <= N``.
        slots: [B] int64, ``0 <= slot < S``: which rows, in batch order. May repeat.
        active: [B] int32 or None: requests where it is 0 are not looked at and get ``(-1, 0)``.
        anchor: [B] int32 or None: the end that ties prefer; any value whose distance to an end is below 2^30.
        min_match: shortest match that counts, ``1 <= min_match <= max_match``.
        max_match: longest match that is told apart; longer ones count as this long.
        out: where to write, from `allocate_suffix_match`; allocated if None.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors.

    Returns:
        `SuffixMatch` with ``end`` and ``length``, both [B] int32.

    No sync and, with `out`, no allocation. Values inside the tensors are not checked: that would force a
    sync. O(N + total length of the matches) a request.

    Example: context ``[7, 1, 2]``, text ``[1, 2, 3, 9, 7, 1, 2, 4]`` gives ``end = 7, length = 3``.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: a shape, device or layout differs from the above, or ``1 <= min_match <= max_match`` fails.

    Source: longest-suffix lookup as in SuffixDecoding (https://arxiv.org/abs/2411.04975), without its tree.
    """
    device = context.device if isinstance(context, torch.Tensor) else None
    check_tensor("context", context, dtype=torch.int32, shape=(None, None), contiguous="inner")
    num_slots = context.shape[0]
    for name, per_slot in (("context_start", context_start), ("context_len", context_len)):
        check_tensor(name, per_slot, dtype=torch.int32, shape=(num_slots,), device=device)
    check_tensor("text", text, dtype=torch.int32, shape=(num_slots, None), device=device, contiguous="inner")
    check_tensor("text_len", text_len, dtype=torch.int32, shape=(num_slots,), device=device)
    check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=device)
    batch_size = slots.shape[0]
    for name, per_request in (("active", active), ("anchor", anchor)):
        if per_request is not None:
            check_tensor(name, per_request, dtype=torch.int32, shape=(batch_size,), device=device)
    if not 1 <= min_match <= max_match:
        found = f"min_match={min_match}, max_match={max_match}"
        raise ValueError(f"min_match: expected 1 <= min_match <= max_match, found {found}")
    if active is None:
        active = torch.ones(batch_size, dtype=torch.int32, device=device)
    if out is None:
        out = allocate_suffix_match(batch_size, context.device)
    for name, tensor in zip(("out.end", "out.length"), out, strict=True):
        check_tensor(name, tensor, dtype=torch.int32, shape=(batch_size,), device=device)
    rows = context_start, context_len, text, text_len, slots, active, anchor, *out, min_match, max_match
    if resolve_backend(backend, context) == "reference":
        # Imported here: it brings Numba, where that is installed.
        from .reference.suffix_match import suffix_match_reference

        suffix_match_reference(context, *rows)
    elif batch_size:
        from .kernels.suffix_match import suffix_match_kernel

        suffix_match_kernel[(batch_size,)](
            context, context.stride(0), context_start, context_len, text, text.stride(0), text_len,
            slots if anchor is None else anchor, slots, active, *out, min_match,
            MAX_LENGTH=max_match, HAS_ANCHOR=anchor is not None, BLOCK_N=BLOCK, num_warps=4,
        )  # fmt: skip
    return out

"""The indexes of predictions and contexts, and what arrives: slots, predictions, contexts, new tokens."""

from __future__ import annotations

import torch

from ..backend import launch, resolve_backend
from ..layout import StepState, as_arrays

#: Tokens of one program.
BLOCK = 1024
#: Programs that clear the index of one new slot, at most.
CLEARING = 16


def admit(
    state: StepState,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    staged: torch.Tensor,
    num_rows: int,
    num_texts: int,
    longest: int,
    context_shift: int,
    backend: str = "auto",
) -> None:
    """Write rows of slots with their contexts, and predictions with their indexes, to their places.

    ::

        for slot, is_new, *meta, start, n in staged.rows:
            slot_meta[slot] = meta;  seen[slot] = -1 if is_new else min(seen[slot], 0)
            if is_new:
                indexed[slot] = 0;  context_index[slot] = -1                 # if it uses its context
            if n >= 0:
                token_ids[slot, :n] = staged[start : start + n];  total_len[slot] = n
        for base, n, shift, start in staged.texts:
            tokens = staged[start : start + n]
            prediction_tokens[base : base + n] = tokens
            positions[base : base + n - 1] = sorted(range(1, n), key=lambda p: (bucket(tokens[p - 1]), p))
            offsets[base + b] = number of positions in the buckets before b     # 0 <= b <= 2**(32 - shift)

    with the bucket of README.md.

    Args:
        state: changed in place. No slot is there twice, and texts share no pages. A text has at most half as many
            buckets as its pages have tokens; entries of its pages that are not above mean nothing.
        token_ids, total_len: as of `Drafter`; written.
        staged: [N] int32: `num_rows` rows of `STAGED_ROW`, `num_texts` texts of `STAGED_TEXT`, see `layout`, and
            the tokens of these. On the device, or pinned: each of its words is read once.
        longest: tokens of the longest text.
        context_shift: of `StepSettings`.
        backend: "auto" runs the kernels on CUDA tensors and the reference on CPU tensors.

    No sync, no allocation. One kernel; two more where a text is longer than `BLOCK`, of which a token is compared
    with all blocks of its text.
    """
    if resolve_backend(backend, state.slot_meta) == "reference":
        from .reference import admit_reference

        rows = token_ids.numpy(), total_len.numpy()
        admit_reference(as_arrays(state), *rows, staged.numpy(), num_rows, num_texts)
        return
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernel import admit_kernel, merge_kernel, offsets_kernel

    blocks = -(-longest // BLOCK)
    parts = max(blocks, min(CLEARING, -(-state.context_index[0].numel() // (4 * BLOCK))))
    args = state, staged, num_rows, context_shift, token_ids, token_ids.stride(0), total_len
    launch(admit_kernel, (num_rows + num_texts, parts), args, {}, num_warps=8)
    if longest > BLOCK:
        for kernel in (merge_kernel, offsets_kernel):
            launch(kernel, (num_texts, blocks), (state, staged, num_rows), {}, num_warps=8)


def enter_contexts(state: StepState, context_shift: int, started: torch.Tensor, *batch: torch.Tensor) -> None:
    """Enter the contexts of the new requests of a batch in their indexes, on a GPU: a program `BLOCK` tokens.

    started: [S] int32, on the device, or pinned: 1 from here on for each slot with ``num_sampled > 0``. batch: as
    of a step. The step that follows enters what this did not.
    """
    from .kernel import contexts_kernel

    token_ids, total_len, slots, num_sampled = batch
    grid = slots.shape[0], -(-token_ids.shape[1] // BLOCK)
    args = token_ids, token_ids.stride(0), token_ids.shape[1], total_len, slots, num_sampled
    launch(contexts_kernel, grid, (state, context_shift, started, *args), {}, num_warps=8)


def append(
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
    num_new: torch.Tensor,
    new_tokens: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Write new tokens after those that rows hold, never beyond a row; `reference.append_reference` has the loop.

    Args:
        token_ids, total_len: [S, T], [S] int32; written.
        slots: [B] int64, ``0 <= slot < S``; no slot twice where num_new > 0.
        num_new: [B] int32.
        new_tokens: [B, N] int64, rows contiguous, in the domain of int32.
        backend: as of `admit`.

    No sync, no allocation, one kernel.
    """
    if resolve_backend(backend, token_ids) == "reference":
        from .reference import append_reference

        rows, batch = (token_ids.numpy(), total_len.numpy()), (slots.numpy(), num_new.numpy())
        append_reference(*rows, *batch, new_tokens.numpy())
        return
    from .kernel import append_kernel

    bound = token_ids, token_ids.stride(0), token_ids.shape[1], total_len, slots, num_new
    args = *bound, new_tokens, new_tokens.stride(0), new_tokens.shape[1]
    launch(append_kernel, (slots.shape[0],), args, {}, num_warps=1)

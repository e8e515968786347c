"""Cut the drafts of a batch to a budget, on either backend."""

from __future__ import annotations

import torch

from .backend import Backend, launch, resolve_backend
from .draft import Draft
from .reference.draft_budget import limit_drafts_reference


def limit_drafts_inplace(
    draft: Draft,
    budget: torch.Tensor,
    survival: torch.Tensor,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
    vocab_size: int,
    backend: Backend = "auto",
) -> None:
    """Keep the `budget` likeliest draft tokens of a batch; draft_budget.md has the order of ties.

    Args:
        draft: [B, K], contiguous, changed in place; its confidences are from 0 to 1.
        budget: [1] int32: below 0 is 0.
        survival: [at least B, K] int32, scratch.
        token_ids, total_len, slots, vocab_size: of the step that made the draft: where its padding comes from.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors; same results.

    On CUDA nothing is allocated, copied to the host or waited for.
    """
    batch_size, num_draft_tokens = draft.token_ids.shape
    if batch_size == 0:
        return
    if resolve_backend(backend, draft.token_ids) == "reference":
        limit_drafts_reference(draft, budget, token_ids, total_len, slots, vocab_size)
        return
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernels.draft_budget import limit_drafts_kernel

    sizes = {
        "BLOCK_B": max(32, 1 << (batch_size - 1).bit_length()),
        "SEARCHES": num_draft_tokens.bit_length(),
    }
    launch(
        limit_drafts_kernel, 1, *draft, survival, token_ids, token_ids.stride(0), total_len, slots, budget,
        batch_size, num_draft_tokens, token_ids.shape[1], vocab_size,
        variant=tuple(sizes.values()), num_warps=min(max(sizes["BLOCK_B"] // 64, 1), 16), **sizes,
    )  # fmt: skip

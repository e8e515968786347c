"""One launch a step: realign every request of a batch with its prediction and draft from it."""

from __future__ import annotations

import torch

from ..draft import Draft, SurvivalTables
from ..state import StepState


def launch_step(
    state: StepState,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
    num_sampled: torch.Tensor,
    tables: SurvivalTables,
    out: Draft,
    *,
    length_quarters: int,
    min_match: int,
    min_context_match: int,
    vocab_size: int,
) -> None:
    """Launch the kernel; nothing is checked and nothing allocated. `state` and `out` are written in place.

    Args:
        state: `StepState`; a slot's columns of ``about`` are the host's, the rest the kernel's.
        token_ids: [S, T] int32, rows contiguous: prompt and output so far.
        total_len: [S] int32, ``<= T``: tokens valid in each row.
        slots: [B] int64, distinct: batch position -> slot.
        num_sampled: [B] int32: 0 leaves the slot's state alone and drafts nothing.
        tables: `SurvivalTables` for K.
        out: `Draft` for B requests and K drafts, ``1 <= K <= 256``.
        length_quarters: drafts for each four tokens of matched suffix.
        min_match: shortest match in the prediction, 1 to 64.
        min_context_match: the same in the context.
        vocab_size: a draft ends before the first token that is not below it.

    Predictions have fewer than 2**24 tokens, contexts fewer than 2**25.
    """
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernels import _step_kernel

    if slots.shape[0] == 0:
        return
    K = out.token_ids.shape[1]
    buckets = state.recent.shape[1]
    _step_kernel[(slots.shape[0],)](
        *state, state.recent.stride(0),
        token_ids, token_ids.stride(0), total_len, slots, num_sampled,
        tables.length_bucket, tables.margin_bucket, tables.keep, tables.gain, tables.confidence,
        out.token_ids, out.length, out.confidence, out.source,
        33 - buckets.bit_length(), length_quarters, min_match, min_context_match, token_ids.shape[1], vocab_size,
        K=K, BLOCK_K=1 << (K - 1).bit_length(), num_warps=1 if K <= 128 else 4,
    )  # fmt: skip

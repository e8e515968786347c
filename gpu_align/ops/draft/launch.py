"""Public `draft`: checks, allocation and dispatch."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from .._check import Backend, check_tensor, resolve_backend
from ..suffix_match import SuffixMatch
from .reference import draft_reference
from .tables import MAX_MATCH, SURVIVAL_ONE, SurvivalTables


class Source(IntEnum):
    """Where a draft was read from."""

    NONE = 0
    PREDICTION = 1
    #: The request's own prompt or output.
    CONTEXT = 2
    RECIPE = 3


class Draft(NamedTuple):
    """Draft tokens of a batch. The caller may write to the tensors; the next call rewrites them."""

    #: [B, K] int64: from `length` on, the last token of the context. ``0 <= token < vocab_size``.
    token_ids: torch.Tensor
    #: [B] int32, ``0 <= length <= K``: how many of them are meant.
    length: torch.Tensor
    #: [B, K] float32, ``0 < p <= 1``: estimated probability that a draft is accepted given that those before
    #: it were; 0 from `length` on.
    confidence: torch.Tensor
    #: [B] int8: a `Source`; NONE where `length` is 0.
    source: torch.Tensor


def allocate_draft(batch_size: int, num_draft_tokens: int, device: torch.device | str) -> Draft:
    """Output tensors for `draft` with this batch size and K."""
    return Draft(
        token_ids=torch.zeros((batch_size, num_draft_tokens), dtype=torch.int64, device=device),
        length=torch.zeros(batch_size, dtype=torch.int32, device=device),
        confidence=torch.zeros((batch_size, num_draft_tokens), dtype=torch.float32, device=device),
        source=torch.zeros(batch_size, dtype=torch.int8, device=device),
    )


def draft(
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    cursor: torch.Tensor,
    prediction_match: SuffixMatch,
    context_match: SuffixMatch,
    tables: SurvivalTables,
    *,
    vocab_size: int,
    active: torch.Tensor | None = None,
    length_factor: int = 4,
    min_survival: float = 0.05,
    out: Draft | None = None,
    backend: Backend = "auto",
) -> Draft:
    """Choose one continuation a request, its length and its confidence, and write the draft tokens.

    For every batch position, with the candidates in this order and K columns in the tables::

        0  PREDICTION at prediction_match.end, matched prediction_match.length tokens
        1  PREDICTION at cursor, matched 0 tokens                       (if it is another position)
        2  CONTEXT    at context_match.end, matched context_match.length tokens

        for candidate in candidates:
            room  = tokens of its text from its position on; skipped if 0
            limit = K if matched >= MAX_MATCH else min(length_factor * matched + 1, K)
            keep  = number of k < limit with survival[class][k] >= min_survival
            gain  = sum(survival[class][:keep])           # expected accepted drafts; whole match: infinite
        best   = the candidate with the largest gain > 0
        length = min(best.keep, best.room, T - total_len), cut before the first token outside the vocabulary
        token_ids[:length]  = best.text[best.position:best.position + length]
        confidence[:length] = P(draft k accepted | drafts before it accepted) for best.class

    Ties: the earlier candidate. The classes are in this folder's README.md. A candidate's gain does not
    shrink with its room: a sure continuation wins against a doubtful one up to its last token.

    Args:
        prediction: [S, N] int32, rows contiguous.
        prediction_len: [S] int32, ``0 <= prediction_len <= N``.
        context: [S, T] int32, rows contiguous.
        context_start: [S] int32: where each output begins.
        context_len: [S] int32, ``<= T``: tokens so far. A draft never reaches beyond T.
        slots: [B] int64, ``0 <= slot < S``.
        cursor: [B] int32, ``0 <= cursor <= prediction_len``, from `realign`.
        prediction_match: from `suffix_match` on the prediction, with ``max_match = MAX_MATCH``.
        context_match: from `suffix_match` on the context itself, likewise.
        tables: `SurvivalTables` on the same device; its width is K.
        vocab_size: tokens are below it.
        active: [B] int32 or None: requests where it is 0 get length 0.
        length_factor: drafts a matched token, ``>= 0``: more tokens a step for more rejected ones.
        min_survival: probability below which drafting stops, ``0 <= p <= 1``; the same trade-off.
        out: where to write, from `allocate_draft`; allocated if None.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors.

    Returns:
        `Draft`.

    No sync and, with `out`, no allocation. O(K) a request.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: a shape, device or layout differs from the above, or a setting is outside its domain.

    Source: choosing by expected accepted length is what suffix decoding (https://arxiv.org/abs/2411.04975) does
    with frequencies in its tree; here the frequencies are learned offline, by class of evidence.
    """
    num_slots = check_tensor(
        "context", context, dtype=torch.int32, shape=(None, None), contiguous="inner"
    ).shape[0]
    device = context.device
    check_tensor(
        "prediction",
        prediction,
        dtype=torch.int32,
        shape=(num_slots, None),
        device=device,
        contiguous="inner",
    )
    for name, per_slot in (
        ("prediction_len", prediction_len),
        ("context_start", context_start),
        ("context_len", context_len),
    ):
        check_tensor(name, per_slot, dtype=torch.int32, shape=(num_slots,), device=device)
    batch_size = check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=device).shape[0]
    if active is None:
        active = torch.ones(batch_size, dtype=torch.int32, device=device)
    for name, per_request in (
        ("active", active),
        ("cursor", cursor),
        ("prediction_match.end", prediction_match.end),
        ("prediction_match.length", prediction_match.length),
        ("context_match.end", context_match.end),
        ("context_match.length", context_match.length),
    ):
        check_tensor(name, per_request, dtype=torch.int32, shape=(batch_size,), device=device)
    check_tensor("tables.bucket", tables.bucket, dtype=torch.int32, shape=(MAX_MATCH + 1,), device=device)
    K = tables.survival.shape[1]
    if length_factor < 0:
        raise ValueError(f"length_factor: expected 0 or more, found {length_factor}")
    if not 0 <= min_survival <= 1:
        raise ValueError(f"min_survival: expected 0 <= p <= 1, found {min_survival}")
    if out is None:
        out = allocate_draft(batch_size, K, device)
    check_tensor("out.token_ids", out.token_ids, dtype=torch.int64, shape=(batch_size, K), device=device)
    check_tensor("out.length", out.length, dtype=torch.int32, shape=(batch_size,), device=device)
    check_tensor("out.confidence", out.confidence, dtype=torch.float32, shape=(batch_size, K), device=device)
    check_tensor("out.source", out.source, dtype=torch.int8, shape=(batch_size,), device=device)
    run = launch_draft if resolve_backend(backend, context) == "triton" else draft_reference
    run(
        prediction, prediction_len, context, context_start, context_len, slots, active, cursor,
        *prediction_match, *context_match, tables, *out,
        length_factor, survival_units(min_survival), vocab_size,
    )  # fmt: skip
    return out


def survival_units(probability: float) -> int:
    """A probability in the integer units of the survival table, at least 1: no draft of survival 0."""
    return max(round(probability * SURVIVAL_ONE), 1)


def launch_draft(
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
    prediction_end: torch.Tensor,
    prediction_matched: torch.Tensor,
    context_end: torch.Tensor,
    context_matched: torch.Tensor,
    tables: SurvivalTables,
    token_ids: torch.Tensor,
    length: torch.Tensor,
    confidence: torch.Tensor,
    source: torch.Tensor,
    length_factor: int,
    min_survival: int,
    vocab_size: int,
) -> None:
    """Launch the kernel; nothing is checked and nothing allocated. Arguments as in `draft_reference`."""
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernels import _draft_kernel

    if slots.shape[0] == 0:
        return
    K = token_ids.shape[1]
    _draft_kernel[(slots.shape[0],)](
        prediction, prediction.stride(0), prediction_len,
        context, context.stride(0), context_start, context_len,
        slots, active, cursor,
        prediction_end, prediction_matched, context_end, context_matched,
        tables.bucket, tables.survival, tables.confidence,
        token_ids, length, confidence, source,
        length_factor, min_survival, context.shape[1], vocab_size,
        K=K, BLOCK_K=1 << (K - 1).bit_length(), num_warps=1 if K <= 128 else 4,
    )  # fmt: skip

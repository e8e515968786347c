"""Public `draft`: checks, allocation and dispatch."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from .._check import Backend, check_tensor, resolve_backend
from ..realign import Alignment
from ..suffix_match import SuffixMatch
from .reference import draft_reference
from .tables import NUM_CLASSES, SurvivalTables


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
    alignment: Alignment,
    prediction_matches: tuple[SuffixMatch, SuffixMatch],
    context_matches: tuple[SuffixMatch, SuffixMatch],
    tables: SurvivalTables,
    *,
    vocab_size: int,
    active: torch.Tensor | None = None,
    length_factor: float = 8.0,
    out: Draft | None = None,
    backend: Backend = "auto",
) -> Draft:
    """Choose one continuation a request, its length and its confidence, and write the draft tokens.

    For every batch position, with the candidates in this order and K columns in the tables::

        PREDICTION  at the end of the best match, then of the second best
        PREDICTION  at cursor - 2, cursor - 1, ..., cursor + 16
        CONTEXT     at the end of the best match, then of the second best

        matched = common suffix, up to MAX_MATCH, of the output and of the text before the position
        room    = tokens of the text from the position on; no candidate if 0
        margin  = matched - the longest `matched` of a candidate that expects another next token
                  (where the first candidate with the largest `matched` expects another: that largest)
        for candidate in candidates:
            limit = K if matched >= MAX_MATCH else min(length_factor * matched // 1 + 1, K)
            num   = min(limit, keep[class])               # drafts whose survival reaches the threshold
            value = gain[class][num]                      # expected accepted drafts; whole match: infinite
        best   = the candidate with the largest value > 0
        length = min(best.num, best.room, T - total_len), cut before the first token outside the vocabulary
        token_ids[:length]  = best.text[best.position:best.position + length]
        confidence[:length] = P(draft k accepted | drafts before it accepted) for best.class

    Ties: the earlier candidate. The classes are in this folder's README.md. A candidate's value does not
    shrink with its room: a sure continuation wins against a doubtful one up to its last token.

    Args:
        prediction: [S, N] int32, rows contiguous.
        prediction_len: [S] int32, ``0 <= prediction_len <= N``.
        context: [S, T] int32, rows contiguous.
        context_start: [S] int32: where each output begins.
        context_len: [S] int32, ``<= T``: tokens so far. A draft never reaches beyond T.
        slots: [B] int64, ``0 <= slot < S``.
        alignment: from `realign`.
        prediction_matches: best and runner-up of `suffix_match` on the prediction, with
            ``max_match = MAX_MATCH`` and ``from_start``.
        context_matches: best and runner-up of `suffix_match` on the context itself, likewise.
        tables: `SurvivalTables` on the same device; their width is K.
        vocab_size: tokens are below it.
        active: [B] int32 or None: requests where it is 0 get length 0.
        length_factor: drafts a matched token, in quarters, ``>= 0``: more tokens a step for more rejected ones.
        out: where to write, from `allocate_draft`; allocated if None.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors.

    Returns:
        `Draft`.

    No sync and, with `out`, no allocation. O(K + matched tokens) a request.

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
    matches = (*prediction_matches, *context_matches)
    names = ("prediction_matches[0]", "prediction_matches[1]", "context_matches[0]", "context_matches[1]")
    found = {
        f"{name}.{field}": t
        for name, m in zip(names, matches, strict=True)
        for field, t in m._asdict().items()
    }
    aligned = {f"alignment.{field}": t for field, t in alignment._asdict().items()}
    for name, per_request in ({"active": active} | aligned | found).items():
        check_tensor(name, per_request, dtype=torch.int32, shape=(batch_size,), device=device)
    K = tables.confidence.shape[1]
    check_tensor("tables.keep", tables.keep, dtype=torch.int32, shape=(NUM_CLASSES,), device=device)
    check_tensor("tables.gain", tables.gain, dtype=torch.int32, shape=(NUM_CLASSES, K + 1), device=device)
    quarters = length_quarters(length_factor)
    if out is None:
        out = allocate_draft(batch_size, K, device)
    check_tensor("out.token_ids", out.token_ids, dtype=torch.int64, shape=(batch_size, K), device=device)
    check_tensor("out.length", out.length, dtype=torch.int32, shape=(batch_size,), device=device)
    check_tensor("out.confidence", out.confidence, dtype=torch.float32, shape=(batch_size, K), device=device)
    check_tensor("out.source", out.source, dtype=torch.int8, shape=(batch_size,), device=device)
    run = launch_draft if resolve_backend(backend, context) == "triton" else draft_reference
    run(
        prediction, prediction_len, context, context_start, context_len, slots, active, *alignment,
        *prediction_matches[0], *prediction_matches[1], *context_matches[0], *context_matches[1],
        tables, *out, quarters, vocab_size,
    )  # fmt: skip
    return out


def length_quarters(length_factor: float) -> int:
    """A length factor as the kernel takes it.

    Raises:
        ValueError: it is no multiple of 0.25 from 0 to 2^20.
    """
    quarters = 4 * length_factor
    # The upper end keeps its product with a matched length within the kernel's 32 bits.
    if not (0 <= quarters <= 1 << 22 and quarters == int(quarters)):
        raise ValueError(f"length_factor: expected a multiple of 0.25 from 0 to 2^20, found {length_factor}")
    return int(quarters)


def launch_draft(
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
    followed: torch.Tensor,
    prediction_end: torch.Tensor,
    prediction_matched: torch.Tensor,
    prediction_second_end: torch.Tensor,
    prediction_second_matched: torch.Tensor,
    context_end: torch.Tensor,
    context_matched: torch.Tensor,
    context_second_end: torch.Tensor,
    context_second_matched: torch.Tensor,
    tables: SurvivalTables,
    token_ids: torch.Tensor,
    length: torch.Tensor,
    confidence: torch.Tensor,
    source: torch.Tensor,
    length_quarters: int,
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
        slots, active, cursor, followed,
        prediction_end, prediction_matched, prediction_second_end, prediction_second_matched,
        context_end, context_matched, context_second_end, context_second_matched,
        tables.length_bucket, tables.margin_bucket, tables.keep, tables.gain, tables.confidence,
        token_ids, length, confidence, source,
        length_quarters, context.shape[1], vocab_size,
        K=K, BLOCK_K=1 << (K - 1).bit_length(), num_warps=1 if K <= 128 else 4,
    )  # fmt: skip

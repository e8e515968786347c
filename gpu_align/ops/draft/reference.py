"""`draft` in plain Python and NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .tables import (
    CLASS_CONTEXT,
    CLASS_CURSOR_ALONE,
    CLASS_CURSOR_BESIDE_MATCH,
    CLASS_WHOLE,
    MAX_MATCH,
    NUM_DISTANCES,
    SurvivalTables,
)

_BEST_GAIN = 0x7FFFFFFF


class Candidate(NamedTuple):
    """A place that the next tokens may be read from."""

    source: int
    position: int
    room: int
    matched: int
    klass: int


def candidates(
    num_output: int,
    total: int,
    num_text: int,
    cursor: int,
    prediction_match: tuple[int, int],
    context_match: tuple[int, int],
    bucket: npt.NDArray[np.int32],
) -> list[Candidate]:
    """The candidates of one request, in the order that ties prefer, those without room left out."""
    end, matched = prediction_match
    own_end, own_matched = context_match
    found = []
    if end >= 0:
        away = end - cursor
        distance = 4 if away < 0 else away if away <= 1 else 2 if away <= 16 else 3
        whole = end == num_output and matched == MAX_MATCH and num_output <= MAX_MATCH
        klass = CLASS_WHOLE if whole else int(bucket[matched]) * NUM_DISTANCES + distance
        found.append(Candidate(1, end, num_text - end, matched, klass))
    if cursor != end:
        klass = CLASS_CURSOR_ALONE if end < 0 else CLASS_CURSOR_BESIDE_MATCH
        found.append(Candidate(1, cursor, num_text - cursor, 0, klass))
    if own_end >= 0:
        klass = CLASS_CONTEXT + int(bucket[own_matched])
        found.append(Candidate(2, own_end, total - own_end, own_matched, klass))
    return [c for c in found if c.room > 0]


def choose(
    found: list[Candidate], survival: npt.NDArray[np.int32], length_factor: int, min_survival: int
) -> tuple[Candidate, int] | None:
    """The candidate with the largest expected number of accepted drafts, and how many to draft."""
    best: tuple[int, Candidate, int] | None = None
    K = survival.shape[1]
    for c in found:
        limit = K if c.matched >= MAX_MATCH else min(length_factor * c.matched + 1, K)
        row = survival[c.klass, :limit]
        keep = int((row >= min_survival).sum())
        gain = _BEST_GAIN if c.klass == CLASS_WHOLE else int(row[:keep].sum())
        if gain > (best[0] if best else 0):
            best = gain, c, min(keep, c.room)
    return best and best[1:]


def draft_reference(
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
    """Same arguments, same results as the kernel's launcher; all on the CPU."""
    survival, probability, bucket = (t.numpy() for t in (tables.survival, tables.confidence, tables.bucket))
    texts = {1: prediction.numpy(), 2: context.numpy()}
    starts, totals, text_lens = (t.numpy() for t in (context_start, context_len, prediction_len))
    drafted, lengths, confidences, sources = (t.numpy() for t in (token_ids, length, confidence, source))
    matches = (t.tolist() for t in (cursor, prediction_end, prediction_matched, context_end, context_matched))
    for b, (slot, is_active, at, end, matched, own_end, own_matched) in enumerate(
        zip(slots.tolist(), active.tolist(), *matches, strict=True)
    ):
        total = int(totals[slot])
        last = int(texts[2][slot, total - 1]) if total > 0 else 0
        drafted[b] = last if 0 <= last < vocab_size else 0
        lengths[b], confidences[b], sources[b] = 0, 0.0, 0
        if is_active <= 0:
            continue
        num_output, num_text = total - int(starts[slot]), int(text_lens[slot])
        found = candidates(num_output, total, num_text, at, (end, matched), (own_end, own_matched), bucket)
        chosen = choose(found, survival, length_factor, min_survival)
        if chosen is None:
            continue
        best, num = chosen
        num = max(min(num, context.shape[1] - total), 0)
        tokens = texts[best.source][slot, best.position : best.position + num]
        bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        num = int(bad[0]) if bad.size else num
        if num:
            drafted[b, :num], confidences[b, :num] = tokens[:num], probability[best.klass, :num]
            lengths[b], sources[b] = num, best.source

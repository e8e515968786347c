"""A whole step as a loop over the requests: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._jit import njit
from ..draft import Draft, SurvivalTables
from ..draft.reference import (
    FIRST_OWN,
    Candidates,
    allocate_candidates,
    candidates,
    choose,
    compose,
    is_whole,
)
from ..index.reference import insert_recent
from ..layout import CONTEXT_START, OUTPUT_START, SEEN, TEXT_LEN, VACANT
from ..realign.reference import realign, start_over
from ..state import StepArrays, StepState

IntArray = npt.NDArray[np.signedinteger[Any]]


def step_reference(
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
    """Same arguments, same results as the kernel's launcher; all on the CPU."""
    arrays = state.numpy()
    _step(
        arrays, token_ids.numpy(), total_len.numpy(), slots.numpy(), num_sampled.numpy(),
        tables.keep.numpy(), tables.gain.numpy(), tables.confidence.numpy(),
        out.token_ids.numpy(), out.length.numpy(), out.confidence.numpy(), out.source.numpy(),
        allocate_candidates(), recent_shift(arrays), length_quarters, min_match, min_context_match, vocab_size,
    )  # fmt: skip


def recent_shift(arrays: StepArrays) -> int:
    """The shift of `bucket_of` for the index of the contexts."""
    return 33 - int(arrays.recent.shape[1]).bit_length()


@njit
def _step(
    state: StepArrays,
    context: IntArray,
    total_len: IntArray,
    slots: IntArray,
    num_sampled: IntArray,
    keep: npt.NDArray[np.int32],
    gain: npt.NDArray[np.int32],
    confidence: npt.NDArray[np.float32],
    out_tokens: IntArray,
    out_length: IntArray,
    out_confidence: npt.NDArray[np.float32],
    out_source: IntArray,
    found: Candidates,
    shift: int,
    length_quarters: int,
    min_match: int,
    min_context_match: int,
    vocab_size: int,
) -> None:
    width, K = context.shape[1], out_tokens.shape[1]
    for b in range(len(slots)):
        slot = slots[b]
        row, total = context[slot], int(total_len[slot])
        length, klass, source = 0, 0, 0
        if num_sampled[b] > 0 and state.about[slot, OUTPUT_START] != VACANT:
            take_in(state, row, slot, total, shift)
            cursor = candidates(state, row, slot, total, min_match, min_context_match, shift, found)
            whole = is_whole(state, slot, cursor, total)
            lane, num = choose(found, whole, keep, gain, length_quarters)
            if num > 0:
                klass = found.klass[lane]
                length, _ = compose(state, row, slot, lane, found.position[lane], num, total, out_tokens[b])
            length = max(min(length, width - total), 0)
            # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
            for k in range(length):
                if not 0 <= out_tokens[b, k] < vocab_size:
                    length = k
                    break
            source = 0 if length == 0 else 2 if lane >= FIRST_OWN else 1
        last = int(row[total - 1]) if total > 0 else 0
        out_tokens[b, length:] = last if 0 <= last < vocab_size else 0
        out_length[b], out_source[b] = length, source
        for k in range(K):
            out_confidence[b, k] = confidence[klass, k] if k < length else 0.0


@njit
def take_in(state: StepArrays, context: IntArray, slot: int, total: int, shift: int) -> None:
    """Bring what is known of a request up to date: the index of its context, and where it stands. context: [T]."""
    seen = int(state.aligned[slot, SEEN])
    if seen < 0 or total < seen:
        start_over(state, slot)
        state.recent[slot] = -1
        seen = 0
        state.aligned[slot, SEEN] = 0
    if state.about[slot, CONTEXT_START] != VACANT:
        insert_recent(state.recent[slot], context, seen, total, shift)
    if state.about[slot, TEXT_LEN] > 0:
        realign(state, context, slot, total)
    state.aligned[slot, SEEN] = total

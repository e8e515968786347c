"""A whole step in NumPy, for the batch at once: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..draft import Draft, SurvivalTables
from ..draft.reference import IS_CONTEXT, candidates, choose, compose
from ..index.reference import insert_recent
from ..layout import CONTEXT_START, OUTPUT_START, SEEN, TEXT_LEN, VACANT
from ..realign.reference import realign_reference, start_over
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
    arrays, context = state.numpy(), token_ids.numpy()
    batch, totals = slots.numpy(), total_len.numpy()[slots.numpy()]
    tokens, lengths, confidences, sources = (t.numpy() for t in out)
    last = np.where(totals > 0, context[batch, np.maximum(totals - 1, 0)], 0)
    tokens[:] = np.where((last >= 0) & (last < vocab_size), last, 0)[:, None]
    lengths[:], confidences[:], sources[:] = 0, 0.0, 0
    run = np.flatnonzero((num_sampled.numpy() > 0) & (arrays.about[batch, OUTPUT_START] != VACANT))
    if not run.size:
        return
    shift = recent_shift(arrays)
    batch, totals = batch[run], totals[run]
    take_in(arrays, context, batch, totals)
    found = candidates(arrays, context, batch, totals, min_match, min_context_match, shift)
    chosen = choose(found, tables.keep.numpy(), tables.gain.numpy(), length_quarters)
    K = tokens.shape[1]
    written, num, _ = compose(arrays, context, batch, found, chosen, totals, K)
    num = np.clip(num, 0, np.maximum(context.shape[1] - totals, 0))
    ahead = np.arange(K)
    bad = (ahead < num[:, None]) & ((written < 0) | (written >= vocab_size))
    num = np.where(bad.any(axis=1), bad.argmax(axis=1), num)
    inside = ahead < num[:, None]
    klass = found.klass[np.arange(len(run)), chosen.lane]
    tokens[run] = np.where(inside, written, tokens[run])
    confidences[run] = np.where(inside, tables.confidence.numpy()[klass], 0.0)
    lengths[run] = num
    sources[run] = np.where(num > 0, np.where(IS_CONTEXT[chosen.lane], 2, 1), 0)


def recent_shift(arrays: StepArrays) -> int:
    """The shift of `bucket_of` for the index of the contexts."""
    return 33 - int(arrays.recent.shape[1]).bit_length()


def take_in(arrays: StepArrays, context: IntArray, slots: IntArray, totals: IntArray) -> None:
    """Bring the state of these requests up to date: the index of their contexts, and where they stand."""
    seen = arrays.aligned[slots, SEEN]
    fresh = slots[(seen < 0) | (totals < seen)]
    if fresh.size:
        start_over(arrays, fresh)
        arrays.recent[fresh] = -1
        arrays.aligned[fresh, SEEN] = 0
        seen = arrays.aligned[slots, SEEN]
    shift = recent_shift(arrays)
    # The end behind all tokens is entered with the next ones: nothing follows it yet.
    begin = np.maximum(seen - 1, 0)
    new = np.maximum(totals - 1, 0) - begin
    new[arrays.about[slots, CONTEXT_START] == VACANT] = 0
    insert_recent(arrays.recent, context, slots, begin, np.maximum(new, 0), shift)
    told = arrays.about[slots, TEXT_LEN] > 0
    if told.any():
        realign_reference(arrays, context, slots[told], totals[told])
    arrays.aligned[slots, SEEN] = totals

"""A whole step as a loop over the requests: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .._jit import Entry, njit
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
from ..recipe import RecipeTable
from ..recipe.reference import copy_recipe, likelier
from ..recipe.table import RecipeArrays
from ..state import StepArrays, StepState

IntArray = npt.NDArray[np.signedinteger[Any]]
FloatArray = npt.NDArray[np.float32]


class TableArrays(NamedTuple):
    """What of `SurvivalTables` a choice is made by, as NumPy sees it."""

    keep: npt.NDArray[np.int32]
    gain: npt.NDArray[np.int32]
    confidence: FloatArray

    @classmethod
    def of(cls, tables: SurvivalTables) -> TableArrays:
        """The same memory; on the CPU only."""
        return cls(tables.keep.numpy(), tables.gain.numpy(), tables.confidence.numpy())


class DraftArrays(NamedTuple):
    """`Draft` as NumPy sees it."""

    token_ids: IntArray
    length: IntArray
    confidence: FloatArray
    source: IntArray


class StepReference:
    """The step of one `Drafter` on the CPU: called like the kernel's launcher, with the same results.

    What the drafter keeps is looked at once, here, and the loop is compiled by now: a step does neither.
    """

    def __init__(self, state: StepState, tables: SurvivalTables, recipes: RecipeTable, out: Draft) -> None:
        self._recipes = recipes.numpy()
        self._bind(state, tables, out)
        inputs = (np.zeros((1, 1), np.int32), *(np.zeros(1, kind) for kind in (np.int32, np.int64, np.int32)))
        self._run = _step.prepare(*self._arrays, *inputs, 0, 0, 0, 0)

    def _bind(self, state: StepState, tables: SurvivalTables, out: Draft) -> None:
        self._bound = state, tables, out
        self._arrays = (
            state.numpy(),
            TableArrays.of(tables),
            self._recipes,
            DraftArrays(*(tensor.numpy() for tensor in out)),
            allocate_candidates(),
        )

    def __call__(
        self,
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
        bound = self._bound
        if not (state is bound[0] and tables is bound[1] and out is bound[2]):
            self._bind(state, tables, out)
        bad = self._run(
            *self._arrays, token_ids.numpy(), total_len.numpy(), slots.numpy(), num_sampled.numpy(),
            length_quarters, min_match, min_context_match, vocab_size,
        )  # fmt: skip
        if bad >= 0:
            slot, (num_slots, width) = int(slots[bad]), token_ids.shape
            if not 0 <= slot < num_slots:
                raise ValueError(f"slots: expected 0 <= slot < {num_slots}, found {slot}")
            raise ValueError(f"total_len[{slot}]: expected at most {width}, found {int(total_len[slot])}")


@Entry
def _step(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    out: DraftArrays,
    found: Candidates,
    context: IntArray,
    total_len: IntArray,
    slots: IntArray,
    num_sampled: IntArray,
    length_quarters: int,
    min_match: int,
    min_context_match: int,
    vocab_size: int,
) -> int:
    """-1; or where in the batch is no slot, or one with more tokens than a row holds, with nothing done."""
    (num_slots, width), K = context.shape, out.token_ids.shape[1]
    for b in range(len(slots)):
        # What is compiled would read on outside of the arrays.
        if not 0 <= slots[b] < num_slots or total_len[slots[b]] > width:
            return b
    for b in range(len(slots)):
        slot = slots[b]
        row, total, draft = context[slot], int(total_len[slot]), out.token_ids[b]
        lane, length, klass, recipe = 0, 0, 0, -1
        if num_sampled[b] > 0 and state.about[slot, OUTPUT_START] != VACANT:
            take_in(state, row, slot, total)
            cursor = candidates(state, row, slot, total, min_match, min_context_match, found)
            whole = is_whole(state, slot, cursor, total)
            lane, num, value = choose(found, whole, tables.keep, tables.gain, length_quarters)
            recipe = likelier(recipes, row, total, value)
            if recipe >= 0:
                length = copy_recipe(recipes, recipe, draft)
            elif num > 0:
                klass = found.klass[lane]
                length, _ = compose(state, row, slot, lane, found.position[lane], num, total, draft)
            length = max(min(length, width - total), 0)
            # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
            for k in range(length):
                if not 0 <= draft[k] < vocab_size:
                    length = k
                    break
        last = int(row[total - 1]) if total > 0 else 0
        draft[length:] = last if 0 <= last < vocab_size else 0
        out.length[b] = length
        out.source[b] = 0 if length == 0 else 3 if recipe >= 0 else 2 if lane >= FIRST_OWN else 1
        for k in range(K):
            if k >= length:
                out.confidence[b, k] = 0.0
            elif recipe >= 0:
                out.confidence[b, k] = recipes.confidence[recipe, k]
            else:
                out.confidence[b, k] = tables.confidence[klass, k]
    return -1


@njit
def take_in(state: StepArrays, context: IntArray, slot: int, total: int) -> None:
    """Bring what is known of a request up to date: the index of its context, and where it stands. context: [T]."""
    seen = int(state.aligned[slot, SEEN])
    if seen < 0 or total < seen:
        start_over(state, slot)
        state.recent[slot] = -1
        seen = 0
        state.aligned[slot, SEEN] = 0
    if state.about[slot, CONTEXT_START] != VACANT:
        insert_recent(state.recent[slot], context, seen, total)
    if state.about[slot, TEXT_LEN] > 0:
        realign(state, context, slot, total)
    state.aligned[slot, SEEN] = total

"""A whole step as a loop over the requests: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import constants as c
from ..backend import check_batch
from ..draft import Draft, SurvivalTables, TableArrays
from ..jit import Entry, njit
from ..recipe_lookup import RecipeArrays, RecipeTable
from ..state import StepArrays, StepSettings, StepState
from .draft import (
    Candidates,
    allocate_candidates,
    candidates,
    choose,
    classes,
    compose,
    first_row_of,
    indentation_shift,
    is_exact_prefix,
    repeats,
    shifted,
)
from .realign import Alignment, realign, standing, start_over
from .recipe_lookup import copy_recipe, find_recipe, likelier
from .suffix_match import Context, Prediction, insert_context, shift_of

IntArray = npt.NDArray[np.signedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]


class DraftArrays(NamedTuple):
    """`Draft` as NumPy sees it."""

    token_ids: IntArray
    length: IntArray
    confidence: npt.NDArray[np.float32]
    source: IntArray


class Request(NamedTuple):
    """What a step knows of one request."""

    prediction: Prediction
    context: Context
    alignment: Alignment
    #: Bit i: it uses recipe pack i.
    recipe_packs: int
    #: Output tokens that count as out of sync before the first; 0 but for a memory.
    prior: int


class Choice(NamedTuple):
    """What a step drafts from."""

    #: Where the output stands in the prediction.
    cursor: int
    #: The best candidate, how many drafts it is good for, and how many of these are expected to be accepted.
    lane: int
    num: int
    expected: int
    #: The recipe that is drafted instead, or -1.
    recipe: int


class StepReference:
    """The step of one `Drafter` on the CPU: made and called like the kernel's launcher, with the same results.

    The loop is compiled here: no step compiles.
    """

    def __init__(
        self,
        state: StepState,
        tables: SurvivalTables,
        recipes: RecipeTable,
        out: Draft,
        settings: StepSettings,
    ) -> None:
        self._bound = (
            state.numpy(),
            tables.numpy(),
            recipes.numpy(),
            DraftArrays(*(tensor.numpy() for tensor in out)),
            allocate_candidates(),
            np.zeros(len(state.slot_meta), dtype=np.bool_),
            settings,
        )
        inputs = (np.zeros((1, 1), np.int32), *(np.zeros(1, kind) for kind in (np.int32, np.int64, np.int32)))
        self._run = _step.prepare(*self._bound, *inputs)

    def __call__(
        self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        arrays = token_ids.numpy(), total_len.numpy(), slots.numpy(), num_sampled.numpy()
        if not self._run(*self._bound, *arrays):
            # It has done nothing; this says why.
            num_slots, width = token_ids.shape
            check_batch(num_slots, width, total_len, slots, num_sampled)


@njit
def load_request(state: StepArrays, slot: int, tokens: IntArray) -> Request:
    """The request in a slot, with all its tokens so far."""
    meta, index = state.slot_meta[slot], state.context_index[slot]
    base, length = int(meta[c.PREDICTION_BASE]), int(meta[c.PREDICTION_LEN])
    return Request(
        Prediction(
            state.prediction_tokens[base : base + length],
            state.positions[base:],
            state.offsets[base:],
            int(meta[c.PREDICTION_SHIFT]),
        ),
        Context(
            tokens,
            int(meta[c.OUTPUT_START]),
            index,
            shift_of(len(index), 32),
            bool(meta[c.CONTEXT_START] != c.VACANT),
        ),
        Alignment(state.align_state[slot], state.lcs_row[slot], state.edits[slot]),
        int(meta[c.RECIPE_PACKS]),
        int(meta[c.ADHERENCE_PRIOR]),
    )


@njit
def update_state(request: Request) -> None:
    """Bring what is known of a request up to date: the index of its context, and where it stands."""
    prediction, context, alignment, _, _ = request
    total, seen = len(context.tokens), int(alignment.state[c.SEEN])
    if seen < 0 or total < seen:
        start_over(alignment)
        context.ways[:] = -1
        seen = 0
    if context.is_used:
        insert_context(context, seen)
    realign(prediction, context, alignment, seen)
    alignment.state[c.SEEN] = total


@njit
def choose_draft(
    request: Request, tables: TableArrays, recipes: RecipeArrays, found: Candidates, settings: StepSettings
) -> Choice:
    """Write the candidates of a request, after `update_state`, and say what is drafted from."""
    prediction, context, alignment, packs, prior = request
    recipe = find_recipe(recipes, context.tokens, context.output_start, packs)
    cursor, top = standing(prediction, alignment)
    candidates(prediction, context, cursor, settings.min_match, settings.min_context_match, found)
    num_output = max(len(context.tokens) - context.output_start, 0) + prior
    classes(prediction, found, alignment, cursor, top, num_output)
    exact_prefix = is_exact_prefix(alignment, num_output)
    first_row = first_row_of(prior)
    lane, num, expected = choose(found, exact_prefix, tables, settings.length_quarters, first_row)
    return Choice(cursor, lane, num, expected, likelier(recipes, recipe, expected))


@njit
def write_draft(
    request: Request, recipes: RecipeArrays, choice: Choice, position: int, matched: int, draft: IntArray
) -> tuple[int, int]:
    """Write the chosen drafts, for the candidate those from `position` on; ``(length, edits replayed)``.

    matched: of the candidate. A draft from the context wraps around where the match spans all behind its
    position. A draft ends before a run of spaces that there is no token for.
    """
    prediction, context, alignment, _, _ = request
    if choice.recipe >= 0:
        return copy_recipe(recipes, choice.recipe, draft), 0
    indents = recipes.indents
    if choice.lane < c.FIRST_CONTEXT:
        shift = indentation_shift(prediction.tokens, position, matched, context, indents)
        length, replays = compose(prediction, context, alignment, position, choice.num, shift, indents, draft)
    else:
        shift = indentation_shift(context.tokens, position, matched, context, indents)
        period = len(context.tokens) - position
        length, replays = (choice.num if repeats(matched, period) else min(choice.num, period)), 0
        for k in range(length):
            draft[k] = shifted(context.tokens, position + k % period, shift, indents)
    for k in range(length):
        if draft[k] < 0:
            return k, replays
    return length, replays


@njit
def is_valid_batch(
    num_slots: int, width: int, total_len: IntArray, slots: IntArray, num_sampled: IntArray, taken: BoolArray
) -> bool:
    """Whether `check_batch` has nothing to say. taken: [num_slots], scratch.

    What is compiled would read on outside of the arrays.
    """
    for b in range(len(slots)):
        if not 0 <= slots[b] < num_slots or not 0 <= total_len[slots[b]] <= width:
            return False
        taken[slots[b]] = False
    for b in range(len(slots)):
        if num_sampled[b] > 0:
            if taken[slots[b]]:
                return False
            taken[slots[b]] = True
    return True


@Entry
def _step(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    out: DraftArrays,
    found: Candidates,
    taken: BoolArray,
    settings: StepSettings,
    token_ids: IntArray,
    total_len: IntArray,
    slots: IntArray,
    num_sampled: IntArray,
) -> bool:
    """Whether the batch `is_valid_batch`; if not, nothing is done."""
    (num_slots, width), K = token_ids.shape, out.token_ids.shape[1]
    if not is_valid_batch(num_slots, width, total_len, slots, num_sampled, taken):
        return False
    for b in range(len(slots)):
        slot, total, draft = slots[b], int(total_len[slots[b]]), out.token_ids[b]
        tokens = token_ids[slot, :total]
        length, class_id, recipe, source = 0, 0, -1, c.SOURCE_NONE
        if num_sampled[b] > 0 and state.slot_meta[slot, c.OUTPUT_START] != c.VACANT:
            request = load_request(state, slot, tokens)
            update_state(request)
            choice = choose_draft(request, tables, recipes, found, settings)
            lane, recipe, class_id = choice.lane, choice.recipe, found.class_id[choice.lane]
            length, _ = write_draft(
                request, recipes, choice, found.position[lane], found.matched[lane], draft
            )
            # A draft ends where the engine's row ends.
            length = max(min(length, width - total), 0)
            # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
            for k in range(length):
                if not 0 <= draft[k] < settings.vocab_size:
                    length = k
                    break
            if length > 0:
                source = c.SOURCE_PREDICTION if request.prior == 0 else c.SOURCE_MEMORY
                source = c.SOURCE_CONTEXT if lane >= c.FIRST_CONTEXT else source
                source = c.SOURCE_RECIPE if recipe >= 0 else source
        last = int(tokens[total - 1]) if total > 0 else 0
        draft[length:] = last if 0 <= last < settings.vocab_size else 0
        out.length[b] = length
        out.source[b] = source
        for k in range(K):
            if k >= length:
                out.confidence[b, k] = 0.0
            elif recipe >= 0:
                out.confidence[b, k] = recipes.confidence[recipe, k]
            else:
                out.confidence[b, k] = tables.confidence[class_id, k]
    return True

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
from ..state import DraftChoice, StepArrays, StepSettings, StepState
from .draft import (
    CandidateArrays,
    allocate_candidates,
    candidates,
    choose,
    classes,
    compose,
    indentation_shift,
    is_exact_prefix,
    shifted,
    wraps_around,
)
from .realign import AlignmentArrays, realign, starts_over
from .recipe_lookup import find_recipe
from .suffix_match import ContextArrays, PredictionArrays, clear_context, insert_context, shift_of

IntArray = npt.NDArray[np.signedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]


class RequestArrays(NamedTuple):
    """What a step knows of one request."""

    prediction: PredictionArrays
    context: ContextArrays
    alignment: AlignmentArrays
    #: Bit i: it uses recipe pack i.
    recipe_packs: int
    #: What the prediction is, see `constants`.
    text_kind: int


class StepReference:
    """The step of one `Drafter` on the CPU, called like `StepLaunch`. The loop is compiled here: no step
    compiles."""

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
            Draft._make(tensor.numpy() for tensor in out),
            allocate_candidates(),
            np.zeros(len(state.slot_meta), dtype=np.bool_),
            settings,
        )
        inputs = (np.zeros((1, 1), np.int32), *(np.zeros(1, kind) for kind in (np.int32, np.int64, np.int32)))
        self._run = step.prepare(*self._bound, *inputs)

    def __call__(
        self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        arrays = token_ids.numpy(), total_len.numpy(), slots.numpy(), num_sampled.numpy()
        if not self._run(*self._bound, *arrays):
            # It has done nothing; this says why.
            num_slots, width = token_ids.shape
            check_batch(num_slots, width, total_len, slots, num_sampled)


@njit
def load_request(state: StepArrays, slot: int, tokens: IntArray) -> RequestArrays:
    """The request in a slot, with all its tokens so far."""
    meta, index = state.slot_meta[slot], state.context_index[slot]
    base, length = int(meta[c.PREDICTION_BASE]), int(meta[c.PREDICTION_LEN])
    return RequestArrays(
        PredictionArrays(
            state.prediction_tokens[base : base + length],
            state.positions[base:],
            state.offsets[base:],
            int(meta[c.PREDICTION_SHIFT]),
        ),
        ContextArrays(
            tokens,
            int(meta[c.OUTPUT_START]),
            index,
            shift_of(len(index), 32),
            bool(meta[c.CONTEXT_START] != c.VACANT),
        ),
        AlignmentArrays(state.align_state[slot], state.lcs_row[slot], state.edits[slot]),
        int(meta[c.RECIPE_PACKS]),
        int(meta[c.TEXT_KIND]),
    )


@njit
def update_state(request: RequestArrays) -> tuple[int, int]:
    """Bring what is known of a request up to date: the index of its context, and where it stands.

    Returns ``(cursor, top)`` of `realign`.
    """
    context, seen = request.context, int(request.alignment.state[c.SEEN])
    if context.is_used:
        if starts_over(context, seen):
            clear_context(context)
            seen = 0
        insert_context(context, seen)
    return realign(request.prediction, context, request.alignment)


@njit
def first_row_of(text_kind: int) -> int:
    """Where the limits of a request begin in the tables."""
    return c.NUM_CLASSES if text_kind == c.TEXT_RELATED_MEMORY else 0


@njit
def choose_draft(
    request: RequestArrays,
    cursor: int,
    top: int,
    recipes: RecipeArrays,
    tables: TableArrays,
    settings: StepSettings,
    found: CandidateArrays,
) -> DraftChoice:
    """Write the candidates of a request, after `update_state`, and say what is drafted from."""
    prediction, context, alignment, packs, text_kind = request
    candidates(prediction, context, cursor, settings.min_match, settings.min_context_match, found)
    prior = 0 if text_kind == c.TEXT_PREDICTION else c.MEMORY_PRIOR
    num_output = max(len(context.tokens) - context.output_start, 0) + prior
    classes(prediction, found, alignment, cursor, top, num_output)
    exact_prefix = is_exact_prefix(alignment, num_output)
    first_row = first_row_of(text_kind)
    lane, num, expected = choose(found, exact_prefix, tables, settings.length_quarters, first_row)
    recipe = find_recipe(recipes, context.tokens, context.output_start, packs)
    num_recipe = 0
    if recipe >= 0 and recipes.expected_accepted[recipe] > expected:
        num_recipe = int(recipes.max_draft_len[recipe])
    else:
        recipe = -1
    return DraftChoice(
        lane, found.position[lane], found.matched[lane], found.class_id[lane], num, recipe, num_recipe
    )


@njit
def write_draft(
    request: RequestArrays, recipes: RecipeArrays, choice: DraftChoice, draft: IntArray
) -> tuple[int, int]:
    """Write the chosen drafts; ``(length, edits replayed)``. draft: [K].

    A draft from the context wraps around where the match spans all behind its position. A draft ends before a run
    of spaces that there is no token for.
    """
    prediction, context, alignment, _, _ = request
    position, matched, indents, replays = choice.position, choice.matched, recipes.indents, 0
    if choice.recipe >= 0:
        length = choice.num_recipe
        for k in range(length):
            draft[k] = recipes.token_ids[choice.recipe, k]
    elif choice.lane < c.FIRST_CONTEXT:
        shift = indentation_shift(prediction.tokens, position, matched, context, indents)
        length, replays = compose(prediction, context, alignment, position, choice.num, shift, indents, draft)
    else:
        shift = indentation_shift(context.tokens, position, matched, context, indents)
        period = len(context.tokens) - position
        length = choice.num if wraps_around(matched, period) else min(choice.num, period)
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
def step(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    out: Any,
    found: CandidateArrays,
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
            cursor, top = update_state(request)
            choice = choose_draft(request, cursor, top, recipes, tables, settings, found)
            recipe, class_id = choice.recipe, choice.class_id
            length, _ = write_draft(request, recipes, choice, draft)
            # A draft ends where the engine's row ends.
            length = max(min(length, width - total), 0)
            # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
            for k in range(length):
                if not 0 <= draft[k] < settings.vocab_size:
                    length = k
                    break
            if length > 0:
                source = c.SOURCE_PREDICTION if request.text_kind == c.TEXT_PREDICTION else c.SOURCE_MEMORY
                source = c.SOURCE_CONTEXT if choice.lane >= c.FIRST_CONTEXT else source
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

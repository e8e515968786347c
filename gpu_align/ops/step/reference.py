"""A whole step as a loop over the requests: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..align.reference import EditRows, load_state, realign
from ..backend import check_batch
from ..choose import NUM_CLASSES
from ..choose.reference import choose, classes
from ..choose.survival import SurvivalTables, TableArrays
from ..compose.reference import write_draft
from ..host import is_exact_prefix, limits_of, prior_of, source_of, starts_over
from ..index.reference import clear_context, insert_context, load_bucket, shift_of
from ..jit import Entry, njit
from ..layout import (
    CONTEXT_START,
    END_TOKENS,
    IS_HOT,
    OUTPUT_START,
    PREDICTION_BASE,
    PREDICTION_LEN,
    PREDICTION_SHIFT,
    RECIPE_PACKS,
    SOURCE_NONE,
    TEXT_KIND,
    VACANT,
    Alignment,
    Bucket,
    Choice,
    ContextIndex,
    Draft,
    PredictionIndex,
    Request,
    SourceText,
    StepArrays,
    StepSettings,
    StepState,
)
from ..match.reference import CandidateArrays, allocate_candidates, candidates
from ..recipes.reference import find_recipe
from ..recipes.table import RecipeArrays, RecipeTable

IntArray = npt.NDArray[np.signedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]


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
def load_request(state: StepArrays, slot: int, tokens: IntArray) -> Request:
    """The request in a slot, with all its tokens so far."""
    meta, ways = state.slot_meta[slot], state.context_index[slot]
    base, length = int(meta[PREDICTION_BASE]), int(meta[PREDICTION_LEN])
    index = PredictionIndex(state.positions[base:], state.offsets[base:], int(meta[PREDICTION_SHIFT]))
    context_index = ContextIndex(ways, ways.size, shift_of(len(ways), 32))
    return Request(
        SourceText(state.prediction_tokens[base : base + length], length, index, length > 0),
        SourceText(tokens, len(tokens), context_index, bool(meta[CONTEXT_START] != VACANT)),
        int(meta[OUTPUT_START]),
        meta,
        state.align_state[slot],
        state.lcs_row[slot : slot + 1],
        state.edits[slot],
    )


@njit
def update_state(request: Request, state: tuple[int, Alignment, EditRows]) -> tuple[Alignment, EditRows]:
    """Bring what is known of a request up to date: the index of its context, and where it stands.

    state: of `load_state`. Returns ``(alignment, edits)`` of `realign`.
    """
    context, seen = request.context, state[0]
    if context.is_used:
        if starts_over(context.length, seen):
            clear_context(context)
            seen = 0
        insert_context(context, seen)
    return realign(request, state)


@njit
def last_bucket(request: Request) -> Bucket:
    """The `Bucket` of the output's last token in the prediction."""
    context = request.context
    is_token = context.length > request.output_start
    return load_bucket(request.prediction, context.tokens[context.length - 1] if is_token else 0, is_token)


@njit
def choose_draft(
    request: Request,
    bucket: Bucket,
    alignment: Alignment,
    recipes: RecipeArrays,
    tables: TableArrays,
    settings: StepSettings,
    found: CandidateArrays,
) -> Choice:
    """Write the candidates of a request, after `update_state`, and say what is drafted from.

    bucket: of the output's last token.
    """
    context, text_kind = request.context, int(request.meta[TEXT_KIND])
    candidates(request, bucket, alignment, settings, found)
    num_output = max(context.length - request.output_start, 0) + prior_of(text_kind)
    classes(found, alignment, num_output)
    exact_prefix = is_exact_prefix(alignment, num_output)
    first = limits_of(text_kind)
    limits = SurvivalTables(tables.max_draft_len[first:], tables.expected_accepted[first:], tables.confidence)
    lane, num, expected = choose(found, exact_prefix, limits, settings.length_quarters)
    packs, num_recipe = int(request.meta[RECIPE_PACKS]), 0
    recipe = find_recipe(recipes, context.tokens, request.output_start, packs)
    if recipe >= 0 and recipes.expected_accepted[recipe] > expected:
        num, num_recipe = 0, int(recipes.max_draft_len[recipe])
    else:
        recipe = -1
    return Choice(
        lane, found.in_context[lane] > 0, found.position[lane], found.matched[lane], found.class_id[lane],
        num, recipe, num_recipe,
    )  # fmt: skip


@njit
def _is_valid_batch(
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


@njit
def _end_of(tokens: IntArray, length: int, meta: IntArray, vocab_size: int) -> int:
    """The length of a draft that ends with a token that ends its request, and before one outside of the
    vocabulary: emitting that would crash the engine's embedding."""
    for k in range(length):
        if not 0 <= tokens[k] < vocab_size:
            return k
        for end in meta[END_TOKENS:]:
            if tokens[k] == end:
                return k + 1
    return length


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
    """Whether the batch `_is_valid_batch`; if not, nothing is done."""
    (num_slots, width), K = token_ids.shape, out.token_ids.shape[1]
    if not _is_valid_batch(num_slots, width, total_len, slots, num_sampled, taken):
        return False
    for b in range(len(slots)):
        slot, total, draft = slots[b], int(total_len[slots[b]]), out.token_ids[b]
        tokens = token_ids[slot, :total]
        length, class_id, recipe, source = 0, 0, -1, SOURCE_NONE
        if num_sampled[b] > 0 and state.slot_meta[slot, OUTPUT_START] != VACANT:
            request = load_request(state, slot, tokens)
            alignment, edits = update_state(request, load_state(request))
            choice = choose_draft(request, last_bucket(request), alignment, recipes, tables, settings, found)
            recipe, class_id = choice.recipe, choice.class_id + int(request.meta[IS_HOT]) * NUM_CLASSES
            length, _ = write_draft(request, edits, recipes, choice, width, draft)
            length = _end_of(draft, length, request.meta, settings.vocab_size)
            source = source_of(int(request.meta[TEXT_KIND]), choice.in_context, recipe, length)
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

"""A whole step as a loop over the requests: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..align import Edits
from ..align.reference import realign
from ..backend import check_batch
from ..choose import Choice, SurvivalTables
from ..choose.reference import choose_candidate
from ..compose.reference import write_draft
from ..host import Entry, align, choose, layout, njit, to_int
from ..index.reference import insert_context, load_bucket
from ..layout import (
    Alignment,
    ContextIndex,
    IntArray,
    PredictionIndex,
    Request,
    SourceText,
    StepSettings,
    StepState,
    TextRules,
    as_arrays,
)
from ..match import Workspace
from ..match.reference import allocate_workspace, candidates
from ..recipes.reference import find_recipe
from ..recipes.table import RecipeTable

BoolArray = npt.NDArray[np.bool_]


class StepReference:
    """The step of one `Drafter` on the CPU, bound and called like `StepLaunch`. The loop is compiled here:
    no step compiles."""

    def __init__(self, *bound: Any) -> None:
        *tensors, settings, token_ids, total_len = bound
        taken, rows = np.zeros(len(token_ids), np.bool_), (token_ids.numpy(), total_len.numpy())
        self._bound = *map(as_arrays, tensors), settings, allocate_workspace(), taken, *rows
        self._run = step_reference.prepare(*self._bound, np.zeros(1, np.int64), np.zeros(1, np.int32))
        self._rows = token_ids, total_len

    def __call__(self, slots: torch.Tensor, num_sampled: torch.Tensor) -> None:
        if not self._run(*self._bound, slots.numpy(), num_sampled.numpy()):
            check_batch(*self._rows, slots, num_sampled)  # it has done nothing; this says why


@njit
def load_request(
    state: StepState, settings: StepSettings, slot: int, tokens: IntArray, total: int
) -> Request:
    """The request in a slot, of whose `tokens` the first `total` are there."""
    meta, tokens = state.slot_meta[slot], tokens[:total]
    base, length = int(meta[layout.PREDICTION_BASE]), int(meta[layout.PREDICTION_LEN])
    text, rules = state.prediction_tokens[base : base + length], to_int(meta[layout.TEXT_RULES])
    index = PredictionIndex(state.positions[base:], state.offsets[base:], int(meta[layout.PREDICTION_SHIFT]))
    context_index = ContextIndex(state.context_index[slot], settings.context_shift)
    num_context, own = total * int(meta[layout.USES_CONTEXT]), TextRules(layout.TEXT_CONTEXT, 0, 0)
    return Request(
        tokens,
        total,
        int(tokens[total - 1]) if total > 0 else 0,
        int(meta[layout.OUTPUT_START]),
        SourceText(text, length, index, layout.unpack_rules(rules)),
        SourceText(tokens, num_context, context_index, own),
        to_int(meta[layout.RECIPE_PACKS]),
        meta,
        state.align_state[slot],
        state.edits[slot],
    )


@njit
def load_state(request: Request) -> tuple[int, int, Alignment, Edits]:
    """``(seen, indexed, alignment, edits)`` of a slot as they were stored, column by column."""
    state, e = request.align_state, request.edits
    a = state[layout.IN_SYNC :]
    alignment = Alignment(
        to_int(a[0]), to_int(a[1]), to_int(a[2]), to_int(a[3]), to_int(a[4]), to_int(a[5]), to_int(a[6])
    )
    num_edits = to_int(state[layout.NUM_EDITS])
    edits = Edits(num_edits, e[:, 0], e[:, 1], e[:, 2], e[:, 3], e[:, 4], e[:, 5], 0)
    return to_int(state[layout.SEEN]), to_int(state[layout.INDEXED]), alignment, edits


@njit
def _store_state(request: Request, a: Alignment, edits: Edits) -> None:
    """Write back what `load_state` loads, but for the columns of the edits, which are written already."""
    state = request.align_state
    state[layout.SEEN], state[layout.NUM_EDITS] = request.total, edits.count
    for i in range(layout.ALIGN_STATE - layout.IN_SYNC):
        state[layout.IN_SYNC + i] = a[i]


@njit
def update_state(request: Request, state: tuple[int, int, Alignment, Edits]) -> tuple[Alignment, Edits]:
    """Bring what is known of a request up to date: the index of its context, and where it stands.

    state: of `load_state`. Of a request that is new, or of which tokens were taken back, all starts over. Returns
    ``(alignment, edits)`` of `realign`.
    """
    seen, indexed, a, edits = state
    insert_context(request.context, indexed)
    request.align_state[layout.INDEXED] = request.context.length
    is_fresh = seen <= 0 or request.total < seen
    a = align.start_over(a, is_fresh)
    if is_fresh:
        seen, edits = 0, align.with_keys(edits, 0, edits.at, edits.is_changed)
        edits.at[:] = align.NO_EDIT
    a, edits = realign(request, seen, a, edits)
    _store_state(request, a, edits)
    return a, edits


@njit
def choose_draft(
    request: Request,
    bucket: tuple[int, int],
    recipe: Choice,
    alignment: Alignment,
    tables: SurvivalTables,
    settings: StepSettings,
    space: Workspace,
) -> Choice:
    """Choose what is drafted for a request, after `update_state`.

    bucket: of the last token. recipe: of `find_recipe`. space: written.
    """
    found = candidates(request, bucket, alignment, settings, space)
    chosen = choose_candidate(request, found, alignment, tables, settings.length_quarters, space)
    choice: Choice = choose.better(chosen, recipe)
    return choice


@njit
def _is_valid_batch(
    num_slots: int, width: int, total_len: IntArray, slots: IntArray, num_sampled: IntArray, taken: BoolArray
) -> bool:
    """Whether `check_batch` has nothing to say. taken: [num_slots], scratch.

    What is compiled would read on outside of the arrays.
    """
    taken[:] = False
    for b in range(len(slots)):
        slot, is_run = slots[b], num_sampled[b] > 0
        if not 0 <= slot < num_slots or not 0 <= total_len[slot] <= width or (is_run and taken[slot]):
            return False
        taken[slot] |= is_run
    return True


@njit
def _end_of(tokens: IntArray, length: int, meta: IntArray, vocab_size: int) -> int:
    """The length of a draft that ends with a token that ends its request, and before one outside of the
    vocabulary: emitting that would crash the engine's embedding."""
    for k in range(length):
        if not 0 <= tokens[k] < vocab_size:
            return k
        for end in meta[layout.END_TOKENS :]:
            if tokens[k] == end:
                return k + 1
    return length


@Entry
def step_reference(
    state: StepState,
    tables: SurvivalTables,
    recipe_table: RecipeTable,
    out: Any,
    settings: StepSettings,
    space: Workspace,
    taken: BoolArray,
    token_ids: IntArray,
    total_len: IntArray,
    slots: IntArray,
    num_sampled: IntArray,
) -> bool:
    """Whether the batch `_is_valid_batch`; if not, nothing is done."""
    num_slots, width = token_ids.shape
    if not _is_valid_batch(num_slots, width, total_len, slots, num_sampled, taken):
        return False
    for b in range(len(slots)):
        slot, total, draft = slots[b], int(total_len[slots[b]]), out.token_ids[b]
        request = load_request(state, settings, slot, token_ids[slot], total)
        length, source = 0, 0
        out.confidence[b] = 0
        if num_sampled[b] > 0 and request.output_start != layout.NOWHERE:
            alignment, edits = update_state(request, load_state(request))
            bucket, recipe = load_bucket(request.prediction, request.last), find_recipe(recipe_table, request)
            choice = choose_draft(request, bucket, recipe, alignment, tables, settings, space)
            length, _ = write_draft(request, edits, recipe_table, choice, width, draft)
            length = _end_of(draft, length, request.meta, settings.vocab_size)
            source = choice.source if length > 0 else 0
            confidence = recipe_table.confidence if choice.source == layout.TEXT_RECIPE else tables.confidence
            for k in range(length):
                out.confidence[b, k] = confidence[choice.table_row, k]
        draft[length:] = request.last if 0 <= request.last < settings.vocab_size else 0
        out.length[b], out.source[b] = length, source
    return True

"""Triton kernel of a step: one program aligns one request with its prediction and drafts for it."""

import triton
import triton.language as tl

from ..align import Edits
from ..align.kernel import realign
from ..choose.kernel import choose_candidate
from ..compose.kernel import write_draft
from ..device import align, choose, layout, recipes
from ..index.kernel import insert_context, load_bucket, load_each
from ..layout import Alignment, ContextIndex, PredictionIndex, Request, SourceText, StepSettings, TextRules
from ..match.kernel import candidates
from ..recipes.kernel import find_recipe
from ..recipes.table import RecipeTable


@triton.jit
def load_request(state, settings, slot, p_tokens, total):
    p_meta = state.slot_meta + slot * layout.SLOT_META
    base, length, shift, output_start, uses_context, packs, rules = load_each(p_meta, layout.IS_HOT)
    index = PredictionIndex(state.positions + base, state.offsets + base, shift)
    p_ways = state.context_index + slot * layout.num_ways(settings.context_shift)
    context_index = ContextIndex(p_ways, settings.context_shift)
    return Request(
        p_tokens,
        total,
        tl.load(p_tokens + total - 1, mask=total > 0, other=0),
        output_start,
        SourceText(state.prediction_tokens + base, length, index, layout.unpack_rules(rules)),
        SourceText(p_tokens, total * uses_context, context_index, TextRules(layout.TEXT_CONTEXT, 0, 0)),
        packs,
        p_meta,
        state.align_state + slot * layout.ALIGN_STATE,
        state.edits + slot * (layout.MAX_EDITS * layout.EDIT),
    )


@triton.jit
def load_state(request):
    p_align = request.align_state
    p_edits = request.edits + tl.arange(0, layout.MAX_EDITS) * layout.EDIT
    alignment = Alignment(*load_each(p_align + layout.IN_SYNC, layout.ALIGN_STATE - layout.IN_SYNC))
    edits = Edits(tl.load(p_align + layout.NUM_EDITS), *load_each(p_edits, layout.EDIT), 0)
    seen, indexed = load_each(p_align, 2)
    return seen, indexed, alignment, edits


@triton.jit
def _store_registers(request, a, edits, is_fresh):
    """Write back what `load_state` loads; the edits where there is something new in them."""
    p_align = request.align_state
    tl.store(p_align + layout.SEEN, request.total)
    tl.store(p_align + layout.NUM_EDITS, edits.count)
    for i in tl.static_range(layout.ALIGN_STATE - layout.IN_SYNC):
        tl.store(p_align + layout.IN_SYNC + i, a[i])
    # Carrying `is_fresh` in `is_changed` took 96 → 102 registers in a step with recipes for sm_90.
    if is_fresh | (edits.is_changed > 0):
        p_edits = request.edits + tl.arange(0, layout.MAX_EDITS) * layout.EDIT
        for i in tl.static_range(layout.EDIT):
            tl.store(p_edits + i, edits[i + 1])


@triton.jit
def update_state(request, state):
    seen, indexed, a, edits = state
    insert_context(request.context, indexed)
    tl.store(request.align_state + layout.INDEXED, request.context.length)
    is_fresh = (seen <= 0) | (request.total < seen)
    a = align.start_over(a, is_fresh)
    b_at = tl.where(is_fresh, align.NO_EDIT, edits.at)
    edits = align.with_keys(edits, tl.where(is_fresh, 0, edits.count), b_at, edits.is_changed)
    a, edits = realign(request, tl.where(is_fresh, 0, seen), a, edits)
    tl.debug_barrier()  # all threads have read what is written now
    _store_registers(request, a, edits, is_fresh)
    tl.debug_barrier()  # the index is read below, by other threads
    return a, edits


@triton.jit
def choose_draft(request, bucket, recipe, alignment, tables, settings, K: tl.constexpr):
    found = candidates(request, bucket, alignment, settings)
    chosen = choose_candidate(request, found, alignment, tables, settings.length_quarters, K)
    return choose.better(chosen, recipe)


@triton.jit
def _end_of(b_tokens, length, p_meta, vocab_size, o_k, BLOCK_K: tl.constexpr):
    b_end = tl.full([BLOCK_K], BLOCK_K, tl.int32)
    for i in tl.static_range(layout.MAX_END_TOKENS):
        b_end = tl.where(b_tokens == tl.load(p_meta + layout.END_TOKENS + i), o_k + 1, b_end)
    b_end = tl.where((b_tokens < 0) | (b_tokens >= vocab_size), o_k, b_end)
    return tl.minimum(length, tl.min(b_end, axis=0))


@triton.jit
def _read_confidence(tables, recipe_table, choice, o_k, K: tl.constexpr):
    """[BLOCK_K] float32: of all drafts of a choice. How many are left of them is not waited for."""
    p_recipe = recipe_table.confidence + choice.table_row * recipes.MAX_TOKENS
    p_row = tl.where(choice.source == layout.TEXT_RECIPE, p_recipe, tables.confidence + choice.table_row * K)
    return tl.load(p_row + o_k, mask=o_k < choice.num, other=0.0)


# What an engine brings to a call, and numbers: one kernel, whatever they are. Triton specializes all that is in a
# tuple, so only tensors of the drafter itself are in one.
@triton.jit(
    do_not_specialize=[
        "recipe_shift", "num_shapes", "num_indents", "length_quarters", "min_match", "vocab_size",
        "context_shift", "token_ids_ptr", "stride_token_ids_s", "max_context_len", "total_len_ptr", "slots_ptr",
        "num_sampled_ptr",
    ]
)  # fmt: skip
def step_kernel(
    state,  # `StepState`
    tables,  # `SurvivalTables`
    recipe_tensors,  # of a `RecipeTable`, in its order
    out,  # `Draft`
    recipe_shift,
    num_shapes,
    num_indents,
    length_quarters,  # the fields of `StepSettings`
    min_match,
    vocab_size,
    context_shift,
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    max_context_len,  # T
    total_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    num_sampled_ptr,  # [B] int32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SHAPES: tl.constexpr,
):
    """Grid (B,). `reference.step_reference` has the loop over the requests that this computes."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    settings = StepSettings(length_quarters, min_match, vocab_size, context_shift)
    recipe_table = RecipeTable(*recipe_tensors, recipe_shift, num_shapes, num_indents)  # type: ignore[call-arg]
    # On a GPU `total_len` is not validated: no row is read beyond its end.
    total = tl.minimum(tl.maximum(tl.load(total_len_ptr + i_slot), 0), max_context_len)
    p_tokens = token_ids_ptr + i_slot * stride_token_ids_s
    # All that a slot holds is loaded at once, whether or not it is used: what follows waits for memory once.
    request = load_request(state, settings, i_slot, p_tokens, total)
    stored = load_state(request)
    o_k = tl.arange(0, BLOCK_K)
    b_tokens = tl.zeros([BLOCK_K], tl.int32)
    b_confidence = tl.zeros([BLOCK_K], tl.float32)
    length = 0
    source = tl.full([], 0, tl.int32)
    if (tl.load(num_sampled_ptr + i_b) > 0) & (request.output_start != layout.NOWHERE):
        bucket = load_bucket(request.prediction, request.last)
        recipe = find_recipe(recipe_table, request, HAS_SHAPES)
        alignment, edits = update_state(request, stored)
        choice = choose_draft(request, bucket, recipe, alignment, tables, settings, K)
        b_confidence = _read_confidence(tables, recipe_table, choice, o_k, K)
        b_tokens, length = write_draft(request, edits, recipe_table, choice, max_context_len, o_k, BLOCK_K)
        length = _end_of(b_tokens, length, request.meta, settings.vocab_size, o_k, BLOCK_K)
        source = tl.where(length > 0, choice.source, 0)
    last = tl.where((request.last >= 0) & (request.last < settings.vocab_size), request.last, 0)
    m_k = o_k < K
    o_out = i_b.to(tl.int64) * K + o_k
    tl.store(out.token_ids + o_out, tl.where(o_k < length, b_tokens, last).to(tl.int64), mask=m_k)
    tl.store(out.confidence + o_out, tl.where(o_k < length, b_confidence, 0.0), mask=m_k)
    tl.store(out.length + i_b, length)
    tl.store(out.source + i_b, source.to(tl.int8))

"""Triton kernel of a step: one program aligns one request with its prediction and drafts for it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..state import DraftChoice, StepSettings
from .constexprs import *
from .draft import (
    TablePointers,
    at_lane,
    candidates,
    choose,
    classes,
    compose,
    indentation_shift,
    is_exact_prefix,
    shifted,
    wraps_around,
)
from .realign import load_state, realign, starts_over
from .recipe_lookup import RecipePointers, begin_lookup, find_recipe, find_shape
from .suffix_match import (
    ContextPointers,
    PredictionPointers,
    clear_context,
    insert_blocks,
    insert_rest,
    load_bucket,
)


class RequestPointers(NamedTuple):
    """What a step knows of one request."""

    prediction: Any
    context: Any
    p_meta: Any  # [SLOT_META] int32
    p_align: Any  # [ALIGN_STATE] int32
    p_row: Any  # [WINDOW] int16
    p_edits: Any  # [MAX_EDITS, EDIT] int32


@triton.jit
def begin_context(context, seen):
    """Insert most of the tokens that are new; returns the position from which on `insert_rest` has to."""
    is_fresh = starts_over(context, seen)
    if is_fresh:
        clear_context(context)
        tl.debug_barrier()  # other threads insert in what these have cleared
    return insert_blocks(context, tl.where(is_fresh, 0, seen))


@triton.jit
def update_state(request, state):
    """state: of `load_state`. Returns ``(alignment, edits, top)`` of `realign`."""
    prediction, context = request.prediction, request.context
    inserted = context.total
    if context.is_used:
        inserted = begin_context(context, state[0])
    alignment, edits, top = realign(
        prediction, context, state, request.p_align, request.p_row, request.p_edits
    )
    insert_rest(context, inserted)
    tl.debug_barrier()  # the row and the index are read below, by other threads
    return alignment, edits, top


@triton.jit
def first_row_of(text_kind):
    return tl.where(text_kind == TEXT_RELATED_MEMORY, NUM_CLASSES, 0)


@triton.jit
def choose_draft(
    request, bucket, alignment, top, recipes, tables, settings, K: tl.constexpr, HAS_SHAPES: tl.constexpr
):
    """bucket: of the output's last token. Returns ``(choice, text_kind)``."""
    prediction, context = request.prediction, request.context
    num_common = tl.where(alignment.in_sync > 0, alignment.num_common, 0)
    found = candidates(
        prediction,
        context,
        bucket,
        alignment.cursor,
        num_common,
        settings.min_match,
        settings.min_context_match,
    )
    # A recipe is looked up in three parts: what is between them hides that memory is slow.
    lookup = begin_lookup(recipes, context, HAS_SHAPES)
    # Not loaded before: it would take a register all the while.
    text_kind = tl.load(request.p_meta + TEXT_KIND)
    prior = tl.where(text_kind == TEXT_PREDICTION, 0, MEMORY_PRIOR)
    num_output = tl.maximum(context.total - context.output_start, 0) + prior
    b_class = classes(prediction, found, alignment, request.p_row, top, num_output)
    packs = tl.load(request.p_meta + RECIPE_PACKS)
    shape_way = -1
    shape_pack = ALL_PACKS
    if HAS_SHAPES:
        shape_way, shape_pack = find_shape(recipes, context, lookup, packs)
    exact_prefix = is_exact_prefix(alignment, num_output)
    first_row = first_row_of(text_kind)
    limits = TablePointers(
        tables.p_max_draft_len + first_row, tables.p_expected + first_row * (K + 1), tables.p_confidence
    )
    lane, num, expected = choose(found, b_class, exact_prefix, limits, settings.length_quarters, K)
    position = at_lane(found.b_position, lane)
    recipe, num_recipe, expected_recipe = find_recipe(recipes, context, lookup, packs, shape_way, shape_pack)
    recipe = tl.where(expected_recipe > expected, recipe, -1)
    num = tl.where(recipe >= 0, 0, num)
    matched = at_lane(found.b_matched, lane)
    class_id = at_lane(b_class, lane)
    return DraftChoice(lane, position, matched, class_id, num, recipe, num_recipe), text_kind


@triton.jit
def remainder(o_k, period, BLOCK_K: tl.constexpr):
    """``o_k % period`` for ``o_k < BLOCK_K <= 256`` and ``period >= 1``: a division takes longer."""
    period = tl.minimum(period, BLOCK_K)
    for i in tl.static_range(9):
        multiple = period << (8 - i)
        o_k = tl.where(o_k >= multiple, o_k - multiple, o_k)
    return o_k


@triton.jit
def read_tokens(
    prediction, context, recipes, recipe, o_source, m_edit, in_context, indent_shift, length, o_k
):
    """The first `length` drafts, [BLOCK_K] int32: the recipe's if there is one, else the tokens at `o_source`,
    those of no edit with their indentation shifted; -1 ends them."""
    m_context = in_context | m_edit
    p_source = tl.where(m_context, context.p_tokens + o_source, prediction.p_tokens + o_source)
    m_copied = o_k < tl.where(recipe < 0, length, 0)
    b_tokens = tl.load(p_source, mask=m_copied, other=0)
    if (indent_shift != 0) & (recipe < 0):
        b_tokens = shifted(recipes, p_source, o_source, b_tokens, indent_shift, m_copied & ~m_edit)
    p_recipe = recipes.p_tokens + recipe * MAX_TOKENS + o_k
    return b_tokens + tl.load(p_recipe, mask=o_k < tl.where(recipe < 0, 0, length), other=0)


@triton.jit
def write_draft(request, edits, recipes, choice, max_context_len, o_k, BLOCK_K: tl.constexpr):
    """``(tokens [BLOCK_K] int32, length)``."""
    prediction, context = request.prediction, request.context
    position, in_context = choice.position, choice.lane >= FIRST_CONTEXT
    indent_shift = indentation_shift(prediction, context, recipes, position, choice.matched, in_context)
    num_prediction = tl.where(in_context, 0, choice.num)
    o_source, b_context, length = compose(
        prediction, context.output_start, edits, position, num_prediction, BLOCK_K
    )
    period = context.total - position
    in_period = tl.where(wraps_around(choice.matched, period), choice.num, tl.minimum(choice.num, period))
    length = tl.where(in_context, in_period, length)
    if in_context & (length > period):
        o_source = position + remainder(o_k, period, BLOCK_K)
    length += tl.where(choice.recipe >= 0, choice.num_recipe, 0)
    # A draft ends where the engine's row ends.
    length = tl.maximum(tl.minimum(length, max_context_len - context.total), 0)
    b_tokens = read_tokens(
        prediction, context, recipes, choice.recipe, o_source, b_context > 0, in_context, indent_shift,
        length, o_k,
    )  # fmt: skip
    return b_tokens, length


@triton.jit
def read_confidence(tables, class_id, recipes, recipe, length, o_k, K: tl.constexpr):
    """Their confidences, [BLOCK_K] float32."""
    p_class = tables.p_confidence + class_id * K + o_k
    b_confidence = tl.load(p_class, mask=o_k < tl.where(recipe < 0, length, 0), other=0.0)
    p_recipe = recipes.p_confidence + recipe * MAX_TOKENS + o_k
    return b_confidence + tl.load(p_recipe, mask=o_k < tl.where(recipe < 0, 0, length), other=0.0)


# What an engine brings to a call, and settings: the kernel is the same one whatever they are.
@triton.jit(
    do_not_specialize=[
        "token_ids_ptr", "stride_token_ids_s", "total_len_ptr", "slots_ptr", "num_sampled_ptr",
        "context_shift", "recipe_shift", "num_shapes", "num_indents", "length_quarters", "min_match",
        "min_context_match", "max_context_len", "vocab_size",
    ]
)  # fmt: skip
def step_kernel(
    # The drafter's state; `gpu_align.ops.constants` has the columns.
    prediction_tokens_ptr,  # [A] int32
    positions_ptr,  # [A] int32
    offsets_ptr,  # [A] int32
    slot_meta_ptr,  # [S, SLOT_META] int32
    align_state_ptr,  # [S, ALIGN_STATE] int32
    lcs_row_ptr,  # [S, WINDOW] int16
    edits_ptr,  # [S, MAX_EDITS, EDIT] int32
    context_index_ptr,  # [S, buckets, WAYS] int32
    stride_context_index_s,
    context_shift,  # of its buckets
    # The engine's tensors.
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    total_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    num_sampled_ptr,  # [B] int32
    # Survival tables.
    max_draft_len_ptr,  # [2 * NUM_CLASSES] int32
    expected_ptr,  # [2 * NUM_CLASSES, K + 1] int32
    confidence_ptr,  # [NUM_CLASSES, K] float32
    # Recipes.
    recipe_keys_ptr,  # [buckets, RECIPE_WAYS] int64
    recipe_ways_ptr,  # [buckets, RECIPE_WAYS, RECIPE_COLUMNS] int32
    recipe_tokens_ptr,  # [R, MAX_TOKENS] int32
    recipe_confidence_ptr,  # [R, MAX_TOKENS] float32
    shape_of_ptr,  # [num_shapes] int32
    indents_ptr,  # [NUM_RUNS + num_indents] int32
    recipe_shift,
    num_shapes,
    num_indents,
    # The drafts.
    draft_ptr,  # [B, K] int64
    draft_length_ptr,  # [B] int32
    draft_confidence_ptr,  # [B, K] float32
    draft_source_ptr,  # [B] int8
    # Settings.
    length_quarters,
    min_match,
    min_context_match,
    vocab_size,
    max_context_len,  # T
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SHAPES: tl.constexpr,
):
    """Grid (B,). `reference.step` has the loop over the requests that this computes."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    # On a GPU nobody looks at what an engine wrote there: no row is read beyond its end.
    total = tl.minimum(tl.maximum(tl.load(total_len_ptr + i_slot), 0), max_context_len)
    p_tokens = token_ids_ptr + i_slot * stride_token_ids_s
    p_meta = slot_meta_ptr + i_slot * SLOT_META
    output_start = tl.load(p_meta + OUTPUT_START)
    # All that a slot holds is loaded at once, whether or not it is used: what follows waits for memory once.
    base = tl.load(p_meta + PREDICTION_BASE)
    prediction_len = tl.load(p_meta + PREDICTION_LEN)
    hash_shift = tl.load(p_meta + PREDICTION_SHIFT)
    uses_context = tl.load(p_meta + CONTEXT_START) != VACANT
    p_align = align_state_ptr + i_slot * ALIGN_STATE
    p_edits = edits_ptr + i_slot * (MAX_EDITS * EDIT)
    p_row = lcs_row_ptr + i_slot * WINDOW
    state = load_state(p_align, p_row, p_edits)
    last = tl.load(p_tokens + total - 1, mask=total > 0, other=0)
    settings = StepSettings(length_quarters, min_match, min_context_match, vocab_size)
    tables = TablePointers(max_draft_len_ptr, expected_ptr, confidence_ptr)
    recipes = RecipePointers(
        recipe_keys_ptr, recipe_ways_ptr, recipe_tokens_ptr,
        recipe_confidence_ptr, shape_of_ptr, indents_ptr, recipe_shift, num_shapes, num_indents,
    )  # fmt: skip
    o_k = tl.arange(0, BLOCK_K)
    b_tokens = tl.zeros([BLOCK_K], tl.int32)
    length = 0
    class_id = 0
    source = tl.full([], SOURCE_NONE, tl.int32)
    recipe = tl.full([], -1, tl.int32)
    if (tl.load(num_sampled_ptr + i_b) > 0) & (output_start != VACANT):
        prediction = PredictionPointers(
            prediction_tokens_ptr + base, prediction_len, positions_ptr + base, offsets_ptr + base, hash_shift
        )
        context = ContextPointers(
            p_tokens, total, output_start, context_index_ptr + i_slot * stride_context_index_s,
            stride_context_index_s, context_shift, uses_context,
        )  # fmt: skip
        request = RequestPointers(prediction, context, p_meta, p_align, p_row, p_edits)
        alignment, edits, top = update_state(request, state)
        bucket = load_bucket(prediction, last, total > output_start)
        choice, text_kind = choose_draft(
            request, bucket, alignment, top, recipes, tables, settings, K, HAS_SHAPES
        )
        recipe, class_id = choice.recipe, choice.class_id
        b_tokens, length = write_draft(request, edits, recipes, choice, max_context_len, o_k, BLOCK_K)
        # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
        m_bad = (o_k < length) & ((b_tokens < 0) | (b_tokens >= settings.vocab_size))
        length = tl.minimum(length, tl.min(tl.where(m_bad, o_k, BLOCK_K), axis=0))
        source = tl.where(text_kind == TEXT_PREDICTION, SOURCE_PREDICTION, SOURCE_MEMORY)
        source = tl.where(choice.lane >= FIRST_CONTEXT, SOURCE_CONTEXT, source)
        source = tl.where(recipe >= 0, SOURCE_RECIPE, source)
        source = tl.where(length > 0, source, SOURCE_NONE)

    m_draft = o_k < length
    last = tl.where((last >= 0) & (last < settings.vocab_size), last, 0)
    b_confidence = read_confidence(tables, class_id, recipes, recipe, length, o_k, K)
    m_k = o_k < K
    o_out = i_b.to(tl.int64) * K + o_k
    tl.store(draft_ptr + o_out, tl.where(m_draft, b_tokens, last).to(tl.int64), mask=m_k)
    tl.store(draft_confidence_ptr + o_out, tl.where(m_draft, b_confidence, 0.0), mask=m_k)
    tl.store(draft_length_ptr + i_b, length)
    tl.store(draft_source_ptr + i_b, source.to(tl.int8))

"""Triton kernel of a step: one program aligns one request with its prediction and drafts for it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..align.kernel import load_state, realign
from ..choose.kernel import choose, classes
from ..compose.kernel import write_draft
from ..device import (
    ALIGN_STATE,
    ALL_PACKS,
    CONTEXT_START,
    EDIT,
    END_TOKENS,
    FIRST_CONTEXT,
    IS_HOT,
    MAX_EDITS,
    MAX_END_TOKENS,
    MAX_TOKENS,
    NUM_CLASSES,
    OUTPUT_START,
    PREDICTION_BASE,
    PREDICTION_LEN,
    PREDICTION_SHIFT,
    RECIPE_PACKS,
    SLOT_META,
    SOURCE_NONE,
    TEXT_KIND,
    VACANT,
    is_exact_prefix,
    limits_of,
    prior_of,
    source_of,
    starts_over,
)
from ..index.kernel import clear_context, insert_blocks, insert_rest, load_bucket
from ..layout import Choice, ContextIndex, PredictionIndex, Request, SourceText, StepSettings
from ..match.kernel import at_lane, candidates
from ..recipes.kernel import begin_lookup, end_lookup, find_shape


class TablePointers(NamedTuple):
    """The survival tables for K."""

    max_draft_len: Any  # [2 * NUM_CLASSES] int32
    expected_accepted: Any  # [2 * NUM_CLASSES, K + 1] int32
    confidence: Any  # [2 * NUM_CLASSES, K] float32


class RecipePointers(NamedTuple):
    """The table of R recipes."""

    keys: Any  # [buckets, RECIPE_WAYS] int64: a key, and in the lower half a bit for each pack
    ways: Any  # [buckets, RECIPE_WAYS, RECIPE_COLUMNS] int32: recipe, drafts, expected drafts
    token_ids: Any  # [R, MAX_TOKENS] int32
    confidence: Any  # [R, MAX_TOKENS] float32
    shape_of: Any  # [num_shapes] int32: the item of a shape that each token is, the last for all beyond
    indents: (
        Any  # [NUM_RUNS + num_indents] int32: runs, what each token does to a line, the last for all beyond
    )
    shift: Any  # a key's upper bits are its bucket
    num_shapes: Any
    num_indents: Any


@triton.jit
def _begin_context(context, seen):
    """Insert most of the tokens that are new; returns the position from which on `insert_rest` has to."""
    is_fresh = starts_over(context.length, seen)
    if is_fresh:
        clear_context(context)
        tl.debug_barrier()  # other threads insert in what these have cleared
    return insert_blocks(context, tl.where(is_fresh, 0, seen))


@triton.jit
def update_state(request, state):
    """state: of `load_state`. Returns ``(alignment, edits)`` of `realign`."""
    context = request.context
    inserted = context.length
    if context.is_used:
        inserted = _begin_context(context, state[0])
    alignment, edits = realign(request, state)
    insert_rest(context, inserted)
    tl.debug_barrier()  # the index is read below, by other threads
    return alignment, edits


@triton.jit
def choose_draft(
    request, bucket, alignment, recipes, tables, settings, K: tl.constexpr, HAS_SHAPES: tl.constexpr
):
    """bucket: of the output's last token. Returns ``(choice, text_kind)``."""
    found = candidates(request, bucket, alignment, settings)
    # A recipe is looked up in three parts: what is between them hides that memory is slow.
    lookup = begin_lookup(recipes, request, HAS_SHAPES)
    # Not loaded before: it would take a register all the while.
    text_kind = tl.load(request.meta + TEXT_KIND)
    prior = prior_of(text_kind)
    num_output = tl.maximum(request.context.length - request.output_start, 0) + prior
    b_class = classes(found, alignment, num_output)
    packs = tl.load(request.meta + RECIPE_PACKS)
    shape_way = -1
    shape_pack = ALL_PACKS
    if HAS_SHAPES:
        shape_way, shape_pack = find_shape(recipes, request, lookup, packs)
    exact_prefix = is_exact_prefix(alignment, num_output)
    first_row = limits_of(text_kind)
    limits = TablePointers(
        tables.max_draft_len + first_row, tables.expected_accepted + first_row * (K + 1), tables.confidence
    )
    lane, num, expected = choose(found, b_class, exact_prefix, limits, settings.length_quarters, K)
    position = at_lane(found.position, lane)
    recipe, num_recipe, expected_recipe = end_lookup(recipes, request, lookup, packs, shape_way, shape_pack)
    recipe = tl.where(expected_recipe > expected, recipe, -1)
    num = tl.where(recipe >= 0, 0, num)
    matched = at_lane(found.matched, lane)
    class_id = at_lane(b_class, lane)
    in_context = lane >= FIRST_CONTEXT
    return Choice(lane, in_context, position, matched, class_id, num, recipe, num_recipe), text_kind


@triton.jit
def _end_of(b_tokens, length, p_meta, vocab_size, o_k, BLOCK_K: tl.constexpr):
    """The length of a draft that ends with a token that ends its request, and before one outside of the
    vocabulary: emitting that would crash the engine's embedding."""
    m_end = b_tokens == tl.load(p_meta + END_TOKENS)
    for i in tl.static_range(1, MAX_END_TOKENS):
        m_end |= b_tokens == tl.load(p_meta + END_TOKENS + i)
    b_end = tl.where(m_end, o_k + 1, BLOCK_K)
    b_end = tl.where((b_tokens < 0) | (b_tokens >= vocab_size), o_k, b_end)
    return tl.minimum(length, tl.min(b_end, axis=0))


@triton.jit
def _read_confidence(tables, class_id, recipes, recipe, length, o_k, K: tl.constexpr):
    """Their confidences, [BLOCK_K] float32."""
    p_class = tables.confidence + class_id * K + o_k
    b_confidence = tl.load(p_class, mask=o_k < tl.where(recipe < 0, length, 0), other=0.0)
    p_recipe = recipes.confidence + recipe * MAX_TOKENS + o_k
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
    # The drafter's state; `gpu_align.ops.layout` has the columns.
    prediction_tokens_ptr,  # [A] int32
    positions_ptr,  # [A] int32
    offsets_ptr,  # [A] int32
    slot_meta_ptr,  # [S, SLOT_META] int32
    align_state_ptr,  # [S, ALIGN_STATE] int32
    lcs_row_ptr,  # [S] int64
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
    expected_accepted_ptr,  # [2 * NUM_CLASSES, K + 1] int32
    confidence_ptr,  # [2 * NUM_CLASSES, K] float32
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
    # `total_len` is not validated on the GPU: clamp it, so that no row is read beyond its end.
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
    p_row = lcs_row_ptr + i_slot
    state = load_state(p_align, p_row, p_edits)
    last = tl.load(p_tokens + total - 1, mask=total > 0, other=0)
    settings = StepSettings(length_quarters, min_match, min_context_match, vocab_size)
    tables = TablePointers(max_draft_len_ptr, expected_accepted_ptr, confidence_ptr)
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
        p_prediction = prediction_tokens_ptr + base
        prediction_index = PredictionIndex(positions_ptr + base, offsets_ptr + base, hash_shift)
        context_index = ContextIndex(
            context_index_ptr + i_slot * stride_context_index_s, stride_context_index_s, context_shift
        )
        request = Request(
            SourceText(p_prediction, prediction_len, prediction_index, prediction_len > 0),
            SourceText(p_tokens, total, context_index, uses_context),
            output_start, p_meta, p_align, p_row, p_edits,
        )  # fmt: skip
        alignment, edits = update_state(request, state)
        bucket = load_bucket(request.prediction, last, total > output_start)
        choice, text_kind = choose_draft(request, bucket, alignment, recipes, tables, settings, K, HAS_SHAPES)
        recipe, class_id = choice.recipe, choice.class_id + tl.load(p_meta + IS_HOT) * NUM_CLASSES
        b_tokens, length = write_draft(request, edits, recipes, choice, max_context_len, o_k, BLOCK_K)
        length = _end_of(b_tokens, length, p_meta, settings.vocab_size, o_k, BLOCK_K)
        source = source_of(text_kind, choice.in_context, recipe, length)

    m_draft = o_k < length
    last = tl.where((last >= 0) & (last < settings.vocab_size), last, 0)
    b_confidence = _read_confidence(tables, class_id, recipes, recipe, length, o_k, K)
    m_k = o_k < K
    o_out = i_b.to(tl.int64) * K + o_k
    tl.store(draft_ptr + o_out, tl.where(m_draft, b_tokens, last).to(tl.int64), mask=m_k)
    tl.store(draft_confidence_ptr + o_out, tl.where(m_draft, b_confidence, 0.0), mask=m_k)
    tl.store(draft_length_ptr + i_b, length)
    tl.store(draft_source_ptr + i_b, source.to(tl.int8))

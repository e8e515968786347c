"""Triton kernel of a step: one program realigns one request with its prediction and drafts from it."""

import triton
import triton.language as tl

from .. import layout
from ..draft.kernels import (
    _LANES,
    _MAX_MATCH,
    _OWN,
    _at,
    _candidates,
    _choose,
    _classes,
    _compose,
    _drops,
    _margins,
    _places,
)
from ..index.kernels import _clear_recent, _insert_recent
from ..realign.kernels import (
    _EDITS,
    _NO_EDIT,
    _WINDOW,
    _WORDS,
    _fold,
    _load_row,
    _row_of,
    _row_offsets,
    _standing,
)
from ..recipe.kernels import _MAX_TOKENS, _find_recipe

_VACANT = tl.constexpr(layout.VACANT)
_ABOUT = tl.constexpr(layout.ABOUT)
_TEXT_BASE = tl.constexpr(layout.TEXT_BASE)
_TEXT_LEN = tl.constexpr(layout.TEXT_LEN)
_TEXT_SHIFT = tl.constexpr(layout.TEXT_SHIFT)
_OUTPUT_START = tl.constexpr(layout.OUTPUT_START)
_CONTEXT_START = tl.constexpr(layout.CONTEXT_START)
_ALIGNED = tl.constexpr(layout.ALIGNED)
_SEEN = tl.constexpr(layout.SEEN)
_FOLLOWS = tl.constexpr(layout.FOLLOWS)
_CURSOR = tl.constexpr(layout.CURSOR)
_ANCHOR = tl.constexpr(layout.ANCHOR)
_LEFT_AT = tl.constexpr(layout.LEFT_AT)
_FOLLOWED = tl.constexpr(layout.FOLLOWED)
_NUM_EDITS = tl.constexpr(layout.NUM_EDITS)
_EDIT = tl.constexpr(layout.EDIT)
_EDIT_BEFORE = tl.constexpr(layout.EDIT_BEFORE)
_EDIT_AT = tl.constexpr(layout.EDIT_AT)
_EDIT_BEHIND = tl.constexpr(layout.EDIT_BEHIND)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_EDIT_OLD = tl.constexpr(layout.EDIT_OLD)
_EDIT_NEW = tl.constexpr(layout.EDIT_NEW)


@triton.jit
def _realign(
    p_text, num_text, p_order, p_first, shift, p_context, output_start, total, p_aligned, p_row, p_edits,
):  # fmt: skip
    """Fold what is new of a request's output and write its state back.

    Returns ``(follows, cursor, anchor, followed, num_edits, top, six columns of edits)``, with the cursor where
    the output stands and `top` its score where it has left the prediction.
    """
    seen = tl.load(p_aligned + _SEEN)
    # Nothing is known of a request that is new, nor of one whose tokens were taken back.
    fresh = (seen < 0) | (total < seen)
    seen = tl.where(fresh, 0, seen)
    follows = tl.where(fresh, 1, tl.load(p_aligned + _FOLLOWS))
    cursor = tl.where(fresh, 0, tl.load(p_aligned + _CURSOR))
    anchor = tl.where(fresh, 0, tl.load(p_aligned + _ANCHOR))
    left_at = tl.where(fresh, 0, tl.load(p_aligned + _LEFT_AT))
    followed = tl.where(fresh, 0, tl.load(p_aligned + _FOLLOWED))
    num_edits = tl.where(fresh, 0, tl.load(p_aligned + _NUM_EDITS))
    p_ways = p_edits + tl.arange(0, _EDITS) * _EDIT
    b_before = tl.where(fresh, _NO_EDIT, tl.load(p_ways + _EDIT_BEFORE))
    b_at = tl.load(p_ways + _EDIT_AT)
    b_behind = tl.load(p_ways + _EDIT_BEHIND)
    b_start = tl.load(p_ways + _EDIT_START)
    b_old = tl.load(p_ways + _EDIT_OLD)
    b_new = tl.load(p_ways + _EDIT_NEW)
    b_words = tl.full([_WORDS], -1, tl.int32)
    if follows == 0:
        b_words = _load_row(p_row)
    # There is nothing to follow in an empty prediction.
    num_output = tl.where(num_text > 0, total - output_start, 0)
    (
        follows, cursor, anchor, left_at, followed, num_edits, b_words,
        b_before, b_at, b_behind, b_start, b_old, b_new, edits_changed,
    ) = _fold(
        p_text, num_text, p_order, p_first, shift, p_context + output_start,
        tl.maximum(seen - output_start, 0), num_output,
        follows, cursor, anchor, left_at, followed, num_edits, b_words,
        b_before, b_at, b_behind, b_start, b_old, b_new,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read what is written now
    tl.store(p_aligned + _SEEN, total)
    tl.store(p_aligned + _FOLLOWS, follows)
    tl.store(p_aligned + _CURSOR, cursor)
    tl.store(p_aligned + _ANCHOR, anchor)
    tl.store(p_aligned + _LEFT_AT, left_at)
    tl.store(p_aligned + _FOLLOWED, followed)
    tl.store(p_aligned + _NUM_EDITS, num_edits)
    if fresh | (edits_changed > 0):
        tl.store(p_ways + _EDIT_BEFORE, b_before)
        tl.store(p_ways + _EDIT_AT, b_at)
        tl.store(p_ways + _EDIT_BEHIND, b_behind)
        tl.store(p_ways + _EDIT_START, b_start)
        tl.store(p_ways + _EDIT_OLD, b_old)
        tl.store(p_ways + _EDIT_NEW, b_new)
    top = 0
    if follows == 0:
        b_row = _row_of(b_words)
        tl.store(p_row + _row_offsets(), b_row.to(tl.int16))
        j, top = _standing(b_row, tl.minimum(num_text - anchor, _WINDOW))
        cursor = anchor + j
    return (
        follows, cursor, anchor, followed, num_edits, top,
        b_before, b_at, b_behind, b_start, b_old, b_new,
    )  # fmt: skip


@triton.jit
def _update_recent(p_recent, stride_recent_s, shift, p_context, seen, total):
    """Enter the tokens that are new, all of them where the request starts over."""
    fresh = (seen < 0) | (total < seen)
    if fresh:
        _clear_recent(p_recent, stride_recent_s)
        tl.debug_barrier()  # other threads enter ends in what these have cleared
    _insert_recent(p_recent, shift, p_context, tl.where(fresh, 0, seen), total)


@triton.jit
def _next_tokens(p_text, p_context, o_position, m_live):
    """What each candidate expects next, [_LANES] int32."""
    o_c = tl.arange(0, _LANES)
    b_own = tl.load(p_context + o_position, mask=m_live & (o_c >= _OWN), other=0)
    return tl.load(p_text + o_position, mask=m_live & (o_c < _OWN), other=0) + b_own


# What an engine brings to a call, and settings: the kernel is the same one whatever they are.
@triton.jit(
    do_not_specialize=[
        "context_ptr", "stride_context_s", "context_len_ptr", "slots_ptr", "active_ptr",
        "recent_shift", "key_shift", "length_quarters", "min_match", "min_context_match", "context_capacity",
        "vocab_size",
    ]
)  # fmt: skip
def _step_kernel(
    text_ptr, order_ptr, first_ptr, about_ptr, aligned_ptr, row_ptr, edits_ptr, recent_ptr, stride_recent_s,
    context_ptr, stride_context_s, context_len_ptr, slots_ptr, active_ptr,
    length_bucket_ptr, margin_bucket_ptr, keep_ptr, gain_ptr, confidence_ptr,
    token_ids_ptr, length_ptr, confidence_out_ptr, source_ptr, recent_shift,
    keys_ptr, rows_ptr, recipe_keep_ptr, recipe_gain_ptr, recipe_tokens_ptr, recipe_confidence_ptr, key_shift,
    length_quarters, min_match, min_context_match, context_capacity, vocab_size,
    K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RECIPES: tl.constexpr,
):  # fmt: skip
    """Grid (B,). `gpu_align.ops.step.StepLaunch` says what it computes, `gpu_align.ops.layout` its state."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    total = tl.load(context_len_ptr + i_slot)
    p_context = context_ptr + i_slot * stride_context_s
    p_about = about_ptr + i_slot * _ABOUT
    output_start = tl.load(p_about + _OUTPUT_START)
    o_k = tl.arange(0, BLOCK_K)
    b_tokens = tl.zeros([BLOCK_K], tl.int32)
    length = 0
    klass = 0
    source = tl.zeros([], tl.int32)
    recipe = tl.full([], -1, tl.int32)
    if (tl.load(active_ptr + i_b) > 0) & (output_start != _VACANT):
        base = tl.load(p_about + _TEXT_BASE)
        num_text = tl.load(p_about + _TEXT_LEN)
        shift = tl.load(p_about + _TEXT_SHIFT)
        uses_context = tl.load(p_about + _CONTEXT_START) != _VACANT
        p_text = text_ptr + base
        p_order = order_ptr + base
        p_first = first_ptr + base
        p_recent = recent_ptr + i_slot * stride_recent_s
        p_aligned = aligned_ptr + i_slot * _ALIGNED
        p_row = row_ptr + i_slot * _WINDOW
        if HAS_RECIPES:
            recipe = _find_recipe(p_context, total, keys_ptr, rows_ptr, key_shift)
        if uses_context:
            seen = tl.load(p_aligned + _SEEN)
            _update_recent(p_recent, stride_recent_s, recent_shift, p_context, seen, total)
        (
            follows, cursor, anchor, followed, num_edits, top,
            b_before, b_at, b_behind, b_start, b_old, b_new,
        ) = _realign(
            p_text, num_text, p_order, p_first, shift, p_context, output_start, total,
            p_aligned, p_row, edits_ptr + i_slot * (_EDITS * _EDIT),
        )  # fmt: skip
        tl.debug_barrier()  # the row and the latest ends are read below, by other threads

        # The candidates, and what each is worth.
        num_output = total - output_start
        o_position, b_matched = _candidates(
            p_text, num_text, p_order, p_first, shift, cursor, num_output,
            p_recent, recent_shift, uses_context, p_context, total, min_match, min_context_match,
        )  # fmt: skip
        m_live = o_position >= 0
        b_token = _next_tokens(p_text, p_context, o_position, m_live)
        num_window = tl.minimum(num_text - anchor, _WINDOW)
        b_drop = _drops(o_position, cursor, follows, p_row, anchor, num_window, top)
        b_class = _classes(
            b_matched, _margins(b_token, b_matched, m_live, followed, num_output),
            _places(o_position, cursor, b_drop),
            followed, num_output, length_bucket_ptr, margin_bucket_ptr,
        )  # fmt: skip
        is_whole = (
            (follows > 0) & (cursor == num_output) & (followed == num_output) & (num_output <= _MAX_MATCH)
        )
        lane, num, value = _choose(
            b_class, b_matched, m_live, is_whole, keep_ptr, gain_ptr, length_quarters, K
        )

        if HAS_RECIPES:
            recipe_gain = tl.load(recipe_gain_ptr + recipe, mask=recipe >= 0, other=0)
            recipe = tl.where(recipe_gain > value, recipe, -1)
            num = tl.where(recipe >= 0, 0, num)

        # The best, with what was edited before edited again; a draft never reaches beyond the context.
        is_own = lane >= _OWN
        klass = _at(b_class, lane)
        position = _at(o_position, lane)
        o_source, b_context, num_drafts = _compose(
            p_text, num_text, position, tl.where(is_own, 0, num), output_start, num_edits,
            b_before, b_at, b_behind, b_start, b_old, b_new, BLOCK_K,
        )  # fmt: skip
        length = tl.where(is_own, tl.minimum(num, total - position), num_drafts)
        if HAS_RECIPES:
            length += tl.load(recipe_keep_ptr + recipe, mask=recipe >= 0, other=0)
        length = tl.maximum(tl.minimum(length, context_capacity - total), 0)
        m_context = tl.where(is_own, 1, b_context) > 0
        p_source = tl.where(m_context, p_context + o_source, p_text + o_source)
        b_tokens = tl.load(p_source, mask=o_k < tl.where(recipe < 0, length, 0), other=0)
        if HAS_RECIPES:
            p_recipe = recipe_tokens_ptr + recipe * _MAX_TOKENS + o_k
            b_tokens += tl.load(p_recipe, mask=o_k < tl.where(recipe < 0, 0, length), other=0)
        # A token outside the vocabulary ends the draft: emitting one would crash the engine's embedding.
        m_bad = (o_k < length) & ((b_tokens < 0) | (b_tokens >= vocab_size))
        length = tl.minimum(length, tl.min(tl.where(m_bad, o_k, BLOCK_K), axis=0))
        source = tl.where(recipe >= 0, 3, tl.where(is_own, 2, 1))
        source = tl.where(length > 0, source, 0)

    m_draft = o_k < length
    last = tl.load(p_context + total - 1, mask=total > 0, other=0)
    last = tl.where((last >= 0) & (last < vocab_size), last, 0)
    b_confidence = tl.load(
        confidence_ptr + klass * K + o_k, mask=o_k < tl.where(recipe < 0, length, 0), other=0.0
    )
    if HAS_RECIPES:
        p_recipe_confidence = recipe_confidence_ptr + recipe * _MAX_TOKENS + o_k
        b_confidence += tl.load(p_recipe_confidence, mask=o_k < tl.where(recipe < 0, 0, length), other=0.0)
    m_k = o_k < K
    o_out = i_b.to(tl.int64) * K + o_k
    tl.store(token_ids_ptr + o_out, tl.where(m_draft, b_tokens, last).to(tl.int64), mask=m_k)
    tl.store(confidence_out_ptr + o_out, tl.where(m_draft, b_confidence, 0.0), mask=m_k)
    tl.store(length_ptr + i_b, length)
    tl.store(source_ptr + i_b, source.to(tl.int8))

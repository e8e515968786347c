"""Device functions of a step that look a recipe up and say whether it goes before the best candidate."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..constexprs import (
    HASH,
    KEY_SEED,
    MAX_CONTEXT,
    NO_KEY,
    RECIPE_WAYS,
    SHAPE_POWERS,
    SHAPE_SHARE,
    SHAPE_START,
    SHAPE_WINDOW,
)


class Recipes(NamedTuple):
    """The table of R recipes."""

    p_keys: Any  # [buckets, RECIPE_WAYS] int32
    p_packs: Any  # [buckets, RECIPE_WAYS] int32: a bit for each pack that it belongs to
    p_rows: Any  # [buckets, RECIPE_WAYS] int32: which recipe it is
    p_max_draft_len: Any  # [R] int32
    p_expected: Any  # [R] int32
    p_tokens: Any  # [R, MAX_TOKENS] int32
    p_confidence: Any  # [R, MAX_TOKENS] float32
    p_shape_of: Any  # [num_shapes] int32: the item of a shape that each token is, the last for all beyond
    shift: Any  # a key's upper bits are its bucket
    num_shapes: Any


@triton.jit
def _literal_keys(context):
    """The keys of the last 1 to MAX_CONTEXT tokens, [MAX_CONTEXT * RECIPE_WAYS] int32: a lane a way of each."""
    o_last = tl.arange(0, MAX_CONTEXT * RECIPE_WAYS) // RECIPE_WAYS
    b_key = tl.zeros([MAX_CONTEXT * RECIPE_WAYS], tl.int32)
    key = tl.full([], KEY_SEED, tl.int64)
    for i in tl.static_range(MAX_CONTEXT):
        token = tl.load(context.p_tokens + context.total - 1 - i, mask=context.total > i, other=0)
        key = ((key ^ token.to(tl.int64)) * HASH) & 0x7FFFFFFF
        b_key = tl.where(o_last == i, key.to(tl.int32), b_key)
    return b_key


@triton.jit
def _shape_items(recipes, context, o_last, num_output):
    """What the token `o_last` before the last output token is in a shape; at the beginning `SHAPE_START`."""
    m_token = (o_last >= 0) & (o_last < num_output)
    b_token = tl.load(context.p_tokens + context.total - 1 - o_last, mask=m_token, other=0)
    b_token = tl.minimum(tl.maximum(b_token, 0), recipes.num_shapes - 1)
    return tl.load(recipes.p_shape_of + b_token, mask=m_token, other=SHAPE_START)


@triton.jit
def _shape_keys(recipes, context):
    """``(key, rank, is_item)``, [SHAPE_WINDOW] each: of each item the key of the shape from the last item to it.

    ::

        for i in range(SHAPE_WINDOW):                             # the last token first
            if i is the first of a run of free tokens, another token, or num_output:
                key += ((item[i] ^ KEY_SEED) * SHAPE_POWERS[rank]) mod 2**28
                key_of[i], rank = key * HASH mod 2**31, rank + 1
    """
    o_last = tl.arange(0, SHAPE_WINDOW)
    num_output = tl.maximum(context.total - context.output_start, 0)
    b_item = _shape_items(recipes, context, o_last, num_output)
    m_later_free = (_shape_items(recipes, context, o_last - 1, num_output) < 0) & (o_last > 0)
    m_goes_on = (b_item < 0) & (o_last < num_output) & m_later_free
    m_item = (o_last <= num_output) & (m_goes_on == 0)
    b_rank = tl.cumsum(m_item.to(tl.int32), axis=0) - 1
    m_item = m_item & (b_rank < MAX_CONTEXT)
    b_power = tl.zeros([SHAPE_WINDOW], tl.int64)
    for rank in tl.static_range(MAX_CONTEXT):
        b_power = tl.where(b_rank == rank, SHAPE_POWERS[rank], b_power)
    b_share = ((b_item ^ KEY_SEED).to(tl.int64) * b_power) & SHAPE_SHARE
    b_sum = tl.cumsum(tl.where(m_item, b_share.to(tl.int32), 0), axis=0)
    return ((b_sum.to(tl.int64) * HASH) & 0x7FFFFFFF).to(tl.int32), b_rank, m_item


@triton.jit
def _find_recipe(recipes, context, packs, HAS_SHAPES: tl.constexpr):
    """The recipe of these packs with the longest literal context, else with the longest shape, or -1.

    ::

        for key in keys of the literal contexts, the longest first, then of the shapes:
            for way in range(RECIPE_WAYS):
                if keys[key >> shift, way] == key and packs_of[key >> shift, way] & packs:
                    return rows[key >> shift, way]
        return -1
    """
    # A lane a way of each length: all buckets are loaded at once. Of two packs' ways the first is the larger lane.
    o_lane = tl.arange(0, MAX_CONTEXT * RECIPE_WAYS)
    b_key = _literal_keys(context)
    o_way = (b_key >> recipes.shift) * RECIPE_WAYS + (RECIPE_WAYS - 1 - o_lane % RECIPE_WAYS)
    m_found = o_lane // RECIPE_WAYS < context.total
    m_found &= tl.load(recipes.p_keys + o_way, mask=m_found, other=NO_KEY) == b_key
    m_found &= (tl.load(recipes.p_packs + o_way) & packs) != 0
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    way = tl.sum(tl.where(o_lane == longest, o_way, 0), axis=0)
    if HAS_SHAPES:
        b_shape, b_rank, m_item = _shape_keys(recipes, context)
        o_last = tl.arange(0, RECIPE_WAYS)[None, :]
        o_place = (b_shape >> recipes.shift)[:, None] * RECIPE_WAYS + o_last
        m_place = m_item[:, None] & (tl.load(recipes.p_keys + o_place) == b_shape[:, None])
        m_place &= (tl.load(recipes.p_packs + o_place) & packs) != 0
        b_order = b_rank[:, None] * RECIPE_WAYS + (RECIPE_WAYS - 1 - o_last)
        shape = tl.max(tl.max(tl.where(m_place, b_order, -1), axis=1), axis=0)
        m_place &= b_order == shape
        place = tl.sum(tl.sum(tl.where(m_place, o_place, 0), axis=1), axis=0)
        way = tl.where(longest >= 0, way, place)
        longest = tl.maximum(longest, shape)
    return tl.load(recipes.p_rows + way, mask=longest >= 0, other=-1)


@triton.jit
def _likelier(recipes, recipe, expected):
    """The recipe if more of it is expected to be accepted than `expected`, else -1."""
    own = tl.load(recipes.p_expected + recipe, mask=recipe >= 0, other=0)
    return tl.where(own > expected, recipe, -1)

"""Device functions of a step that look a recipe up and say whether it goes before the best candidate."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..constexprs import (
    HASH,
    KEY_SEED,
    MAX_CONTEXT,
    RECIPE_COLUMNS,
    RECIPE_EXPECTED,
    RECIPE_LEN,
    RECIPE_ROW,
    RECIPE_WAYS,
    SHAPE_HASH,
    SHAPE_START,
    SHAPE_WINDOW,
)


class Recipes(NamedTuple):
    """The table of R recipes."""

    p_keys: Any  # [buckets, RECIPE_WAYS] int32
    p_packs: Any  # [buckets, RECIPE_WAYS] int32: a bit for each pack that it belongs to
    p_ways: (
        Any  # [buckets, RECIPE_WAYS, RECIPE_COLUMNS] int32: which recipe it is, its drafts, expected drafts
    )
    p_tokens: Any  # [R, MAX_TOKENS] int32
    p_confidence: Any  # [R, MAX_TOKENS] float32
    p_shape_of: Any  # [num_shapes] int32: the item of a shape that each token is, the last for all beyond
    shift: Any  # a key's upper bits are its bucket
    num_shapes: Any


class Lookup(NamedTuple):
    """What the contexts of one request are."""

    b_key: Any  # [MAX_CONTEXT * RECIPE_WAYS] int32: of the literal contexts
    b_item: Any  # [SHAPE_WINDOW] int32: of the output's tokens, the last one first
    b_later: Any  # [SHAPE_WINDOW] int32: of the token behind each


class Ways(NamedTuple):
    """The ways of the buckets of several keys."""

    o_way: Any  # int32: where each lies
    b_key: Any  # int32: what is looked for
    b_found: Any  # int32: the key that is there
    b_packs: Any  # int32: a bit for each pack that its recipe belongs to


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
def _read_lookup(recipes, context, HAS_SHAPES: tl.constexpr):
    """What a look-up begins with. Done early: until `_load_ways` other work hides that memory is slow."""
    o_last = tl.arange(0, SHAPE_WINDOW)
    b_item, b_later = o_last, o_last
    if HAS_SHAPES:
        num_output = tl.maximum(context.total - context.output_start, 0)
        b_item = _shape_items(recipes, context, o_last, num_output)
        b_later = _shape_items(recipes, context, o_last - 1, num_output)
    return Lookup(_literal_keys(context), b_item, b_later)


@triton.jit
def _then(factor, key, next_factor, next_key):
    """One linear map of a key, then the next."""
    return factor * next_factor, key * next_factor + next_key


@triton.jit
def _shape_keys(context, lookup):
    """The key of the shape from the last output token to each, [SHAPE_WINDOW] int32.

    ::

        key = 0
        for i in range(min(num_output + 1, SHAPE_WINDOW)):        # the last token first
            if i is not a free token behind another, in reading order in front of it:
                key = (key + item[i] + KEY_SEED) * SHAPE_HASH mod 2**32
            key_of[i] = key >> 1
    """
    o_last = tl.arange(0, SHAPE_WINDOW)
    num_output = tl.maximum(context.total - context.output_start, 0)
    m_same = (lookup.b_item < 0) & (o_last < num_output) & (lookup.b_later < 0) & (o_last > 0)
    m_same = m_same | (o_last > num_output)
    b_factor = tl.where(m_same, 1, SHAPE_HASH)
    b_key = tl.where(m_same, 0, (lookup.b_item + KEY_SEED) * SHAPE_HASH)
    _, b_key = tl.associative_scan((b_factor, b_key), 0, _then)
    return (b_key >> 1) & 0x7FFFFFFF


@triton.jit
def _load_ways(recipes, context, lookup, HAS_SHAPES: tl.constexpr):
    """``(contexts, shapes)``: their ways, [64] and [SHAPE_WINDOW, RECIPE_WAYS], all loaded at once.

    In each bucket the last way comes first.
    """
    o_first = RECIPE_WAYS - 1 - tl.arange(0, MAX_CONTEXT * RECIPE_WAYS) % RECIPE_WAYS
    o_way = (lookup.b_key >> recipes.shift) * RECIPE_WAYS + o_first
    contexts = Ways(o_way, lookup.b_key, tl.load(recipes.p_keys + o_way), tl.load(recipes.p_packs + o_way))
    shapes = contexts
    if HAS_SHAPES:
        b_key = _shape_keys(context, lookup)[:, None]
        o_way = (b_key >> recipes.shift) * RECIPE_WAYS + tl.arange(0, RECIPE_WAYS)[None, :]
        shapes = Ways(o_way, b_key, tl.load(recipes.p_keys + o_way), tl.load(recipes.p_packs + o_way))
    return contexts, shapes


@triton.jit
def _find_recipe(recipes, context, ways, packs, HAS_SHAPES: tl.constexpr):
    """``(recipe, drafts, expected)`` of the longest literal context, else of the longest shape; recipe -1 if none.

    ::

        for key in keys of the literal contexts, the longest first, then of the shapes:
            for way in range(RECIPE_WAYS):
                if keys[key >> shift, way] == key and packs_of[key >> shift, way] & packs:
                    return ways[key >> shift, way]
        return -1, 0, 0
    """
    contexts, shapes = ways
    o_lane = tl.arange(0, MAX_CONTEXT * RECIPE_WAYS)
    m_found = (contexts.b_found == contexts.b_key) & ((contexts.b_packs & packs) != 0)
    m_found = m_found & (o_lane // RECIPE_WAYS < context.total)
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    way = tl.sum(tl.where(o_lane == longest, contexts.o_way, 0), axis=0)
    if HAS_SHAPES:
        m_found = (shapes.b_found == shapes.b_key) & ((shapes.b_packs & packs) != 0)
        o_first = RECIPE_WAYS - 1 - tl.arange(0, RECIPE_WAYS)[None, :]
        b_order = tl.arange(0, SHAPE_WINDOW)[:, None] * RECIPE_WAYS + o_first
        shape = tl.max(tl.max(tl.where(m_found, b_order, -1), axis=1), axis=0)
        shape_way = tl.sum(tl.sum(tl.where(b_order == shape, shapes.o_way, 0), axis=1), axis=0)
        way = tl.where(longest >= 0, way, shape_way)
        longest = tl.maximum(longest, shape)
    p_way = recipes.p_ways + way * RECIPE_COLUMNS
    recipe = tl.load(p_way + RECIPE_ROW, mask=longest >= 0, other=-1)
    num = tl.load(p_way + RECIPE_LEN, mask=longest >= 0, other=0)
    return recipe, num, tl.load(p_way + RECIPE_EXPECTED, mask=longest >= 0, other=0)

"""Device functions of a step that look a recipe up and say whether it goes before the best candidate."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constexprs import *


class RecipePointers(NamedTuple):
    """The table of R recipes."""

    p_keys: Any  # [buckets, RECIPE_WAYS] int64: a key, and in the lower half a bit for each pack
    p_ways: Any  # [buckets, RECIPE_WAYS, RECIPE_COLUMNS] int32: recipe, drafts, expected drafts
    p_tokens: Any  # [R, MAX_TOKENS] int32
    p_confidence: Any  # [R, MAX_TOKENS] float32
    p_shape_of: Any  # [num_shapes] int32: the item of a shape that each token is, the last for all beyond
    p_indents: (
        Any  # [NUM_RUNS + num_indents] int32: runs, what each token does to a line, the last for all beyond
    )
    shift: Any  # a key's upper bits are its bucket
    num_shapes: Any
    num_indents: Any


class Lookup(NamedTuple):
    """What one request is looked up by; see `find_recipe`."""

    b_key: Any  # [MAX_CONTEXT * RECIPE_WAYS] int32: of the literal contexts, a lane a way
    o_way: Any  # [MAX_CONTEXT * RECIPE_WAYS] int32: where each way lies
    b_held: Any  # [MAX_CONTEXT * RECIPE_WAYS] int64: what is there
    b_item: Any  # [SHAPE_WINDOW] int32: what the last output tokens are in a shape, the very last one first
    b_later: Any  # [SHAPE_WINDOW] int32: the item of the token behind each


@triton.jit
def literal_keys(context):
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
def shape_items(recipes, b_token, o_last, num_output):
    """What each token is in a shape, the one `o_last` before the last; at the beginning `SHAPE_START`."""
    b_token = tl.minimum(tl.maximum(b_token, 0), recipes.num_shapes - 1)
    m_token = (o_last >= 0) & (o_last < num_output)
    return tl.load(recipes.p_shape_of + b_token, mask=m_token, other=SHAPE_START)


@triton.jit
def begin_lookup(recipes, context, HAS_SHAPES: tl.constexpr):
    """The ways of all literal contexts, and the items of the output's shape.

    In each bucket the last way comes first: of what is found, the largest lane is the longest context, and in it
    the way of the first pack.
    """
    o_last = tl.arange(0, SHAPE_WINDOW)
    num_output = tl.maximum(context.total - context.output_start, 0)
    b_item, b_later = o_last, o_last
    if HAS_SHAPES:
        p_last = context.p_tokens + context.total - 1
        b_recent = tl.load(p_last - o_last, mask=o_last < num_output, other=0)
    b_key = literal_keys(context)
    o_first = RECIPE_WAYS - 1 - tl.arange(0, MAX_CONTEXT * RECIPE_WAYS) % RECIPE_WAYS
    o_way = (b_key >> recipes.shift) * RECIPE_WAYS + o_first
    b_held = tl.load(recipes.p_keys + o_way)
    if HAS_SHAPES:
        b_item = shape_items(recipes, b_recent, o_last, num_output)
        b_behind = tl.load(p_last + 1 - o_last, mask=(o_last > 0) & (o_last <= num_output), other=0)
        b_later = shape_items(recipes, b_behind, o_last - 1, num_output)
    return Lookup(b_key, o_way, b_held, b_item, b_later)


@triton.jit
def then(factor, key, next_factor, next_key):
    """One linear map of a key, then the next."""
    return factor * next_factor, key * next_factor + next_key


@triton.jit
def shape_keys(context, lookup):
    """The key of the shape from the last output token to each, [SHAPE_WINDOW] int32."""
    o_last = tl.arange(0, SHAPE_WINDOW)
    num_output = tl.maximum(context.total - context.output_start, 0)
    m_same = (lookup.b_item < 0) & (o_last < num_output) & (lookup.b_later < 0) & (o_last > 0)
    m_same = m_same | (o_last > num_output)
    b_factor = tl.where(m_same, 1, SHAPE_HASH)
    b_key = tl.where(m_same, 0, (lookup.b_item + KEY_SEED) * SHAPE_HASH)
    _, b_key = tl.associative_scan((b_factor, b_key), 0, then)
    return (b_key >> 1) & 0x7FFFFFFF


@triton.jit
def pack_of(b_held, b_key, packs):
    """The first of the packs for which a way holds the key, as a bit; `ALL_PACKS` is none."""
    b_packs = b_held.to(tl.int32) & packs
    m_found = ((b_held >> 32).to(tl.int32) == b_key) & (b_packs != 0)
    return tl.where(m_found, b_packs & -b_packs, ALL_PACKS)


@triton.jit
def find_shape(recipes, context, lookup, packs):
    """``(way, pack)``; way -1 if no pack has one."""
    b_key = shape_keys(context, lookup)
    o_bucket = (b_key >> recipes.shift) * RECIPE_WAYS
    o_last = tl.arange(0, SHAPE_WINDOW)
    b_order = tl.full([SHAPE_WINDOW], -1, tl.int32)
    b_pack = tl.full([SHAPE_WINDOW], ALL_PACKS, tl.int32)
    for way in tl.static_range(RECIPE_WAYS - 1, -1, -1):
        b_own = pack_of(tl.load(recipes.p_keys + o_bucket + way), b_key, packs)
        m_found = (b_own != ALL_PACKS) & (b_own <= b_pack)
        b_order = tl.where(m_found, o_last * RECIPE_WAYS + way, b_order)
        b_pack = tl.where(m_found, b_own, b_pack)
    pack = tl.min(b_pack, axis=0)
    longest = tl.max(tl.where(b_pack == pack, b_order, -1), axis=0)
    m_longest = (b_order == longest) & (b_order >= 0)
    return tl.max(tl.where(m_longest, o_bucket + b_order % RECIPE_WAYS, -1), axis=0), pack


@triton.jit
def find_recipe(recipes, context, lookup, packs, shape_way, shape_pack):
    """``(recipe, drafts, expected)``; recipe -1 if no pack has one."""
    o_lane = tl.arange(0, MAX_CONTEXT * RECIPE_WAYS)
    b_pack = pack_of(lookup.b_held, lookup.b_key, packs)
    b_pack = tl.where(o_lane // RECIPE_WAYS < context.total, b_pack, ALL_PACKS)
    pack = tl.min(b_pack, axis=0)
    m_found = (b_pack == pack) & (b_pack != ALL_PACKS)
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    way = tl.max(tl.where(m_found & (o_lane == longest), lookup.o_way, -1), axis=0)
    way = tl.where(shape_pack < pack, shape_way, way)
    p_way = recipes.p_ways + way * RECIPE_COLUMNS
    recipe = tl.load(p_way + RECIPE_ROW, mask=way >= 0, other=-1)
    num = tl.load(p_way + RECIPE_LEN, mask=way >= 0, other=0)
    return recipe, num, tl.load(p_way + RECIPE_EXPECTED, mask=way >= 0, other=0)

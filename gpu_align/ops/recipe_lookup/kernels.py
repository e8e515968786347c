"""Device functions of a step that look a recipe up and say whether it goes before the best candidate."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..constexprs import HASH, KEY_SEED, MAX_CONTEXT, NO_KEY, RECIPE_WAYS


class Recipes(NamedTuple):
    """The table of R recipes."""

    p_keys: Any  # [buckets, RECIPE_WAYS] int32
    p_rows: Any  # [buckets, RECIPE_WAYS] int32: which recipe it is
    p_max_draft_len: Any  # [R] int32
    p_expected: Any  # [R] int32
    p_tokens: Any  # [R, MAX_TOKENS] int32
    p_confidence: Any  # [R, MAX_TOKENS] float32
    shift: Any  # a key's upper bits are its bucket


@triton.jit
def _find_recipe(recipes, context):
    """The recipe with the longest context that the request's context ends with, or -1.

    ::

        key, found = KEY_SEED, -1
        for i in range(min(total, MAX_CONTEXT)):
            key = (key ^ context[total - 1 - i]) * HASH mod 2**31
            for way in range(RECIPE_WAYS):
                if keys[key >> shift, way] == key:    found = rows[key >> shift, way]
    """
    # A lane a way of each length: all buckets are loaded at once.
    o_lane = tl.arange(0, MAX_CONTEXT * RECIPE_WAYS)
    o_last = o_lane // RECIPE_WAYS
    b_key = tl.zeros([MAX_CONTEXT * RECIPE_WAYS], tl.int32)
    key = tl.full([], KEY_SEED, tl.int64)
    for i in tl.static_range(MAX_CONTEXT):
        token = tl.load(context.p_tokens + context.total - 1 - i, mask=context.total > i, other=0)
        key = ((key ^ token.to(tl.int64)) * HASH) & 0x7FFFFFFF
        b_key = tl.where(o_last == i, key.to(tl.int32), b_key)
    o_way = (b_key >> recipes.shift) * RECIPE_WAYS + o_lane % RECIPE_WAYS
    m_found = tl.load(recipes.p_keys + o_way, mask=o_last < context.total, other=NO_KEY) == b_key
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    way = tl.sum(tl.where(o_lane == longest, o_way, 0), axis=0)
    return tl.load(recipes.p_rows + way, mask=longest >= 0, other=-1)


@triton.jit
def _likelier(recipes, recipe, expected):
    """The recipe if more of it is expected to be accepted than `expected`, else -1."""
    own = tl.load(recipes.p_expected + recipe, mask=recipe >= 0, other=0)
    return tl.where(own > expected, recipe, -1)

"""Device function of a step that looks a recipe up."""

import triton
import triton.language as tl

from ..layout import HASH
from .table import KEY_SEED, MAX_CONTEXT, MAX_TOKENS, NO_KEY, RECIPE_WAYS

_HASH = tl.constexpr(HASH)
_MAX_CONTEXT = tl.constexpr(MAX_CONTEXT)
_MAX_TOKENS = tl.constexpr(MAX_TOKENS)
_RECIPE_WAYS = tl.constexpr(RECIPE_WAYS)
_KEY_SEED = tl.constexpr(KEY_SEED)
_NO_KEY = tl.constexpr(NO_KEY)


@triton.jit
def _find_recipe(p_context, total, keys_ptr, rows_ptr, shift):
    """The recipe with the longest context that ``context[:total]`` ends with, or -1.

    ::

        key, found = KEY_SEED, -1
        for i in range(min(total, MAX_CONTEXT)):
            key = (key ^ context[total - 1 - i]) * HASH mod 2**31
            for way in range(RECIPE_WAYS):
                if keys[key >> shift, way] == key:    found = rows[key >> shift, way]
    """
    # A lane a way of each length: all buckets are loaded at once.
    o_lane = tl.arange(0, _MAX_CONTEXT * _RECIPE_WAYS)
    o_last = o_lane // _RECIPE_WAYS
    b_key = tl.zeros([_MAX_CONTEXT * _RECIPE_WAYS], tl.int32)
    key = tl.full([], _KEY_SEED, tl.int64)
    for i in tl.static_range(_MAX_CONTEXT):
        token = tl.load(p_context + total - 1 - i, mask=total > i, other=0)
        key = ((key ^ token.to(tl.int64)) * _HASH) & 0x7FFFFFFF
        b_key = tl.where(o_last == i, key.to(tl.int32), b_key)
    o_way = (b_key >> shift) * _RECIPE_WAYS + o_lane % _RECIPE_WAYS
    m_found = tl.load(keys_ptr + o_way, mask=o_last < total, other=_NO_KEY) == b_key
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    way = tl.sum(tl.where(o_lane == longest, o_way, 0), axis=0)
    return tl.load(rows_ptr + way, mask=longest >= 0, other=-1)

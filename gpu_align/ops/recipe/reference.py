"""Looking a recipe up as a loop: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._jit import njit
from ..layout import HASH
from .table import KEY_BITS, KEY_SEED, MAX_CONTEXT, RECIPE_WAYS, RecipeArrays

IntArray = npt.NDArray[np.signedinteger[Any]]


@njit
def find_recipe(recipes: RecipeArrays, context: IntArray, total: int) -> int:
    """The recipe with the longest context that ``context[:total]`` ends with, or -1."""
    shift = KEY_BITS
    while len(recipes.keys) >> (KEY_BITS - shift) > 1:
        shift -= 1
    key, found = KEY_SEED, -1
    for i in range(min(total, MAX_CONTEXT)):
        key = ((key ^ int(context[total - 1 - i])) * HASH) & 0x7FFFFFFF
        for way in range(RECIPE_WAYS):
            if recipes.keys[key >> shift, way] == key:
                found = int(recipes.rows[key >> shift, way])
    return found


@njit
def likelier(recipes: RecipeArrays, context: IntArray, total: int, value: int) -> int:
    """The recipe after ``context[:total]`` if more of it is expected to be accepted than `value`, else -1."""
    recipe = find_recipe(recipes, context, total)
    return recipe if recipe >= 0 and recipes.gain[recipe] > value else -1


@njit
def copy_recipe(recipes: RecipeArrays, recipe: int, draft: IntArray) -> int:
    """Write a recipe's tokens, as many as are likely enough; how many these are. draft: [K]."""
    length = int(recipes.keep[recipe])
    for k in range(length):
        draft[k] = recipes.token_ids[recipe, k]
    return length

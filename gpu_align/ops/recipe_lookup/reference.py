"""Looking a recipe up as a loop: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._jit import njit
from ..constants import HASH, KEY_BITS, KEY_SEED, MAX_CONTEXT, RECIPE_WAYS
from ..suffix_match.reference import shift_of
from .table import RecipeArrays

IntArray = npt.NDArray[np.signedinteger[Any]]


@njit
def find_recipe(recipes: RecipeArrays, context: IntArray) -> int:
    """The recipe with the longest context that these tokens end with, or -1."""
    shift, total = shift_of(len(recipes.keys), KEY_BITS), len(context)
    key, found = KEY_SEED, -1
    for i in range(min(total, MAX_CONTEXT)):
        key = ((key ^ int(context[total - 1 - i])) * HASH) & 0x7FFFFFFF
        for way in range(RECIPE_WAYS):
            if recipes.keys[key >> shift, way] == key:
                found = int(recipes.rows[key >> shift, way])
    return found


@njit
def likelier(recipes: RecipeArrays, recipe: int, expected: int) -> int:
    """The recipe if more of it is expected to be accepted than `expected`, else -1."""
    return recipe if recipe >= 0 and recipes.expected_accepted[recipe] > expected else -1


@njit
def copy_recipe(recipes: RecipeArrays, recipe: int, draft: IntArray) -> int:
    """Write a recipe's tokens, as many as are likely enough; how many these are. draft: [K]."""
    length = int(recipes.max_draft_len[recipe])
    for k in range(length):
        draft[k] = recipes.token_ids[recipe, k]
    return length

"""Looking a recipe up as a loop: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..index.reference import shift_of
from ..jit import njit
from ..layout import HASH
from . import (
    ALL_PACKS,
    KEY_BITS,
    KEY_SEED,
    MAX_CONTEXT,
    RECIPE_ROW,
    RECIPE_WAYS,
    SHAPE_HASH,
    SHAPE_START,
    SHAPE_WINDOW,
)
from .table import RecipeArrays

IntArray = npt.NDArray[np.signedinteger[Any]]


@njit
def _find_literal(recipes: RecipeArrays, tokens: IntArray, packs: int) -> tuple[int, int]:
    key, row, bit = KEY_SEED, -1, ALL_PACKS
    for i in range(min(len(tokens), MAX_CONTEXT)):
        key = ((key ^ int(tokens[len(tokens) - 1 - i])) * HASH) & 0x7FFFFFFF
        row, bit = _look_up(recipes, key, packs, row, bit)
    return row, bit


@njit
def _find_shape(recipes: RecipeArrays, tokens: IntArray, output_start: int, packs: int) -> tuple[int, int]:
    key, row, bit, was_free = 0, -1, ALL_PACKS, False
    total, vocab_size = len(tokens), len(recipes.shape_of)
    num_output = max(total - output_start, 0)
    for i in range(min(num_output + 1, SHAPE_WINDOW) if vocab_size else 0):
        item = SHAPE_START
        if i < num_output:
            item = int(recipes.shape_of[min(max(int(tokens[total - 1 - i]), 0), vocab_size - 1)])
        is_free = item < 0 and i < num_output
        if not (is_free and was_free):
            key = ((key + item + KEY_SEED) * SHAPE_HASH) & 0xFFFFFFFF
            row, bit = _look_up(recipes, key >> 1, packs, row, bit)
        was_free = is_free
    return row, bit


@njit
def find_recipe(recipes: RecipeArrays, tokens: IntArray, output_start: int, packs: int) -> int:
    """The recipe of the first of these packs that has one, with its longest literal context, else shape; or -1.

    tokens: all so far; packs: bit i is pack i.
    """
    row, bit = _find_literal(recipes, tokens, packs)
    shape_row, shape_bit = _find_shape(recipes, tokens, output_start, packs)
    return row if bit <= shape_bit else shape_row


@njit
def _look_up(recipes: RecipeArrays, key: int, packs: int, row: int, bit: int) -> tuple[int, int]:
    """The recipe with this key, and its pack as a bit, unless that found before is of an earlier pack."""
    bucket = key >> shift_of(len(recipes.keys), KEY_BITS)
    for way in range(RECIPE_WAYS - 1, -1, -1):
        held = int(recipes.keys[bucket, way])
        own = held & packs
        if held >> 32 == key and own and own & -own <= bit:
            row, bit = int(recipes.ways[bucket, way, RECIPE_ROW]), own & -own
    return row, bit

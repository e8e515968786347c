"""Looking a recipe up as a loop: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from ..jit import njit, to_int
from ..layout import HASH, TEXT_RECIPE, Choice, Request
from . import (
    ALL_PACKS,
    KEY_SEED,
    MAX_CONTEXT,
    RECIPE_EXPECTED,
    RECIPE_LEN,
    RECIPE_ROW,
    RECIPE_WAYS,
    SHAPE_HASH,
    SHAPE_START,
    SHAPE_WINDOW,
)
from .table import RecipeArrays


@njit
def _find_literal(recipes: RecipeArrays, request: Request) -> tuple[int, int]:
    """``(way, pack)`` of the longest of the last tokens; way -1 if no pack has one."""
    tokens, key, way, pack = request.tokens, KEY_SEED, -1, ALL_PACKS
    for i in range(min(request.total, MAX_CONTEXT)):
        key = ((key ^ int(tokens[request.total - 1 - i])) * HASH) & 0x7FFFFFFF
        way, pack = _look_up(recipes, key, request.packs, way, pack)
    return way, pack


@njit
def _find_shape(recipes: RecipeArrays, request: Request) -> tuple[int, int]:
    """``(way, pack)`` of the longest shape; way -1 if no pack has one."""
    key, way, pack, was_free = 0, -1, ALL_PACKS, False
    total, num_shapes = request.total, recipes.num_shapes
    num_output = max(total - request.output_start, 0)
    for i in range(min(num_output + 1, SHAPE_WINDOW) if num_shapes else 0):
        item = SHAPE_START
        if i < num_output:
            item = int(recipes.shape_of[min(max(int(request.tokens[total - 1 - i]), 0), num_shapes - 1)])
        is_free = item < 0 and i < num_output
        if not (is_free and was_free):
            key = ((key + item + KEY_SEED) * SHAPE_HASH) & 0xFFFFFFFF
            way, pack = _look_up(recipes, key >> 1, request.packs, way, pack)
        was_free = is_free
    return way, pack


@njit
def _look_up(recipes: RecipeArrays, key: int, packs: int, way: int, pack: int) -> tuple[int, int]:
    """The way with this key, and its pack as a bit, unless that found before is of an earlier pack."""
    bucket = key >> recipes.shift
    for i in range(RECIPE_WAYS - 1, -1, -1):
        held = int(recipes.keys[bucket, i])
        own = held & packs
        if held >> 32 == key and own and own & -own <= pack:
            way, pack = bucket * RECIPE_WAYS + i, own & -own
    return way, pack


@njit
def find_recipe(recipes: RecipeArrays, request: Request) -> Choice:
    """The recipe of the first of the request's packs that has one, with its longest literal context, else shape.

    Its num is 0 without one.
    """
    way, pack = _find_literal(recipes, request)
    shape_way, shape_pack = _find_shape(recipes, request)
    if shape_pack < pack:
        way = shape_way
    if way < 0:
        return Choice(-1, TEXT_RECIPE, 0, 0, 0, 0, 0)
    found = recipes.ways[way // RECIPE_WAYS, way % RECIPE_WAYS]
    row = to_int(found[RECIPE_ROW])
    return Choice(-1, TEXT_RECIPE, row, 0, row, to_int(found[RECIPE_LEN]), to_int(found[RECIPE_EXPECTED]))

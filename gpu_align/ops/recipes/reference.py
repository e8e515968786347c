"""Looking a recipe up as a loop: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from ..choose import Choice
from ..host import layout, njit, recipes, to_int
from ..layout import Request
from .table import RecipeTable


@njit
def _find_literal(table: RecipeTable, request: Request) -> tuple[int, int]:
    """``(way, pack)`` of the longest of the last tokens; way -1 if no pack has one."""
    tokens, key, way, pack = request.tokens, recipes.KEY_SEED, -1, recipes.ALL_PACKS
    for i in range(min(request.total, recipes.MAX_CONTEXT)):
        key = ((key ^ int(tokens[request.total - 1 - i])) * layout.HASH) & 0x7FFFFFFF
        way, pack = _look_up(table, key, request.packs, way, pack)
    return way, pack


@njit
def _find_shape(table: RecipeTable, request: Request) -> tuple[int, int]:
    """``(way, pack)`` of the longest shape; way -1 if no pack has one."""
    key, way, pack, was_free = 0, -1, recipes.ALL_PACKS, False
    total, num_shapes = request.total, table.num_shapes
    num_output = max(total - request.output_start, 0)
    for i in range(min(num_output + 1, recipes.SHAPE_WINDOW) if num_shapes else 0):
        item = recipes.SHAPE_START
        if i < num_output:
            item = int(table.shape_of[min(max(int(request.tokens[total - 1 - i]), 0), num_shapes - 1)])
        is_free = item < 0 and i < num_output
        if not (is_free and was_free):
            key = ((key + item + recipes.KEY_SEED) * recipes.SHAPE_HASH) & 0xFFFFFFFF
            way, pack = _look_up(table, key >> 1, request.packs, way, pack)
        was_free = is_free
    return way, pack


@njit
def _look_up(table: RecipeTable, key: int, packs: int, way: int, pack: int) -> tuple[int, int]:
    """The way with this key, and its pack as a bit, unless that found before is of an earlier pack."""
    bucket = key >> table.shift
    for i in range(recipes.RECIPE_WAYS - 1, -1, -1):
        held = int(table.keys[bucket, i])
        own = held & packs
        if held >> 32 == key and own and own & -own <= pack:
            way, pack = bucket * recipes.RECIPE_WAYS + i, own & -own
    return way, pack


@njit
def find_recipe(table: RecipeTable, request: Request) -> Choice:
    """The recipe of the first of the request's packs that has one, with its longest literal context, else shape.

    Its num is 0 without one.
    """
    way, pack = _find_literal(table, request)
    shape_way, shape_pack = _find_shape(table, request)
    if shape_pack < pack:
        way = shape_way
    if way < 0:
        return Choice(-1, layout.TEXT_RECIPE, 0, 0, 0, 0, 0)
    found = table.ways[way // recipes.RECIPE_WAYS, way % recipes.RECIPE_WAYS]
    row = to_int(found[0])
    return Choice(-1, layout.TEXT_RECIPE, row, 0, row, to_int(found[1]), to_int(found[2]))

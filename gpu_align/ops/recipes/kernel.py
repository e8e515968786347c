"""Device functions that look a recipe up."""

import triton
import triton.language as tl

from ..choose import Choice
from ..device import layout, recipes
from ..index.kernel import load_each


@triton.jit
def _pack_of(b_held, b_key, packs):
    """The first of the packs for which a way holds the key, as a bit; `ALL_PACKS` is none."""
    b_packs = b_held.to(tl.int32) & packs
    m_found = ((b_held >> 32).to(tl.int32) == b_key) & (b_packs != 0)
    return tl.where(m_found, b_packs & -b_packs, recipes.ALL_PACKS)


@triton.jit
def _find_literal(table, request):
    """``(way, pack)``; way -1 if no pack has one. A lane a way of each of the last 1 to MAX_CONTEXT tokens."""
    o_lane = tl.arange(0, recipes.MAX_CONTEXT * recipes.RECIPE_WAYS)
    o_last = o_lane // recipes.RECIPE_WAYS
    b_key = tl.zeros([recipes.MAX_CONTEXT * recipes.RECIPE_WAYS], tl.int32)
    key = tl.full([], recipes.KEY_SEED, tl.int64)
    for i in tl.static_range(recipes.MAX_CONTEXT):
        token = tl.load(request.tokens + request.total - 1 - i, mask=request.total > i, other=0)
        key = ((key ^ token.to(tl.int64)) * layout.HASH) & 0x7FFFFFFF
        b_key = tl.where(o_last == i, key.to(tl.int32), b_key)
    # In each bucket the last way comes first: of what is found, the largest lane is the longest context, and in it
    # the way of the first pack.
    o_way = (b_key >> table.shift) * recipes.RECIPE_WAYS + (
        recipes.RECIPE_WAYS - 1 - o_lane % recipes.RECIPE_WAYS
    )
    b_pack = _pack_of(tl.load(table.keys + o_way), b_key, request.packs)
    b_pack = tl.where(o_last < request.total, b_pack, recipes.ALL_PACKS)
    pack = tl.min(b_pack, axis=0)
    m_found = (b_pack == pack) & (b_pack != recipes.ALL_PACKS)
    longest = tl.max(tl.where(m_found, o_lane, -1), axis=0)
    return tl.max(tl.where(m_found & (o_lane == longest), o_way, -1), axis=0), pack


@triton.jit
def _shape_items(table, p_token, o_last, num_output):
    """The item of a shape that each token is, the one `o_last` before the last; at the beginning `SHAPE_START`."""
    m_token = (o_last >= 0) & (o_last < num_output)
    b_token = tl.load(p_token, mask=m_token, other=0)
    b_token = tl.minimum(tl.maximum(b_token, 0), table.num_shapes - 1)
    return tl.load(table.shape_of + b_token, mask=m_token, other=recipes.SHAPE_START)


# Keys of shapes are meant to wrap: additions and products have no overflow checks, or a debug build would trap.


@triton.jit
def _then(factor, key, next_factor, next_key):
    """One linear map of a key, then the next."""
    product = tl.mul(key, next_factor, sanitize_overflow=False)
    next_key = tl.add(product, next_key, sanitize_overflow=False)
    return tl.mul(factor, next_factor, sanitize_overflow=False), next_key


@triton.jit
def _shape_keys(table, request):
    """The key of the shape from the last output token to each, [recipes.SHAPE_WINDOW] int32."""
    o_last = tl.arange(0, recipes.SHAPE_WINDOW)
    num_output = tl.maximum(request.total - request.output_start, 0)
    p_last = request.tokens + request.total - 1 - o_last
    b_item = _shape_items(table, p_last, o_last, num_output)
    b_later = _shape_items(table, p_last + 1, o_last - 1, num_output)
    m_same = (b_item < 0) & (o_last < num_output) & (b_later < 0) & (o_last > 0)
    m_same = m_same | (o_last > num_output)
    b_factor = tl.where(m_same, 1, recipes.SHAPE_HASH)
    b_key = tl.add(b_item, recipes.KEY_SEED, sanitize_overflow=False)
    b_key = tl.where(m_same, 0, tl.mul(b_key, recipes.SHAPE_HASH, sanitize_overflow=False))
    _, b_key = tl.associative_scan((b_factor, b_key), 0, _then)
    return (b_key >> 1) & 0x7FFFFFFF


@triton.jit
def _find_shape(table, request):
    """``(way, pack)``; way -1 if no pack has one."""
    b_key = _shape_keys(table, request)
    o_bucket = (b_key >> table.shift) * recipes.RECIPE_WAYS
    o_last = tl.arange(0, recipes.SHAPE_WINDOW)
    b_order = tl.full([recipes.SHAPE_WINDOW], -1, tl.int32)
    b_pack = tl.full([recipes.SHAPE_WINDOW], recipes.ALL_PACKS, tl.int32)
    for way in tl.static_range(recipes.RECIPE_WAYS - 1, -1, -1):
        b_own = _pack_of(tl.load(table.keys + o_bucket + way), b_key, request.packs)
        m_found = (b_own != recipes.ALL_PACKS) & (b_own <= b_pack)
        b_order = tl.where(m_found, o_last * recipes.RECIPE_WAYS + way, b_order)
        b_pack = tl.where(m_found, b_own, b_pack)
    pack = tl.min(b_pack, axis=0)
    longest = tl.max(tl.where(b_pack == pack, b_order, -1), axis=0)
    m_longest = (b_order == longest) & (b_order >= 0)
    return tl.max(tl.where(m_longest, o_bucket + b_order % recipes.RECIPE_WAYS, -1), axis=0), pack


@triton.jit
def find_recipe(table, request, HAS_SHAPES: tl.constexpr):
    way, pack = _find_literal(table, request)
    if HAS_SHAPES:
        shape_way, shape_pack = _find_shape(table, request)
        way = tl.where(shape_pack < pack, shape_way, way)
    row, num, expected = load_each(table.ways + tl.maximum(way, 0) * recipes.RECIPE_COLUMNS, 3)
    m_way = way >= 0
    row = tl.where(m_way, row, 0)
    return Choice(-1, layout.TEXT_RECIPE, row, 0, row, tl.where(m_way, num, 0), tl.where(m_way, expected, 0))

"""The indexes: device functions that read and extend them, and the kernels that build that of a prediction."""

import triton
import triton.language as tl

from ..device import layout

#: Positions of a context that are entered at once.
INSERT_LANES = tl.constexpr(128)


@triton.jit
def load_bucket(prediction, token):
    """``(begin, end)`` of each token in the prediction, one or [buckets, 1]."""
    m_index = token * 0 + prediction.length > 1  # without positions there may be no index
    p_bucket = prediction.index.offsets + layout.bucket_of(token, prediction.index.shift)
    return tl.load(p_bucket, mask=m_index, other=0), tl.load(p_bucket + 1, mask=m_index, other=0)


@triton.jit
def nearest(prediction, bucket, anchor, most: tl.constexpr):
    """``(begin, end)`` in the prediction's positions: up to `most` of a bucket, around the anchor.

    bucket, and what is returned: [1] or [buckets, 1] each.
    """
    begin, end = bucket
    if tl.max(end - begin) > most:
        # How many of the rising positions are below the anchor: a search in 33 parts of `part` positions. Those
        # whose last one is below the anchor are below it altogether.
        o_probe = tl.arange(0, 32)
        low, high = begin, end
        while tl.max(high - low) > 0:
            part = (high - low + 32) // 33
            o_last = low + (o_probe + 1) * part - 1
            m_last = (o_last >= low) & (o_last < high)
            b_position = tl.load(prediction.index.positions + tl.where(m_last, o_last, 0))
            b_below = (m_last & (b_position < anchor)).to(tl.int32)
            low += part * tl.sum(b_below, axis=len(b_below.shape) - 1, keep_dims=True)
            high = tl.minimum(low + part - 1, high)
        begin = tl.maximum(tl.minimum(low - most // 2, end - most), begin)
    return begin, tl.minimum(begin + most, end)


@triton.jit
def load_each(p_first, NUM: tl.constexpr, STEP: tl.constexpr = 1):
    """NUM tokens or columns from `p_first` on, or with STEP -1 backwards, a tuple: each one value, or [lanes].

    With lanes in a second dimension Triton before 3.9 spreads the tokens of one lane over the warp.
    """
    values = ()
    for i in tl.static_range(NUM):
        values = values + (tl.load(p_first + i * STEP),)  # type: ignore[assignment]
    return values


@triton.jit
def load_back_clamped(p_last, most, BACK: tl.constexpr):
    """BACK tokens from `p_last` on backwards, of which only `most` are before it: the first for those beyond."""
    tokens = ()
    for i in tl.static_range(BACK):
        tokens = tokens + (tl.load(p_last - tl.minimum(most, i)),)  # type: ignore[assignment]
    return tokens


@triton.jit
def insert_context(context, seen):
    is_fresh = (context.length > 0) & layout.starts_over(context.length, seen)
    i_position = tl.where(is_fresh, 1, tl.maximum(seen, 1))
    o_position = i_position + tl.arange(0, INSERT_LANES)
    # Loaded a turn ahead.
    b_next = tl.load(context.tokens + o_position - 1, mask=o_position < context.length, other=0)
    if is_fresh:
        # Two entries at a time: buckets have an even number of ways.
        p_pairs = context.index.ways.to(tl.pointer_type(tl.int64))
        num_pairs = layout.num_ways(context.index.shift) // 2
        o_pair = tl.arange(0, 512)
        for i_pair in range(0, num_pairs, 512):
            tl.store(
                p_pairs + i_pair + o_pair, tl.full([512], -1, tl.int64), mask=i_pair + o_pair < num_pairs
            )
        tl.debug_barrier()  # other threads insert in what these have cleared
    while i_position < context.length:
        b_token, m_position = b_next, o_position < context.length
        p_way = (
            context.index.ways
            + layout.bucket_of(b_token, context.index.shift) * layout.WAYS
            + o_position % layout.WAYS
        )
        # Two positions of a turn may have the same way: the later one stays, in whatever order they come. No
        # thread reads them before a barrier.
        tl.atomic_max(p_way, o_position, mask=m_position, sem="relaxed", scope="cta")
        i_position += INSERT_LANES
        o_position += INSERT_LANES
        b_next = tl.load(context.tokens + o_position - 1, mask=o_position < context.length, other=0)


@triton.jit(do_not_specialize=["prediction_tokens_ptr", "keys_ptr", "base", "num_keys", "shift"])
def index_keys_kernel(
    prediction_tokens_ptr,  # [A] int32
    keys_ptr,  # [num_keys] int16 or int32, written
    base,  # of the prediction
    num_keys,
    shift,  # of `bucket_of`
    BLOCK: tl.constexpr,
):
    """Grid (ceil(num_keys / BLOCK),). The bucket of every token but the last::

    keys[i] = bucket(prediction_tokens[base + i])     # 0 <= i < num_keys
    """
    o_key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_key = o_key < num_keys
    b_token = tl.load(prediction_tokens_ptr + base + o_key, mask=m_key, other=0)
    tl.store(keys_ptr + o_key, layout.bucket_of(b_token, shift).to(keys_ptr.dtype.element_ty), mask=m_key)


@triton.jit(
    do_not_specialize=[
        "keys_ptr", "order_ptr", "positions_ptr", "offsets_ptr", "base", "num_keys", "num_buckets", "step",
    ]
)  # fmt: skip
def index_kernel(
    keys_ptr,  # [num_keys] int16 or int32, rising
    order_ptr,  # [num_keys] int64
    positions_ptr,  # [A] int32, written
    offsets_ptr,  # [A] int32, written
    base,  # of the prediction
    num_keys,
    num_buckets,
    step,  # the largest power of two up to num_keys; 0 without keys
    BLOCK: tl.constexpr,
):
    """Grid (ceil(max(num_keys, num_buckets + 1) / BLOCK),). From the sorted keys::

        positions[base + i] = order[i] + 1                   # 0 <= i < num_keys
        offsets[base + b] = sum(key < b for key in keys)     # 0 <= b <= num_buckets

    The sum is found bit by bit: the keys below b are the first ones.
    """
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_key = o_i < num_keys
    b_order = tl.load(order_ptr + o_i, mask=m_key, other=0)
    tl.store(positions_ptr + base + o_i, b_order.to(tl.int32) + 1, mask=m_key)
    m_bucket = o_i <= num_buckets
    b_below = tl.zeros([BLOCK], tl.int32)
    while step > 0:
        b_more = b_below + step
        m_more = m_bucket & (b_more <= num_keys)
        b_key = tl.load(keys_ptr + b_more - 1, mask=m_more, other=0)
        b_below = tl.where(m_more & (b_key < o_i), b_more, b_below)
        step = step // 2
    tl.store(offsets_ptr + base + o_i, b_below, mask=m_bucket)

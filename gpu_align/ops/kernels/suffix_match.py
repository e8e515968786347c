"""Device functions that look up where a text ends like the output, and the kernel of the scan `suffix_match`.

In the interpreter a constexpr on the left of a tensor makes a constexpr, so constants stand on the right.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constexprs import *


class PredictionPointers(NamedTuple):
    """One request's prediction and its index."""

    p_tokens: Any  # [length] int32
    length: Any  # 0: there is none
    p_positions: Any  # [length - 1] int32: positions by bucket
    p_offsets: Any  # [buckets + 1] int32: where each bucket begins
    hash_shift: Any  # of `bucket_of`


class Bucket(NamedTuple):
    """The positions behind one token in a prediction: ``positions[begin:end]``."""

    begin: Any
    end: Any


class ContextPointers(NamedTuple):
    """One request's prompt and output, and its index."""

    p_tokens: Any  # [total] int32
    total: Any
    output_start: Any  # tokens of the prompt
    p_index: Any  # [buckets, WAYS] int32: latest positions, -1 for none
    index_size: Any  # buckets * WAYS
    hash_shift: Any  # of `bucket_of`
    is_used: Any  # whether drafts may come from it


@triton.jit
def bucket_of(token, shift):
    """Upper ``32 - shift`` bits of the token's product with `HASH` modulo 2**32, int32; 64 bits hold all of it."""
    return (((token.to(tl.int64) * HASH) & 0xFFFFFFFF) >> shift).to(tl.int32)


@triton.jit
def rank_of(position, anchor):
    return tl.where(position >= anchor, 2 * (position - anchor), 2 * (anchor - position) + 1)


@triton.jit
def position_of(rank, anchor):
    return anchor + tl.where(rank % 2 == 0, rank // 2, -(rank // 2))


@triton.jit
def count_before(p_positions, size, anchor):
    """``sum(position < anchor for position in p_positions[:size])`` of rising positions: a search in 33 parts.

    p_positions, size, and what is returned: [1] or [buckets, 1].
    """
    o_probe = tl.arange(0, 32)
    low = size * 0
    high = size
    while tl.max(high - low) > 0:
        # Parts of `part` positions; those whose last one is below the anchor are below it altogether.
        part = (high - low + 32) // 33
        o_last = low + (o_probe + 1) * part - 1
        m_last = (o_last >= low) & (o_last < high)
        b_position = tl.load(p_positions + tl.where(m_last, o_last, 0))
        b_below = (m_last & (b_position < anchor)).to(tl.int32)
        low += part * tl.sum(b_below, axis=len(b_below.shape) - 1, keep_dims=True)
        high = tl.minimum(low + part - 1, high)
    return low


@triton.jit
def load_bucket(prediction, token, m_token):
    """The `Bucket` of each token in the prediction, one or [buckets, 1]; an empty one where there is no token."""
    # Without positions there may be no index.
    m_index = tl.where(m_token, prediction.length, 0) > 1
    p_bucket = prediction.p_offsets + bucket_of(token, prediction.hash_shift)
    return Bucket(tl.load(p_bucket, mask=m_index, other=0), tl.load(p_bucket + 1, mask=m_index, other=0))


@triton.jit
def nearest(prediction, bucket, anchor):
    begin = bucket.begin
    size = bucket.end - begin
    if tl.max(size) > NEAREST:
        before = count_before(prediction.p_positions + begin, size, anchor)
        begin += tl.minimum(tl.maximum(before - NEAREST // 2, 0), tl.maximum(size - NEAREST, 0))
    return begin, tl.minimum(begin + NEAREST, bucket.end)


@triton.jit
def load_back(p_last, BACK: tl.constexpr):
    """BACK tokens from `p_last` on backwards, a tuple: each one value, or [lanes].

    With lanes in a second dimension Triton before 3.9 spreads the tokens of one lane over the warp.
    """
    tokens = ()
    for i in tl.static_range(BACK):
        tokens = tokens + (tl.load(p_last - i),)  # type: ignore[assignment]
    return tokens


@triton.jit
def load_back_clamped(p_last, most, BACK: tl.constexpr):
    """`load_back` where only `most` tokens are before `p_last`: the first in place of those beyond."""
    tokens = ()
    for i in tl.static_range(BACK):
        tokens = tokens + (tl.load(p_last - tl.minimum(most, i)),)  # type: ignore[assignment]
    return tokens


@triton.jit
def common_run(last, texts, BACK: tl.constexpr):
    """How many of the first of BACK tokens agree, [lanes] int32."""
    b_run = tl.full(texts[0].shape, BACK, tl.int32)
    for i in tl.static_range(BACK - 1, -1, -1):  # the nearest that differs decides
        b_run = tl.where(texts[i] == last[i], b_run, i)
    return b_run


@triton.jit
def match_length(
    b_text_ptr, b_position, b_most, p_last, num_last, last, FIRST: tl.constexpr, BACK: tl.constexpr
):
    """[lanes] int32. b_text_ptr: [lanes] or one, beginnings of texts that have a token. b_most: [lanes], at most
    the position and `num_last`, the tokens before `p_last`. last: the first FIRST of these, `load_back_clamped`,
    or more. These are compared at once: most matches end among them; then BACK tokens at once.

    No load has a mask: a compiler gives each of many masks a predicate, has few of them, and loads in turns.
    """
    # The tokens that are compared, from the last on; without any, the first token of the text.
    p_first = b_text_ptr + tl.where(b_most > 0, b_position - 1, 0)
    b_length = tl.zeros_like(b_most)
    if FIRST > 0:
        nearest_texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), FIRST)
        b_length = tl.minimum(common_run(last, nearest_texts, FIRST), b_most)
        b_most = tl.where(b_length < FIRST, 0, b_most - FIRST)
        p_first -= FIRST
        p_last -= FIRST
        num_last -= FIRST
    while tl.max(b_most, axis=0) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        p_first = tl.where(b_most > 0, p_first, p_last - 1)
        next_last = load_back_clamped(p_last - 1, num_last - 1, BACK)
        texts = load_back_clamped(p_first, tl.maximum(b_most - 1, 0), BACK)
        b_run = tl.minimum(common_run(next_last, texts, BACK), b_most)
        b_length += b_run
        b_most = tl.where(b_run < BACK, 0, b_most - BACK)
        p_first -= BACK
        p_last -= BACK
        num_last -= BACK
    return b_length


@triton.jit
def load_ways(context):
    """Latest positions behind the last token in the context, [LOOKUP_LANES] int32: from lane `NEAREST` on."""
    o_way = tl.arange(0, LOOKUP_LANES) - NEAREST
    token = tl.load(context.p_tokens + context.total - 1, mask=context.total > 0, other=0)
    m_way = (o_way >= 0) & (o_way < tl.where(context.is_used, WAYS, 0))
    b_way = tl.load(
        context.p_index + bucket_of(token, context.hash_shift) * WAYS + o_way, mask=m_way, other=0
    )
    return tl.where(b_way < context.total, b_way, 0)


@triton.jit
def find_matches(prediction, context, bucket, cursor, num_common, min_match, min_context_match, last, o_way):
    """Keys of all matches, [LOOKUP_LANES] int32, -1 for none: lanes below `NEAREST` are in the prediction."""
    o_c = tl.arange(0, LOOKUP_LANES)
    num_output = context.total - context.output_start
    m_context = (o_c >= NEAREST) & (o_c < tl.where(context.is_used, NEAREST + WAYS, 0))
    o_one = tl.arange(0, 1)
    begin, end = nearest(prediction, Bucket(bucket.begin + o_one, bucket.end + o_one), cursor)
    m_prediction = o_c < tl.minimum(end - begin, NEAREST)
    o_position = tl.load(prediction.p_positions + begin + o_c, mask=m_prediction, other=0)
    o_position = tl.where(m_context, o_way, o_position)
    num_last = tl.where(m_context, context.total, num_output)
    b_most = tl.maximum(tl.minimum(tl.minimum(o_position, num_last), MAX_MATCH), 0)
    b_known = tl.where(m_prediction & (o_position == cursor) & (num_common >= b_most), b_most, 0)
    p_text = tl.where(m_context, context.p_tokens, prediction.p_tokens)
    p_last = context.p_tokens + context.total
    b_matched = b_known + match_length(
        p_text, o_position, b_most - b_known, p_last, context.total, last, 3, 8
    )
    b_rank = rank_of(o_position, cursor)
    b_key = (b_matched - 1) * TIE + tl.where(m_context, o_position, -b_rank + (TIE - 1))
    b_least = tl.where(m_context, min_context_match, min_match)
    return tl.where(b_matched >= b_least, b_key, -1)


@triton.jit
def best_matches(b_key, cursor):
    """``(position, matched)`` of the `NUM_MATCHES` largest keys of each text, [LANES] int32; -1, 0 for none."""
    o_lookup = tl.arange(0, LOOKUP_LANES)
    o_c = tl.arange(0, LANES)
    b_prediction = tl.where(o_lookup < NEAREST, b_key, -1)
    b_context = tl.where(o_lookup < NEAREST, -1, b_key)
    b_best = tl.full([LANES], -1, tl.int32)
    for i in tl.static_range(NUM_MATCHES):
        top = tl.max(b_prediction, axis=0)
        top_context = tl.max(b_context, axis=0)
        b_best = tl.where(o_c == i, top, tl.where(o_c == FIRST_CONTEXT + i, top_context, b_best))
        b_prediction = tl.where(b_prediction == top, -1, b_prediction)
        b_context = tl.where(b_context == top_context, -1, b_context)
    b_tie = b_best % TIE
    o_position = tl.where(o_c < FIRST_CONTEXT, position_of(-b_tie + (TIE - 1), cursor), b_tie)
    return tl.where(b_best >= 0, o_position, -1), tl.where(b_best >= 0, b_best // TIE + 1, 0)


@triton.jit
def clear_context(context):
    # Two entries at a time: buckets have an even number of ways.
    p_pairs = context.p_index.to(tl.pointer_type(tl.int64))
    num_pairs = context.index_size // 2
    o_i = tl.arange(0, 512)
    for i_block in range(0, num_pairs, 512):
        tl.store(p_pairs + i_block + o_i, tl.full([512], -1, tl.int64), mask=i_block + o_i < num_pairs)


@triton.jit
def insert_block(context, o_position, b_token, m_position):
    """The positions behind some tokens."""
    # Two positions of a block may have the same way: the later one stays, in whatever order they come. No thread
    # reads them before the barrier.
    tl.atomic_max(
        context.p_index + (bucket_of(b_token, context.hash_shift) * WAYS + o_position % WAYS),
        o_position,
        mask=m_position,
        sem="relaxed",
        scope="cta",
    )


@triton.jit
def insert_blocks(context, seen):
    """Insert whole blocks, of which a prompt has many; returns the position from which `insert_rest` goes on."""
    i_position = tl.maximum(seen, 1)
    if i_position + 512 <= context.total:
        o_i = tl.arange(0, 512)
        b_token = tl.load(context.p_tokens + i_position - 1 + o_i)
        while i_position + 512 <= context.total:
            # A turn ahead, as atomics wait for their tokens; of the last whole block once more.
            i_next = tl.minimum(i_position + 512, context.total - 512)
            b_next = tl.load(context.p_tokens + i_next - 1 + o_i)
            insert_block(context, i_position + o_i, b_token, o_i >= 0)
            i_position += 512
            b_token = b_next
    return i_position


@triton.jit
def insert_rest(context, i_position):
    while i_position < context.total:
        o_position = i_position + tl.arange(0, 64)
        m_position = o_position < context.total
        b_token = tl.load(context.p_tokens + o_position - 1, mask=m_position, other=0)
        insert_block(context, o_position, b_token, m_position)
        i_position += 64


@triton.jit
def scan(
    p_text, text_len, p_context, num_context, anchor,
    MAX_LENGTH: tl.constexpr, HAS_ANCHOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``(end, length)`` of the best match over all positions of one text; length 0 where there is none.

    The order of two matches is one int64 key: length in the upper half, tie order in the lower. With an anchor
    that falls with the rank; without, it is the position itself. Keys are unique and tell their position. Each
    lane keeps its largest key. p_context points behind the context.
    """
    o_block = tl.arange(0, BLOCK_N)
    b_best = tl.full([BLOCK_N], -1, tl.int64)
    for i_block in range(0, text_len, BLOCK_N):
        o_position = i_block + o_block
        b_most = tl.minimum(o_position, tl.minimum(num_context, MAX_LENGTH))
        b_most = tl.where(o_position < text_len, b_most, 0)
        b_length = match_length(p_text, o_position, b_most, p_context, num_context, (), 0, 1)
        b_tie = o_position
        if HAS_ANCHOR:
            b_tie = -rank_of(o_position, anchor) + NOWHERE
        b_key = tl.where(b_length > 0, (b_length.to(tl.int64) << 32) | b_tie.to(tl.int64), -1)
        b_best = tl.maximum(b_best, b_key)
    key = tl.max(b_best, axis=0)
    end = (key & NOWHERE).to(tl.int32)
    if HAS_ANCHOR:
        end = position_of(-end + NOWHERE, anchor)
    return end, tl.where(key >= 0, (key >> 32).to(tl.int32), 0)


@triton.jit(do_not_specialize=["min_match"])
def suffix_match_kernel(
    context_ptr,  # [S, T] int32
    stride_context_b,
    context_start_ptr,  # [S] int32
    context_len_ptr,  # [S] int32
    text_ptr,  # [S, N] int32
    stride_text_b,
    text_len_ptr,  # [S] int32
    anchor_ptr,  # [B] int32
    slots_ptr,  # [B] int64
    active_ptr,  # [B] int32
    end_ptr,  # [B] int32
    length_ptr,  # [B] int32
    min_match,
    MAX_LENGTH: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (B,). See `gpu_align.ops.suffix_match.suffix_match` for the loop that this computes."""
    i_b = tl.program_id(0)
    end = tl.zeros([], tl.int32)
    length = tl.zeros([], tl.int32)
    if tl.load(active_ptr + i_b) > 0:
        i_slot = tl.load(slots_ptr + i_b)
        anchor = 0
        if HAS_ANCHOR:
            anchor = tl.load(anchor_ptr + i_b)
        context_end = tl.load(context_len_ptr + i_slot)
        end, length = scan(
            text_ptr + i_slot * stride_text_b, tl.load(text_len_ptr + i_slot),
            context_ptr + i_slot * stride_context_b + context_end,
            context_end - tl.load(context_start_ptr + i_slot),
            anchor, MAX_LENGTH, HAS_ANCHOR, BLOCK_N,
        )  # fmt: skip
    found = length >= min_match
    tl.store(end_ptr + i_b, tl.where(found, end, -1))
    tl.store(length_ptr + i_b, tl.where(found, length, 0))


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
    tl.store(keys_ptr + o_key, bucket_of(b_token, shift).to(keys_ptr.dtype.element_ty), mask=m_key)


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

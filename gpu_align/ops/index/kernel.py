"""The indexes: device functions that read and extend them, and the kernels that build them for what arrives."""

import triton
import triton.language as tl

from ..device import layout
from ..layout import ContextIndex

#: Positions of a context that are entered at once.
INSERT_LANES = tl.constexpr(128)
#: Low bits of a sorting key: the token's place in its block.
KEY_BITS = tl.constexpr(10)
#: Tokens of a program, and entries of a context's index that one clears at once.
BLOCK = tl.constexpr(1 << 10)


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
def load_each(p_first, NUM: tl.constexpr):
    """NUM tokens or columns from `p_first` on, a tuple: each one value, or [lanes].

    With lanes in a second dimension Triton before 3.9 spreads the tokens of one lane over the warp.
    """
    values = ()
    for i in tl.static_range(NUM):
        values = values + (tl.load(p_first + i),)  # type: ignore[assignment]
    return values


@triton.jit
def load_back_clamped(p_last, most, BACK: tl.constexpr):
    """BACK tokens from `p_last` on backwards, of which only `most` are before it: the first for those beyond."""
    tokens = ()
    for i in tl.static_range(BACK):
        tokens = tokens + (tl.load(p_last - tl.minimum(most, i)),)  # type: ignore[assignment]
    return tokens


@triton.jit
def insert_context(context, indexed):
    is_fresh = (indexed < 0) | (context.length < indexed)
    i_position = tl.where(is_fresh, 1, tl.maximum(indexed, 1))
    o_position = i_position + tl.arange(0, INSERT_LANES)
    # Loaded a turn ahead.
    b_next = tl.load(context.tokens + o_position - 1, mask=o_position < context.length, other=0)
    if is_fresh:
        clear_index(context.index, 0, 1)
        tl.debug_barrier()  # other threads insert in what these have cleared
    while i_position < context.length:
        b_token, m_position = b_next, o_position < context.length
        _enter(context.index, b_token, o_position, m_position, "cta")
        i_position += INSERT_LANES
        o_position += INSERT_LANES
        b_next = tl.load(context.tokens + o_position - 1, mask=o_position < context.length, other=0)


@triton.jit
def clear_index(index, i_part, num_parts):
    # Two entries at a time: buckets have an even number of ways.
    p_pairs = index.ways.to(tl.pointer_type(tl.int64))
    num_pairs = layout.num_ways(index.shift) // 2
    o_pair = tl.arange(0, 512)
    i_pair = num_pairs * 0 + i_part * 512
    while i_pair < num_pairs:
        tl.store(p_pairs + i_pair + o_pair, tl.full([512], -1, tl.int64), mask=i_pair + o_pair < num_pairs)
        i_pair += num_parts * 512


@triton.jit
def _enter(index, b_token, o_position, m_position, SCOPE: tl.constexpr):
    p_way = index.ways + layout.bucket_of(b_token, index.shift) * layout.WAYS + o_position % layout.WAYS
    # Two positions at once may have the same way: the later one stays, in whatever order they come. No thread
    # reads them before a barrier.
    tl.atomic_max(p_way, o_position, mask=m_position, sem="relaxed", scope=SCOPE)


# Admission: what `add` and `remove` staged, see `admit`.


@triton.jit(
    do_not_specialize=[
        "staged_ptr", "num_rows", "context_shift", "token_ids_ptr", "stride_token_ids_s", "total_len_ptr",
    ]
)  # fmt: skip
def admit_kernel(
    state,  # `StepState`
    staged_ptr,  # [N] int32, on the host or the device
    num_rows,
    context_shift,
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    total_len_ptr,  # [S] int32
):
    """Grid (rows + texts, blocks). A program writes a row, or a block of a text and its index.

    `reference.admit_reference` has the loop. A text of one block is indexed whole. Of a longer one each block's
    keys are left in order in ``offsets``, for `merge_kernel` and `offsets_kernel`.
    """
    i_item, i_block = tl.program_id(0), tl.program_id(1)
    if i_item < num_rows:
        p_row = staged_ptr + i_item * layout.STAGED_ROW
        _admit_row(state, p_row, context_shift, i_block, tl.num_programs(1))
        slot = tl.load(p_row).to(tl.int64)
        start, num = load_each(p_row + 2 + layout.SLOT_META, 2)
        p_tokens = token_ids_ptr + slot * stride_token_ids_s
        _copy(p_tokens, staged_ptr + start, i_block * BLOCK, num, tl.num_programs(1) * BLOCK, BLOCK)
        if (i_block == 0) & (num >= 0):
            tl.store(total_len_ptr + slot, num)
    else:
        p_text = staged_ptr + num_rows * layout.STAGED_ROW + (i_item - num_rows) * layout.STAGED_TEXT
        base, num_tokens, shift, start = load_each(p_text, layout.STAGED_TEXT)
        if i_block * BLOCK < num_tokens:
            _admit_block(state, staged_ptr + start, base, num_tokens, shift, i_block)


@triton.jit
def _copy(p_to, p_from, i_first, num, step, LANES: tl.constexpr):
    """Each `step`-th block of LANES tokens, from `i_first` on."""
    o_i = tl.arange(0, LANES)
    while i_first < num:
        m_i = i_first + o_i < num
        tl.store(
            p_to + i_first + o_i, tl.load(p_from + i_first + o_i, mask=m_i, other=0).to(tl.int32), mask=m_i
        )
        i_first += step


@triton.jit(
    do_not_specialize=[
        "token_ids_ptr", "stride_token_ids_s", "max_context_len", "total_len_ptr", "slots_ptr", "num_new_ptr",
        "new_tokens_ptr", "stride_new_tokens_b", "num_columns",
    ]
)  # fmt: skip
def append_kernel(
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    max_context_len,  # T
    total_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    num_new_ptr,  # [B] int32
    new_tokens_ptr,  # [B, N] int64
    stride_new_tokens_b,
    num_columns,  # N
):
    """Grid (B,). `reference.append_reference` has the loop."""
    i_b = tl.program_id(0)
    i_slot = tl.load(slots_ptr + i_b)
    num = tl.minimum(tl.load(num_new_ptr + i_b), num_columns)
    # Another program may write it, where this one has nothing to write.
    total = tl.load(total_len_ptr + i_slot, mask=num > 0, other=0)
    total = tl.minimum(tl.maximum(total, 0), max_context_len)
    num = tl.minimum(num, max_context_len - total)
    p_new = new_tokens_ptr + i_b.to(tl.int64) * stride_new_tokens_b
    p_row = token_ids_ptr + i_slot * stride_token_ids_s + total
    _copy(p_row, p_new, num * 0, num, INSERT_LANES, INSERT_LANES)
    tl.debug_barrier()  # every thread has read how many tokens there are
    if num > 0:
        tl.store(total_len_ptr + i_slot, total + num)


@triton.jit
def _admit_row(state, p_row, context_shift, i_part, num_parts):
    slot, is_new = load_each(p_row, 2)
    slot = slot.to(tl.int64)
    o_column = tl.arange(0, layout.SLOT_META)
    if i_part == 0:
        tl.store(state.slot_meta + slot * layout.SLOT_META + o_column, tl.load(p_row + 2 + o_column))
        p_align = state.align_state + slot * layout.ALIGN_STATE
        if is_new > 0:
            tl.store(p_align + layout.SEEN, -1)
            tl.store(p_align + layout.INDEXED, 0)
        else:
            # The context's index stays: of a new prediction alone nothing is known.
            seen = tl.load(p_align + layout.SEEN)
            tl.debug_barrier()  # every thread has read it
            tl.store(p_align + layout.SEEN, tl.minimum(seen, 0))
    if (is_new > 0) & (tl.load(p_row + 2 + layout.USES_CONTEXT) > 0):
        p_ways = state.context_index + slot * layout.num_ways(context_shift)
        clear_index(ContextIndex(p_ways, context_shift), i_part, num_parts)


@triton.jit
def _admit_block(state, p_tokens, base, num_tokens, shift, i_block):
    num_keys = num_tokens - 1
    o_i = tl.arange(0, BLOCK)
    o_token = i_block * BLOCK + o_i
    b_token = tl.load(p_tokens + o_token, mask=o_token < num_tokens, other=0)
    tl.store(state.prediction_tokens + base + o_token, b_token, mask=o_token < num_tokens)
    m_key = o_token < num_keys
    b_key = tl.where(m_key, (layout.bucket_of(b_token, shift) << KEY_BITS) | o_i, -1)
    # By each bit of the bucket, from the lowest: zeros before ones, in the order that they have. Lanes without a
    # key have ones and stay the last. Turns write to two places, and so wait for each other once.
    p_key = state.offsets + base + o_token
    p_other = state.positions + base + o_token
    i_bit = shift * 0 + KEY_BITS
    while i_bit < 32 - shift + KEY_BITS:
        b_one = (b_key >> i_bit) & 1
        b_zeros = tl.cumsum(1 - b_one, axis=0)
        o_to = tl.where(b_one > 0, o_i + tl.sum(1 - b_one, axis=0) - b_zeros, b_zeros - 1)
        tl.store(p_key - o_i + o_to, b_key, mask=m_key)
        tl.debug_barrier()
        b_key = tl.load(p_key, mask=m_key, other=-1)
        p_key, p_other = p_other, p_key
        i_bit += 1
    tl.debug_barrier()
    if num_tokens > BLOCK:
        tl.store(state.offsets + base + o_token, b_key, mask=m_key)
    else:
        tl.store(state.positions + base + o_i, (b_key & (BLOCK - 1)) + 1, mask=m_key)
        tl.debug_barrier()
        _store_offsets(state, base, num_keys, shift, o_i, num_keys * 0 + BLOCK)


@triton.jit
def _store_offsets(state, base, num_keys, shift, o_bucket, step):
    """How many positions are in buckets before each of these, bit by bit from `step`: they are the first ones."""
    m_bucket = o_bucket <= (o_bucket * 0 + 1) << (32 - shift)
    b_below = o_bucket * 0
    while step > 0:
        b_more = b_below + step
        m_more = m_bucket & (b_more <= num_keys)
        b_position = tl.load(state.positions + base + b_more - 1, mask=m_more, other=1)
        b_token = tl.load(state.prediction_tokens + base + b_position - 1, mask=m_more, other=0)
        b_below = tl.where(m_more & (layout.bucket_of(b_token, shift) < o_bucket), b_more, b_below)
        step = step // 2
    tl.store(state.offsets + base + o_bucket, b_below, mask=m_bucket)


@triton.jit(do_not_specialize=["staged_ptr", "num_rows"])
def merge_kernel(
    state,  # `StepState`
    staged_ptr,  # [N] int32, as of `admit_kernel`
    num_rows,
):
    """Grid (texts, blocks). The positions of texts of several blocks, whose keys are in ``offsets``, each block's
    in order: a key goes after all that are less, and after equal ones of blocks before its own."""
    p_text = staged_ptr + num_rows * layout.STAGED_ROW + tl.program_id(0) * layout.STAGED_TEXT
    base, num_tokens = load_each(p_text, 2)
    i_block, num_keys = tl.program_id(1), num_tokens - 1
    if (num_tokens > BLOCK) & (i_block * BLOCK < num_keys):
        o_i = tl.arange(0, BLOCK)
        o_key = i_block * BLOCK + o_i
        p_keys = state.offsets + base
        b_key = tl.load(p_keys + o_key, mask=o_key < num_keys, other=0)
        b_rank = o_i
        for i_other in range((num_keys + BLOCK - 1) // BLOCK):
            if i_other != i_block:
                b_limit = ((b_key >> KEY_BITS) + (i_other < i_block)) << KEY_BITS
                num_others = tl.minimum(num_keys - i_other * BLOCK, BLOCK)
                b_below = o_i * 0
                step = num_others * 0 + BLOCK
                while step > 0:
                    b_more = b_below + step
                    m_more = b_more <= num_others
                    b_other = tl.load(p_keys + i_other * BLOCK + b_more - 1, mask=m_more, other=0)
                    b_below = tl.where(m_more & (b_other < b_limit), b_more, b_below)
                    step = step // 2
                b_rank += b_below
        b_position = i_block * BLOCK + (b_key & (BLOCK - 1)) + 1
        tl.store(state.positions + base + b_rank, b_position, mask=o_key < num_keys)


@triton.jit(do_not_specialize=["staged_ptr", "num_rows"])
def offsets_kernel(
    state,  # `StepState`
    staged_ptr,  # [N] int32, as of `admit_kernel`
    num_rows,
):
    """Grid (texts, blocks). The offsets of texts of several blocks, from their positions."""
    p_text = staged_ptr + num_rows * layout.STAGED_ROW + tl.program_id(0) * layout.STAGED_TEXT
    base, num_tokens, shift = load_each(p_text, 3)
    o_bucket = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if num_tokens > BLOCK:
        _store_offsets(state, base, num_tokens - 1, shift, o_bucket, num_tokens * 0 + (1 << 20))


@triton.jit(
    do_not_specialize=[
        "context_shift", "started_ptr", "token_ids_ptr", "stride_token_ids_s", "max_context_len", "total_len_ptr",
        "slots_ptr", "num_sampled_ptr",
    ]
)  # fmt: skip
def contexts_kernel(
    state,  # `StepState`
    context_shift,
    started_ptr,  # [S] int32, on the host or the device, written
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    max_context_len,  # T
    total_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    num_sampled_ptr,  # [B] int32
):
    """Grid (B, blocks). Enter the contexts of new requests in their indexes, before the step that is their first::

    for b, slot in enumerate(slots):
        if num_sampled[b] > 0 and align_state[slot].seen == -1:      # its index is empty
            insert_context(token_ids[slot, :total_len[slot]], 0);  indexed = total_len[slot]
        started[slot] = 1
    """
    i_b, i_block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + i_b)
    p_align, p_meta = state.align_state + slot * layout.ALIGN_STATE, state.slot_meta + slot * layout.SLOT_META
    is_run = (tl.load(num_sampled_ptr + i_b) > 0) & (tl.load(p_meta + layout.OUTPUT_START) != layout.NOWHERE)
    if is_run & (i_block == 0):
        tl.store(started_ptr + slot, 1)
    if is_run & (tl.load(p_align + layout.SEEN) == -1):
        total = tl.minimum(tl.maximum(tl.load(total_len_ptr + slot), 0), max_context_len)
        total *= tl.load(p_meta + layout.USES_CONTEXT)
        index = ContextIndex(state.context_index + slot * layout.num_ways(context_shift), context_shift)
        o_position = i_block * BLOCK + tl.arange(0, BLOCK)
        m_position = (o_position > 0) & (o_position < total)
        p_tokens = token_ids_ptr + slot * stride_token_ids_s
        b_token = tl.load(p_tokens + o_position - 1, mask=m_position, other=0)
        _enter(index, b_token, o_position, m_position, "gpu")
        if i_block == 0:
            # The other programs do not read this column.
            tl.store(p_align + layout.INDEXED, total)

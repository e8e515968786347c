"""Triton kernel of `suffix_match`: one program scans the text of one request."""

import triton
import triton.language as tl


@triton.jit
def _match_lengths(
    text_row, o_end, m_end, context_row, context_end, num_context,
    MAX_MATCH: tl.constexpr,
):  # fmt: skip
    """Common suffix of the context and of ``text[:end]`` for a block of ends, [BLOCK_N] int32.

    ::

        while length < min(MAX_MATCH, end, num_context) and text[end - 1 - length] == context[-1 - length]:
            length += 1
    """
    length = tl.zeros_like(o_end)
    m_alive = m_end
    i_back = 0
    limit = tl.minimum(num_context, MAX_MATCH)
    running = (tl.max(m_alive.to(tl.int32), axis=0) > 0) & (limit > 0)
    while running:
        token = tl.load(context_row + (context_end - 1 - i_back))
        m_read = m_alive & (o_end > i_back)
        b_text = tl.load(text_row + (o_end - 1 - i_back), mask=m_read, other=-1)
        m_alive = m_read & (b_text == token)
        length += m_alive.to(tl.int32)
        i_back += 1
        running = (tl.max(m_alive.to(tl.int32), axis=0) > 0) & (i_back < limit)
    return length


@triton.jit
def _longest_suffixes(
    text_row, text_len, context_row, context_start, context_end, anchor,
    MAX_MATCH: tl.constexpr, HAS_ANCHOR: tl.constexpr, FROM_START: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys of the two best matches over all ends of one text; -1 where there is none.

    The order of two matches is one int64 key: length in the upper half, tie rank in the lower. With
    an anchor the rank falls with the distance, twice it, and one more behind the anchor; without, it is
    the end itself. Ranks of two ends of one text never meet, so keys are unique and tell their end.
    Each lane keeps its two largest keys.
    """
    num_context = context_end - context_start
    o_block = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_N], -1, tl.int64)
    second = tl.full([BLOCK_N], -1, tl.int64)
    for i_block in range(0, text_len, BLOCK_N):
        o_end = i_block + o_block
        m_end = (o_end >= 1) & (o_end < text_len)
        length = _match_lengths(text_row, o_end, m_end, context_row, context_end, num_context, MAX_MATCH)
        if FROM_START:
            m_whole = m_end & (length == num_context) & (o_end == num_context)
            length = tl.where(m_whole, MAX_MATCH, length)
        if HAS_ANCHOR:
            away = o_end - anchor
            rank = 0x7FFFFFFF - tl.where(away >= 0, 2 * away, -2 * away + 1)
        else:
            rank = o_end
        key = tl.where(length > 0, (length.to(tl.int64) << 32) | rank.to(tl.int64), -1)
        second = tl.maximum(second, tl.minimum(best, key))
        best = tl.maximum(best, key)
    first_key = tl.max(best, axis=0)
    second_key = tl.max(tl.where(best == first_key, second, best), axis=0)
    if FROM_START:
        # An empty context stands at the beginning of the text; there is no other match.
        at_start = (num_context == 0) & (text_len > 0)
        start_rank = 0
        if HAS_ANCHOR:
            start_rank = 0x7FFFFFFF - tl.where(anchor <= 0, -2 * anchor, 2 * anchor + 1)
        start_key = tl.zeros([], tl.int64) + MAX_MATCH * 0x100000000 + start_rank
        first_key = tl.where(at_start, start_key, first_key)
    return first_key, second_key


@triton.jit
def _store_match(key, anchor, min_match, p_end, p_length, HAS_ANCHOR: tl.constexpr):
    """Unpack one key; ``(-1, 0)`` for none, or one that is too short."""
    length = tl.where(key >= 0, (key >> 32).to(tl.int32), 0)
    rank = (key & 0x7FFFFFFF).to(tl.int32)
    end = rank
    if HAS_ANCHOR:
        distance = 0x7FFFFFFF - rank
        end = anchor + tl.where(distance % 2 == 0, distance // 2, -(distance // 2))
    found = length >= min_match
    tl.store(p_end, tl.where(found, end, -1))
    tl.store(p_length, tl.where(found, length, 0))


@triton.jit(do_not_specialize=["min_match"])
def _suffix_match_kernel(
    context_ptr, stride_context_b, context_start_ptr, context_len_ptr,
    text_ptr, stride_text_b, text_len_ptr,
    anchor_ptr, slots_ptr, active_ptr,
    end_ptr, length_ptr, second_end_ptr, second_length_ptr,
    min_match,
    MAX_MATCH: tl.constexpr, HAS_ANCHOR: tl.constexpr, FROM_START: tl.constexpr,
    HAS_SECOND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (B,). See `gpu_align.ops.suffix_match.suffix_match` for the loop that this computes."""
    i_b = tl.program_id(0)
    first_key = tl.full([], -1, tl.int64)
    second_key = tl.full([], -1, tl.int64)
    anchor = 0
    if tl.load(active_ptr + i_b) > 0:
        i_slot = tl.load(slots_ptr + i_b)
        if HAS_ANCHOR:
            anchor = tl.load(anchor_ptr + i_b)
        first_key, second_key = _longest_suffixes(
            text_ptr + i_slot * stride_text_b, tl.load(text_len_ptr + i_slot),
            context_ptr + i_slot * stride_context_b,
            tl.load(context_start_ptr + i_slot), tl.load(context_len_ptr + i_slot),
            anchor, MAX_MATCH, HAS_ANCHOR, FROM_START, BLOCK_N,
        )  # fmt: skip
    _store_match(first_key, anchor, min_match, end_ptr + i_b, length_ptr + i_b, HAS_ANCHOR)
    if HAS_SECOND:
        _store_match(second_key, anchor, min_match, second_end_ptr + i_b, second_length_ptr + i_b, HAS_ANCHOR)

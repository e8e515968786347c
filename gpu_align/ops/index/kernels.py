"""Device functions of a step that look tokens up: in a prediction's index and in the latest of the own context."""

import triton
import triton.language as tl

from ..layout import HASH, NEAREST, WAYS

_HASH = tl.constexpr(HASH)
_NEAREST = tl.constexpr(NEAREST)
_WAYS = tl.constexpr(WAYS)


@triton.jit
def _bucket(token, shift):
    """Upper ``32 - shift`` bits of the token's product with `HASH` modulo 2**32, int32; 64 bits hold all of it."""
    return (((token.to(tl.int64) * _HASH) & 0xFFFFFFFF) >> shift).to(tl.int32)


@triton.jit
def _count_before(p_ends, size, limit):
    """``sum(end < limit for end in p_ends[:size])`` of rising ends: a search in 33 parts."""
    o_probe = tl.arange(0, 32)
    low = 0
    high = size
    while low < high:
        # Parts of `part` ends; those whose last end is below the limit are below it altogether.
        part = (high - low + 32) // 33
        o_last = low + (o_probe + 1) * part - 1
        b_end = tl.load(p_ends + o_last, mask=o_last < high, other=0x7FFFFFFF)
        low += part * tl.sum((b_end < limit).to(tl.int32), axis=0)
        high = tl.minimum(low + part - 1, high)
    return low


@triton.jit
def _nearest_part(p_order, p_first, token, shift, num_text, anchor):
    """``(begin, end)`` in `order`: up to `NEAREST` ends of the token's bucket, around the anchor.

    ::

        ends   = order[first[bucket] : first[bucket + 1]]
        before = sum(e < anchor for e in ends)
        low    = min(max(before - NEAREST // 2, 0), max(len(ends) - NEAREST, 0))
        return ends[low : low + NEAREST]
    """
    begin = 0
    end = 0
    # Without two tokens there are no ends, and maybe no index.
    if num_text > 1:
        p_bucket = p_first + _bucket(token, shift)
        begin = tl.load(p_bucket)
        end = tl.load(p_bucket + 1)
        if end - begin > _NEAREST:
            before = _count_before(p_order + begin, end - begin, anchor)
            begin += tl.minimum(tl.maximum(before - _NEAREST // 2, 0), end - begin - _NEAREST)
            end = begin + _NEAREST
    return begin, end


@triton.jit
def _match_lengths(p_end, b_room, p_last, num_last, BACK: tl.constexpr):
    """Tokens that agree, walking back from each end and from `p_last` at once, [LANES] int32.

    ::

        while length < room and p_end[-1 - length] == p_last[-1 - length]:
            length += 1

    p_end: [LANES] pointers behind a token. b_room: [LANES], at most `num_last`, the tokens before `p_last`. BACK
    tokens are compared at once: most matches that end do so among the first.
    """
    o_back = tl.arange(0, BACK)[:, None]
    b_length = tl.zeros_like(b_room)
    i_back = 0
    while tl.max(b_room, axis=0) > i_back:
        o_k = i_back + o_back
        b_last = tl.load(p_last - 1 - o_k, mask=o_k < num_last, other=0)
        m_k = o_k < b_room[None, :]
        b_text = tl.load(p_end[None, :] - 1 - o_k, mask=m_k, other=0)
        b_run = tl.min(tl.where(m_k & (b_text == b_last), BACK, o_back), axis=0)
        b_length += b_run
        # A lane whose run ended has no room left: it adds nothing any more.
        b_room = tl.where(b_run < BACK, 0, b_room)
        i_back += BACK
    return b_length


@triton.jit
def _clear_recent(p_recent, size):
    """``recent[slot] = -1``."""
    o_i = tl.arange(0, 512)
    for i_block in range(0, size, 512):
        o_entry = i_block + o_i
        tl.store(p_recent + o_entry, tl.full([512], -1, tl.int32), mask=o_entry < size)


@triton.jit
def _insert_block(p_recent, shift, p_context, i_end, total, BLOCK: tl.constexpr):
    """The ends ``i_end <= e < min(i_end + BLOCK, total)``, see `_insert_recent`."""
    o_end = i_end + tl.arange(0, BLOCK)
    m_end = o_end < total
    b_token = tl.load(p_context + o_end - 1, mask=m_end, other=0)
    # Two ends of a block may want the same place: the later one stays, in whatever order they come. Nobody reads
    # them before the barrier.
    tl.atomic_max(
        p_recent + _bucket(b_token, shift) * _WAYS + o_end % _WAYS,
        o_end,
        mask=m_end,
        sem="relaxed",
        scope="cta",
    )


@triton.jit
def _insert_recent(p_recent, shift, p_context, seen, total):
    """::

    for e in range(max(seen, 1), total):
        entry = recent[bucket(context[e - 1])][e % WAYS]
        entry = max(entry, e)
    """
    i_end = tl.maximum(seen, 1)
    # A prompt goes in by large blocks, the tokens of a step by a small one.
    while i_end + 512 <= total:
        _insert_block(p_recent, shift, p_context, i_end, total, 512)
        i_end += 512
    while i_end < total:
        _insert_block(p_recent, shift, p_context, i_end, total, 64)
        i_end += 64

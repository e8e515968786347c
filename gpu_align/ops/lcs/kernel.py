"""The kernels of the exact LCS: a wavefront, a program a request and a lane a word of 64 tokens; see README.md.

Additions that are meant to wrap, and those of every turn, are `tl.add` without overflow checks (a debug build
would trap); inner loops call no other functions (under the interpreter calls are most of the cost).

A program takes BLOCK_B requests abreast, BLOCK_W lanes each: 1 on a GPU, a whole batch under the interpreter.
Lanes are one flat dimension: with two, Triton lays a row out for the gather, the same words in every warp.
"""

import triton
import triton.language as tl

from ..device import align, layout


@triton.jit
def _load_planes(p_planes, m_b, stride, PLANES: tl.constexpr):
    """The planes of every lane's half word, a tuple of [LANES] int32: one-dimensional loads, held in registers."""
    planes = ()
    for i in tl.static_range(PLANES):
        planes = planes + (tl.load(p_planes + i * stride, mask=m_b, other=0),)  # type: ignore[assignment]
    return planes


@triton.jit
def _load_clamped(ptr, o_b, m_b, limit):
    """Lengths, 0 for masked ones: whatever a caller's tensor holds, no address leaves its row."""
    return tl.minimum(tl.maximum(tl.load(ptr + o_b, mask=m_b, other=0), 0), limit)


@triton.jit(
    do_not_specialize=[
        "stride_context_b", "stride_prediction_b", "stride_table_b", "stride_code_b", "stride_planes_b",
        "B", "M", "N",
    ]
)  # fmt: skip
def lcs_code_kernel(
    context_ptr,  # [B, M] int32
    stride_context_b,
    context_len_ptr,  # [B] int32
    prediction_ptr,  # [B, N] int32
    stride_prediction_b,
    prediction_len_ptr,  # [B] int32
    table_ptr,  # [B, panels, 2 << PLANES] int32: (round << PLANES) + position, or EMPTY
    stride_table_b,
    code_ptr,  # [B, panels, 4 * chunks] int16; a chunk is 4 context tokens
    stride_code_b,
    planes_ptr,  # [B, panels, PLANES, words of 32 tokens] int32
    stride_planes_b,
    B,
    M,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Number the tokens of every panel of 1 << PLANES prediction tokens, and the context's by the same numbers.

    for panel in range(panels):                        # a program each
        number = {}
        for j, token in enumerate(prediction[panel << PLANES : (panel + 1) << PLANES]):
            n = number.setdefault(token, j)
            for i in range(PLANES):
                planes[panel][i] bit j = bit PLANES - 1 - i of n
        for t, token in enumerate(context):
            code[panel][t] = number[token] << (15 - PLANES) if token in number else -1

    `number` is a hash table with linear probing and twice as many slots as the panel has tokens. BLOCK_T tokens
    look for their slots at once, a slot a round. A slot holds the round and the position of the token that has it,
    the smallest that asked for it, so that the result does not depend on the order of threads.
    """
    SLOTS: tl.constexpr = 2 << PLANES
    PANEL_WORDS: tl.constexpr = 1 << (PLANES - 5)
    EMPTY: tl.constexpr = 0x7FFFFFFF
    o_lane = tl.arange(0, BLOCK_B * BLOCK_T)
    o_t = o_lane % BLOCK_T
    o_b = tl.program_id(0).to(tl.int64) * BLOCK_B + o_lane // BLOCK_T
    m_b = o_b < B
    i_panel = tl.program_id(1)
    o_panel = i_panel.to(tl.int64)
    b_m = _load_clamped(context_len_ptr, o_b, m_b, M)
    b_n = tl.minimum(_load_clamped(prediction_len_ptr, o_b, m_b, N) - (i_panel << PLANES), 1 << PLANES)
    p_prediction = prediction_ptr + o_b * stride_prediction_b + (i_panel << PLANES)
    p_table = table_ptr + o_b * stride_table_b + o_panel * SLOTS
    for i_slot in range(0, SLOTS, BLOCK_T):
        tl.store(p_table + i_slot + o_t, EMPTY, mask=m_b)
    tl.debug_barrier()
    o_bit = tl.arange(0, 32)[None, :]
    o_word = tl.arange(0, BLOCK_B * BLOCK_T // 32)
    o_word_b = tl.program_id(0).to(tl.int64) * BLOCK_B + o_word // (BLOCK_T // 32)
    p_planes = (
        planes_ptr + o_word_b * stride_planes_b + i_panel * (PLANES * PANEL_WORDS) + o_word % (BLOCK_T // 32)
    )
    claim = 0
    for i_n in range(0, tl.max(b_n, axis=0), BLOCK_T):
        b_code = i_n + o_t
        m_open = b_code < b_n
        b_token = tl.load(p_prediction + b_code, mask=m_open, other=0)
        b_slot = layout.bucket_of(b_token, 31 - PLANES)  # at which its search begins
        b_asks = b_code
        while tl.max(m_open.to(tl.int32), axis=0) > 0:
            tl.atomic_min(p_table + b_slot, claim + b_asks, mask=m_open, sem="relaxed")
            claim += 1 << PLANES
            tl.debug_barrier()
            # From the second-level cache: what lies in the first one may be older than the minimum.
            b_has = tl.load(p_table + b_slot, mask=m_open, other=0, cache_modifier=".cg") & (
                (1 << PLANES) - 1
            )
            m_same = m_open & (tl.load(p_prediction + b_has, mask=m_open, other=0) == b_token)
            b_code = tl.where(m_same, b_has, b_code)
            m_open &= ~m_same
            b_slot = (b_slot + 1) & (SLOTS - 1)
        b_codes = tl.reshape(b_code, [BLOCK_B * BLOCK_T // 32, 32])
        for i in tl.static_range(PLANES):
            b_plane = tl.sum(((b_codes >> (PLANES - 1 - i)) & 1) << o_bit, axis=1)
            tl.store(p_planes + i * PANEL_WORDS + i_n // 32, b_plane, mask=o_word_b < B)
    tl.debug_barrier()
    chunks = (M + 3) // 4
    p_code = code_ptr + o_b * stride_code_b + o_panel * (chunks * 4)
    for i_t in range(0, tl.max(b_m, axis=0), BLOCK_T):
        m_open = i_t + o_t < b_m
        b_token = tl.load(context_ptr + o_b * stride_context_b + i_t + o_t, mask=m_open, other=0)
        b_slot = layout.bucket_of(b_token, 31 - PLANES)
        b_code = tl.full([BLOCK_B * BLOCK_T], -1, tl.int32)
        while tl.max(m_open.to(tl.int32), axis=0) > 0:
            b_has = tl.load(p_table + b_slot, mask=m_open, other=EMPTY)
            m_open = b_has != EMPTY
            b_has &= (1 << PLANES) - 1
            m_same = m_open & (tl.load(p_prediction + b_has, mask=m_open, other=0) == b_token)
            b_code = tl.where(m_same, b_has << (15 - PLANES), b_code)
            m_open &= ~m_same
            b_slot = (b_slot + 1) & (SLOTS - 1)
        tl.store(p_code + i_t + o_t, b_code.to(tl.int16), mask=m_b & (i_t + o_t < chunks * 4))


@triton.jit(
    do_not_specialize=[
        "stride_chunk_b", "stride_planes_b", "stride_row_b", "stride_carry_b", "B", "M", "N", "two",
    ]
)  # fmt: skip
def lcs_wavefront_kernel(
    chunk_ptr,  # [B, panels, chunks] int64: the codes of four tokens, 16 bits each
    stride_chunk_b,
    planes_ptr,  # [B, panels, PLANES, words of 32 tokens] int32
    stride_planes_b,
    context_len_ptr,  # [B] int32
    prediction_len_ptr,  # [B] int32
    length_ptr,  # [B] int32: LCS of the two
    row_ptr,  # [B, N + 1] int32 or None: LCS of the context and every prefix of the prediction
    stride_row_b,
    carry_ptr,  # [B, M] int8, or None where one panel spans every prediction
    stride_carry_b,
    B,
    M,
    N,
    two,  # 2, unknown to the compiler
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PLANES: tl.constexpr,
):
    """LCS of a context and a prediction, as a wavefront over the table of (word, chunk) cells.

    for panel in range(0, words, BLOCK_W):             # words of 64 tokens, BLOCK_W at a time
        V[:] = ones
        for d in range(chunks + BLOCK_W - 1):          # anti-diagonals
            for w in range(BLOCK_W):                   # lanes, all at once
                carry = carries[w - 1] of the last diagonal
                for k in range(4):                     # the tokens of this lane's chunk, d - w
                    code = code[panel][4 * (d - w) + k]
                    M = the bits j where planes[i] of word w has bit i of code for all i, none if code is -1
                    V[w], carries[w][k] = step(V[w], M, carry[k])
        length += zeros(V)
    """
    o_lane = tl.arange(0, BLOCK_B * BLOCK_W)
    o_b = tl.program_id(0).to(tl.int64) * BLOCK_B + o_lane // BLOCK_W
    o_w = o_lane % BLOCK_W
    m_b = o_b < B
    b_m = _load_clamped(context_len_ptr, o_b, m_b, M)
    b_n = _load_clamped(prediction_len_ptr, o_b, m_b, N)
    b_chunks = (b_m + 3) // 4
    words = (tl.max(b_n, axis=0) + 63) // 64
    o_before = tl.maximum(o_lane - 1, 0)
    b_inner = (o_w > 0).to(tl.int32) * 15
    b_ones = tl.full([BLOCK_B * BLOCK_W], -1, tl.int64)
    b_length = tl.zeros([BLOCK_B * BLOCK_W], tl.int32)
    for i_word in range(0, words, BLOCK_W):
        i_panel = i_word // BLOCK_W
        o_word = i_word + o_w
        p_planes = planes_ptr + o_b * stride_planes_b + i_panel * (PLANES * 2 * BLOCK_W) + 2 * o_w
        low = _load_planes(p_planes, m_b, 2 * BLOCK_W, PLANES)
        high = _load_planes(p_planes + 1, m_b, 2 * BLOCK_W, PLANES)
        b_v = b_ones
        b_carries = tl.zeros([BLOCK_B * BLOCK_W], tl.int32)
        o_c = -o_w
        p_chunk = chunk_ptr + o_b * stride_chunk_b + i_panel * ((M.to(tl.int64) + 3) // 4) + o_c
        b_next = tl.load(p_chunk, mask=(o_c >= 0) & (o_c < b_chunks), other=-1)
        for _ in range(tl.max(b_chunks, axis=0) + tl.minimum(words - i_word, BLOCK_W) - 1):
            b_chunk = b_next
            p_chunk += 1
            b_next = tl.load(p_chunk, mask=(o_c >= -1) & (o_c + 1 < b_chunks), other=-1)
            b_in = tl.gather(b_carries, o_before, axis=0) & b_inner
            if carry_ptr is not None:
                # The first lane's carries in left the last lane of the panel before.
                m_c = (o_c >= 0) & (o_c < b_chunks)
                p_carry = carry_ptr + o_b * stride_carry_b + o_c
                b_in |= tl.load(p_carry, mask=m_c & (o_w == 0) & (o_word > 0), other=0).to(tl.int32)
            b_carries = tl.zeros([BLOCK_B * BLOCK_W], tl.int32)
            for k in tl.static_range(4):
                b_code = (b_chunk << (48 - 16 * k) >> 32).to(tl.int32)
                b_low = b_code >> 31
                b_high = b_low
                for i in tl.static_range(PLANES):
                    # The next bit of the code becomes the sign. By a product: shifts share a pipe with the logic.
                    b_code = tl.mul(b_code, two, sanitize_overflow=False)
                    b_bit = b_code >> 31
                    b_low |= low[i] ^ b_bit
                    b_high |= high[i] ^ b_bit
                b_differ = (b_high.to(tl.int64) << 32) | b_low.to(tl.uint32, bitcast=True).to(tl.int64)
                b_u = b_v & ~b_differ
                b_sum = tl.add(b_v, b_u, sanitize_overflow=False)
                b_sum = tl.add(b_sum, ((b_in >> (3 - k)) & 1).to(tl.int64), sanitize_overflow=False)
                b_out = b_u | (b_v & ~b_sum)
                b_carries = (b_carries << 1) | ((b_out >> 63) & 1).to(tl.int32)
                b_v = b_sum | (b_v ^ b_u)
            if carry_ptr is not None:
                m_last = m_c & (o_w == BLOCK_W - 1) & (o_word + 1 < words)
                tl.store(p_carry, b_carries.to(tl.int8), mask=m_last)
            o_c = tl.add(o_c, 1, sanitize_overflow=False)
        if carry_ptr is not None:
            tl.debug_barrier()  # the next panel reads, in other threads, the carries written here
        b_end = tl.minimum(tl.maximum(b_n - o_word * 64, 0), 64).to(tl.int64)
        b_v |= tl.where(b_end < 64, b_ones << (b_end & 63), 0)
        b_count = align.count_ones((~b_v).to(tl.int32)) + align.count_ones((~b_v >> 32).to(tl.int32))
        b_counts = tl.reshape(b_count, [BLOCK_B, BLOCK_W])
        if row_ptr is not None:
            b_row = b_length + tl.reshape(tl.cumsum(b_counts, axis=1), [BLOCK_B * BLOCK_W]) - b_count
            for k in range(64):
                b_row += (~b_v >> k).to(tl.int32) & 1
                o_n = o_word * 64 + k
                tl.store(row_ptr + o_b * stride_row_b + 1 + o_n, b_row, mask=o_n < b_n)
        b_total = tl.broadcast_to(tl.sum(b_counts, axis=1)[:, None], [BLOCK_B, BLOCK_W])
        b_length += tl.reshape(b_total, [BLOCK_B * BLOCK_W])
    tl.store(length_ptr + o_b, b_length, mask=m_b & (o_w == 0))
    if row_ptr is not None:
        p_row = row_ptr + o_b * stride_row_b
        tl.store(p_row, tl.zeros([BLOCK_B * BLOCK_W], tl.int32), mask=m_b & (o_w == 0))
        for i_n in range(tl.min(b_n, axis=0), N, BLOCK_W):
            o_n = i_n + o_w
            tl.store(p_row + 1 + o_n, b_length, mask=m_b & (o_n >= b_n) & (o_n < N))

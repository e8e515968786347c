"""Triton kernels of the bit-parallel LCS: one program a request, one lane a 32-bit word of the row.

The row V of a request holds, in bit j % 32 of word j // 32, whether the prediction token j leaves the LCS as
it is (1) or makes it one longer (0). One token of the context turns V into the next row (Hyyrö 2004):

    M = the bits j with prediction[j] == token
    V = (V + (V & M)) | (V & ~M)          # one addition over the whole row, carries run from word to word

Carries only run upwards, so bits past the end of the prediction never reach those below: they may match what
they like until they are set back to 1 at the end.

Additions that are meant to wrap, and those of every turn, are `tl.add` without overflow checks (a debug build
would trap); inner loops call no other functions (under the interpreter calls are most of the cost).

A program can take BLOCK_B requests abreast: BLOCK_W lanes of the first, then BLOCK_W of the second, and so
on. On a GPU that is 1; the interpreter pays by the operation, not by its width, and takes a whole batch.
Lanes are one flat dimension: with two, Triton lays a row out for the gather, the same words in every warp.

Names: i_ program index, o_ offsets, p_ pointer, b_ block of values, m_ mask. Every length is a runtime value.
"""

import triton
import triton.language as tl

# Tokens that `_lcs_extend_kernel` folds before it moves to the next panel: one bit each of an int64.
_CHUNK = tl.constexpr(64)


@triton.jit
def _load_words(p_prediction, stride_n, o_word, b_n):
    """Return the tokens [32, LANES] of the words `o_word` and which of their bits [LANES] lie past the end.

    One thread should hold all 32 tokens of its word, so that the match mask needs no exchange between
    threads. Triton spreads addresses that it knows to be adjacent over threads; a `stride_n` that it cannot
    know to be 1 keeps the 32 tokens of a word (dimension 0) in one thread.
    """
    o_k = tl.arange(0, 32)[:, None]
    o_n = o_word[None, :] * 32 + o_k
    m_n = o_n < b_n[None, :]
    # Any int32 may be a token, so there is no sentinel to mask the end with.
    b_tokens = tl.load(p_prediction[None, :] + o_n.to(tl.int64) * stride_n, mask=m_n, other=0)
    return b_tokens, tl.sum(tl.where(m_n, 0, 1 << o_k), axis=0)


@triton.jit
def _load_clamped(ptr, o_b, m_b, limit):
    """Return lengths, 0 for masked ones: whatever a caller's tensor holds, no address leaves its row."""
    return tl.minimum(tl.maximum(tl.load(ptr + o_b, mask=m_b, other=0), 0), limit)


@triton.jit
def _add_status(b_before, b_here):
    """Carry out of adjacent words: 0 none, 1 one, 2 whatever comes in. Associative."""
    return tl.where(b_here == 2, b_before, b_here)


@triton.jit(
    do_not_specialize=[
        "stride_context_b",
        "stride_prediction_b",
        "stride_prediction_n",
        "stride_row_b",
        "stride_history_b",
        "stride_history_m",
        "stride_carry_b",
        "B",
        "M",
        "N",
    ]
)
def _lcs_wavefront_kernel(
    context_ptr,  # [B, M] int32
    stride_context_b,
    context_len_ptr,  # [B] int32
    prediction_ptr,  # [B, N] int32
    stride_prediction_b,
    stride_prediction_n,  # 1, see _load_words
    prediction_len_ptr,  # [B] int32
    length_ptr,  # [B] int32: LCS of the two
    row_ptr,  # [B, N + 1] int32 or None: LCS of the context and every prefix of the prediction
    stride_row_b,
    history_ptr,  # [B, M, W] int32 or None: V after every token
    stride_history_b,
    stride_history_m,
    carry_ptr,  # [B, M] int8, or None where one panel spans every prediction
    stride_carry_b,
    B,
    M,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """LCS of a context and a prediction, as a wavefront over the table of (word, token) cells.

    for panel in range(0, words, BLOCK_W):             # words of the prediction, BLOCK_W at a time
        V[:] = ones
        for d in range(m + BLOCK_W - 1):               # anti-diagonals
            for w in range(BLOCK_W):                   # lanes, all at once
                t = d - w                              # this lane's token; its carry in came out of
                V[w], carry[w] = step(V[w], context[t], carry[w - 1] of the last diagonal)
        length += zeros(V)
    """
    o_lane = tl.arange(0, BLOCK_B * BLOCK_W)
    o_b = tl.program_id(0).to(tl.int64) * BLOCK_B + o_lane // BLOCK_W
    o_w = o_lane % BLOCK_W
    m_b = o_b < B
    b_m = _load_clamped(context_len_ptr, o_b, m_b, M)
    b_n = _load_clamped(prediction_len_ptr, o_b, m_b, N)
    p_context = context_ptr + o_b * stride_context_b
    p_prediction = prediction_ptr + o_b * stride_prediction_b
    o_before = tl.maximum(o_lane - 1, 0)
    b_inner = (o_w > 0).to(tl.int32)
    b_bits = 1 << tl.arange(0, 32)[:, None]
    words = (tl.max(b_n, axis=0) + 31) // 32
    tokens = tl.max(b_m, axis=0)
    b_length = tl.zeros([BLOCK_B * BLOCK_W], tl.int32)
    for i_word in range(0, words, BLOCK_W):
        o_word = i_word + o_w
        b_tokens, b_past = _load_words(p_prediction, stride_prediction_n, o_word, b_n)
        b_v = tl.full([BLOCK_B * BLOCK_W], -1, tl.int32)
        b_carry = tl.zeros([BLOCK_B * BLOCK_W], tl.int32)
        o_t = -o_w
        for _ in range(tokens + tl.minimum(words - i_word, BLOCK_W) - 1):
            m_t = (o_t >= 0) & (o_t < b_m)
            b_token = tl.load(p_context + o_t, mask=m_t, other=0)
            b_in = tl.gather(b_carry, o_before, axis=0) & b_inner
            if carry_ptr is not None:
                # The first lane's carry in left the last lane of the panel before.
                p_carry = carry_ptr + o_b * stride_carry_b + o_t
                b_in |= tl.load(p_carry, mask=m_t & (o_w == 0) & (o_word > 0), other=0).to(tl.int32)
            # A lane without a token adds nothing and has no carry in: it keeps its word.
            b_match = tl.sum(tl.where((b_tokens == b_token[None, :]) & m_t[None, :], b_bits, 0), axis=0)
            b_u = b_v & b_match
            b_sum = tl.add(tl.add(b_v, b_u, sanitize_overflow=False), b_in, sanitize_overflow=False)
            b_carry = ((b_u | (b_v & ~b_sum)) >> 31) & 1
            b_v = b_sum | (b_v ^ b_u)
            if carry_ptr is not None:
                m_last = m_t & (o_w == BLOCK_W - 1) & (o_word + 1 < words)
                tl.store(p_carry, b_carry.to(tl.int8), mask=m_last)
            if history_ptr is not None:
                p_history = history_ptr + o_b * stride_history_b + o_t.to(tl.int64) * stride_history_m
                tl.store(p_history + o_word, b_v, mask=m_t & (o_word < words))
            o_t = tl.add(o_t, 1, sanitize_overflow=False)
        if carry_ptr is not None:
            tl.debug_barrier()  # the next panel reads, in other threads, the carries written here
        b_v |= b_past
        b_count = tl.sum((~b_v[None, :] >> tl.arange(0, 32)[:, None]) & 1, axis=0)
        b_counts = tl.reshape(b_count, [BLOCK_B, BLOCK_W])
        if row_ptr is not None:
            b_row = b_length + tl.reshape(tl.cumsum(b_counts, axis=1), [BLOCK_B * BLOCK_W]) - b_count
            for k in range(32):
                b_row += (~b_v >> k) & 1
                o_n = o_word * 32 + k
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


@triton.jit(do_not_specialize=["stride_history_b", "stride_history_m", "stride_op_b", "B", "M", "N"])
def _lcs_walk_kernel(
    history_ptr,  # [B, M, W] int32: V after every token
    stride_history_b,
    stride_history_m,
    context_len_ptr,  # [B] int32
    prediction_len_ptr,  # [B] int32
    length_ptr,  # [B] int32: the LCS going in, the number of edit operations coming out
    op_ptr,  # [B, M + N] int8
    stride_op_b,
    B,
    M,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Edit script from the rows, walked from the end; bit(i, j) is bit j of V after i tokens.

    i, j, o = m, n, m + n - lcs
    while i > 0 or j > 0:                                                    # that is o times
        if j > 0 and (i == 0 or bit(i, j - 1)):              step = DELETE   # H[i][j - 1] == H[i][j]
        elif j == 0 or (i > 1 and not bit(i - 1, j - 1)):    step = INSERT   # H[i - 1][j] == H[i][j]
        else:                                                step = KEEP
        op[--o] = step; i -= step != DELETE; j -= step != INSERT
    """
    o_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    m_b = o_b < B
    b_i = _load_clamped(context_len_ptr, o_b, m_b, M)
    b_j = _load_clamped(prediction_len_ptr, o_b, m_b, N)
    b_o = b_i + b_j - tl.load(length_ptr + o_b, mask=m_b, other=0)
    tl.store(length_ptr + o_b, b_o, mask=m_b)
    p_op = op_ptr + o_b * stride_op_b
    for i_o in range(tl.min(b_o, axis=0), M + N, BLOCK_O):
        o_o = i_o + tl.arange(0, BLOCK_O)[None, :]
        m_pad = m_b[:, None] & (o_o >= b_o[:, None]) & (o_o < M + N)
        tl.store(p_op[:, None] + o_o, tl.zeros([BLOCK_B, BLOCK_O], tl.int8), mask=m_pad)
    p_history = history_ptr + o_b * stride_history_b
    for _ in range(tl.max(b_o, axis=0)):
        # Row i is stored at i - 1. Row 0 is all ones; without a column there is no word to look at.
        p_word = p_history + (b_i - 1).to(tl.int64) * stride_history_m + ((b_j - 1) >> 5)
        b_word = tl.load(p_word, mask=(b_i > 0) & (b_j > 0), other=-1)
        b_above = tl.load(p_word - stride_history_m, mask=(b_i > 1) & (b_j > 0), other=-1)
        b_shift = (b_j - 1) & 31
        m_delete = (b_j > 0) & (((b_word >> b_shift) & 1) == 1)
        m_insert = (b_j == 0) | (((b_above >> b_shift) & 1) == 0)
        b_step = tl.where(m_delete, 2, tl.where(m_insert, 3, 1))
        m_walk = b_o > 0  # shorter scripts of the block are through
        b_o -= 1
        tl.store(p_op + b_o, b_step.to(tl.int8), mask=m_walk)
        b_i -= (m_walk & (b_step != 2)).to(tl.int32)
        b_j -= (m_walk & (b_step != 3)).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "stride_row_s",
        "stride_token_ids_s",
        "stride_prediction_s",
        "stride_prediction_n",
        "B",
        "W",
        "T",
        "N",
    ]
)
def _lcs_extend_kernel(
    row_ptr,  # [S, W] int32
    stride_row_s,
    row_len_ptr,  # [S] int32
    token_ids_ptr,  # [S, T] int32
    stride_token_ids_s,
    start_ptr,  # [S] int32
    total_len_ptr,  # [S] int32
    prediction_ptr,  # [S, N] int32
    stride_prediction_s,
    stride_prediction_n,  # 1, see _load_words
    prediction_len_ptr,  # [S] int32
    slots_ptr,  # [B] int64
    active_ptr,  # [B] int32
    B,
    W,
    T,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Fold the tokens that came since the last call into the row of every active slot.

    A step brings few tokens and a row has many words, so here a whole row is one token's work, and the
    carries of its addition are one scan over the words (a wavefront would take words + tokens - 1 turns).

    for chunk in the new tokens, 64 at a time:
        for panel in the words, BLOCK_W at a time:
            for t in chunk:                            # carry out of the panel, one bit a token,
                V[panel], carry[t] = step(V[panel], token[t], carry[t])      # is carry into the next
    """
    o_lane = tl.arange(0, BLOCK_B * BLOCK_W)
    o_b = tl.program_id(0) * BLOCK_B + o_lane // BLOCK_W
    o_w = o_lane % BLOCK_W
    m_b = tl.load(active_ptr + o_b, mask=o_b < B, other=0) != 0
    o_s = tl.load(slots_ptr + o_b, mask=m_b, other=0)
    b_start = _load_clamped(start_ptr, o_s, m_b, T)
    b_total = _load_clamped(total_len_ptr, o_s, m_b, T)
    b_n = _load_clamped(prediction_len_ptr, o_s, m_b, N)
    b_done = tl.load(row_len_ptr + o_s, mask=m_b, other=0)
    p_row = row_ptr + o_s * stride_row_s
    p_token = token_ids_ptr + o_s * stride_token_ids_s
    p_prediction = prediction_ptr + o_s * stride_prediction_s
    o_before = tl.maximum(o_lane - 1, 0)
    o_last = o_lane | (BLOCK_W - 1)
    b_bits = 1 << tl.arange(0, 32)[:, None]
    m_reset = m_b & ((b_done > b_total) | (b_done < b_start))
    b_done = tl.where(m_reset, b_start, b_done)
    if tl.max(m_reset.to(tl.int32), axis=0) > 0:
        for i_word in range(0, W, BLOCK_W):
            m_row = m_reset & (i_word + o_w < W)
            tl.store(p_row + i_word + o_w, tl.full([BLOCK_B * BLOCK_W], -1, tl.int32), mask=m_row)
        tl.debug_barrier()  # the words are read below, maybe by other threads
    words = (tl.max(b_n, axis=0) + 31) // 32
    tokens = tl.max(b_total - b_done, axis=0)
    for i_t in range(0, tokens, _CHUNK):
        b_carry = tl.zeros([BLOCK_B * BLOCK_W], tl.int64)
        for i_word in range(0, words, BLOCK_W):
            o_word = i_word + o_w
            m_w = m_b & (o_word * 32 < b_n)
            b_tokens, b_past = _load_words(p_prediction, stride_prediction_n, o_word, b_n)
            b_v = tl.load(p_row + o_word, mask=m_w, other=-1)
            b_history = tl.zeros([BLOCK_B * BLOCK_W], tl.int64)
            o_t = b_done + i_t
            for k in range(tl.minimum(_CHUNK, tokens - i_t)):
                m_t = o_t < b_total
                b_token = tl.load(p_token + o_t, mask=m_t, other=0)
                # Without a token nothing is added and nothing carried in: the row stays.
                b_match = tl.sum(tl.where((b_tokens == b_token[None, :]) & m_t[None, :], b_bits, 0), axis=0)
                b_u = b_v & b_match
                b_sum = tl.add(b_v, b_u, sanitize_overflow=False)
                b_out = ((b_u | (b_v & ~b_sum)) >> 31) & 1
                # A word of ones hands on what comes in; into the first comes what the panel before left, so
                # its status is never 2, and no request hears of the lanes before its own.
                b_in = ((b_carry >> k) & 1).to(tl.int32)
                b_status = tl.where(b_sum == -1, tl.where(o_w == 0, b_in, 2), b_out)
                b_out = tl.associative_scan(b_status, 0, _add_status)
                b_in = tl.where(o_w == 0, b_in, tl.gather(b_out, o_before, axis=0))
                b_v = tl.add(b_sum, b_in, sanitize_overflow=False) | (b_v ^ b_u)
                b_history |= b_out.to(tl.int64) << k
                o_t = tl.add(o_t, 1, sanitize_overflow=False)
            tl.store(p_row + o_word, b_v | b_past, mask=m_w)
            b_carry = tl.gather(b_history, o_last, axis=0)
        tl.debug_barrier()  # the next chunk reads the words again
    tl.store(row_len_ptr + o_s, b_total, mask=m_b & (o_w == 0))

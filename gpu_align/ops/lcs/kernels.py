"""Device functions that extend the LCS row of a step by a token, and the kernels of the exact LCS.

The row V of a request holds, in bit j % 32 of word j // 32, whether the prediction token j leaves the LCS as
it is (1) or makes it one longer (0). One token of the context turns V into the next row (Hyyrö 2004):

    M = the bits j with prediction[j] == token
    V = (V + (V & M)) | (V & ~M)          # one addition over the whole row, carries run from word to word

`_extend_row` does this for the `WINDOW` tokens of a step's row, all words at once. The kernels do it for whole
predictions as a wavefront: one program a request, one lane a word.

Carries only run upwards, so bits past the end of the prediction never reach those below: they may match anything
until they are set back to 1 at the end.

Additions that are meant to wrap, and those of every turn, are `tl.add` without overflow checks (a debug build
would trap); inner loops call no other functions (under the interpreter calls are most of the cost).

A program can take BLOCK_B requests abreast: BLOCK_W lanes of the first, then BLOCK_W of the second, and so
on. On a GPU that is 1; the interpreter pays by the operation, not by its width, and takes a whole batch.
Lanes are one flat dimension: with two, Triton lays a row out for the gather, the same words in every warp.

Names: i_ program index, o_ offsets, p_ pointer, b_ block of values, m_ mask. Every length is a runtime value.
"""

import triton
import triton.language as tl

from ..constexprs import WINDOW, WORD

_WORDS = tl.constexpr(WINDOW // WORD)


@triton.jit
def _row_offsets():
    """[words, WORD]: which token of the window each bit stands for."""
    return tl.arange(0, _WORDS)[:, None] * WORD + tl.arange(0, WORD)[None, :]


@triton.jit
def _load_row(p_row):
    """The words of a stored row, [words] int32. ``row[j]``: LCS length with the window's first j + 1 tokens."""
    o_j = _row_offsets()
    b_common = tl.load(p_row + o_j).to(tl.int32)
    b_before = tl.load(p_row + o_j - 1, mask=o_j > 0, other=0).to(tl.int32)
    return tl.sum((1 - (b_common - b_before)) << tl.arange(0, WORD)[None, :], axis=1)


@triton.jit
def _row_lengths(b_words):
    """LCS lengths with the window up to each of its tokens, [words, WORD] int32: the opposite of `_load_row`."""
    b_rise = (~b_words[:, None] >> tl.arange(0, WORD)[None, :]) & 1
    b_total = tl.sum(b_rise, axis=1)
    return (tl.cumsum(b_total, axis=0) - b_total)[:, None] + tl.cumsum(b_rise, axis=1)


@triton.jit
def _extend_row(b_words, p_tokens, num_tokens, anchor, token):
    """The words after one more token, [words] int32. The window begins at `anchor` and may end beyond the tokens,
    of which there is one at least.

    ::

        M = the bits j with window[j] == token
        V = (V + (V & M)) | (V & ~M)
    """
    # Offsets from the prediction's beginning: those from the anchor took 96 → 127 registers in a step for sm_80.
    o_position = anchor + _row_offsets()
    b_token = tl.load(p_tokens + tl.minimum(o_position, num_tokens - 1))
    m_same = (o_position < num_tokens) & (b_token == token)
    b_match = tl.sum(tl.where(m_same, 1 << tl.arange(0, WORD)[None, :], 0), axis=1)
    b_both = b_words & b_match
    b_sum = tl.add(b_words, b_both, sanitize_overflow=False)
    # The carries of all words by one small addition: a carry out of word w runs on through words of ones only.
    o_w = tl.arange(0, _WORDS)
    b_out = ((b_both | (b_words & ~b_sum)) >> 31) & 1
    ones = tl.sum((b_sum == -1).to(tl.int32) << o_w, axis=0)
    carries = (ones + 2 * tl.sum(b_out << o_w, axis=0)) ^ ones
    b_sum = tl.add(b_sum, (carries >> o_w) & 1, sanitize_overflow=False)
    return b_sum | (b_words & ~b_match)


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

"""Device functions that align a request's output with its prediction: the LCS row, resync, edits."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import (
    ANCHOR,
    AT_START,
    CURSOR,
    DIVERGED_AT,
    EDIT,
    EDIT_AT,
    EDIT_BEFORE,
    EDIT_BEHIND,
    EDIT_LOOKUPS,
    EDIT_NEW,
    EDIT_OLD,
    EDIT_SEEN_BEFORE,
    EDIT_START,
    EVERY_BIT,
    GLOBAL_EVERY,
    GLOBAL_MATCH,
    IN_SYNC,
    J_KEYS,
    LOCAL_MATCH,
    LOCAL_RANGE,
    MAX_EDIT_LEN,
    MAX_EDITS,
    MAX_MATCH,
    NEAREST,
    NO_EDIT,
    NOWHERE,
    NUM_COMMON,
    NUM_EDITS,
    NUM_IN_SYNC,
    ROW_WORDS,
    RUN,
    SEEN,
    SPAN,
    TURN,
    WINDOW,
    WORD,
    position_of,
    rank_of,
    score_of,
    starts_over,
)
from ..index.kernel import load_back, load_back_clamped, load_bucket, nearest
from ..layout import Alignment


@triton.jit
def _row_offsets():
    """[ROW_WORDS]: which token of the window the lowest bit of each word stands for."""
    return tl.arange(0, ROW_WORDS) * WORD


@triton.jit
def _load_row(p_row):
    """A stored row, 16 bits a length: the first four of each word and the last four, both [ROW_WORDS] int64."""
    p_lengths = p_row.to(tl.pointer_type(tl.int64)) + 2 * tl.arange(0, ROW_WORDS)
    return tl.load(p_lengths), tl.load(p_lengths + 1)


@triton.jit
def _four_bits(b_lengths, b_before):
    """Which of four lengths exceed the one before, `b_before` for the first: four bits, [ROW_WORDS] int32."""
    b_rises = b_lengths - ((b_lengths << 16) | b_before)
    return ((b_rises | (b_rises >> 15) | (b_rises >> 30) | (b_rises >> 45)) & 15).to(tl.int32)


@triton.jit
def _row_words(b_first, b_last):
    """The words of a row as `load_row` returns it, [ROW_WORDS] int32."""
    o_w = tl.arange(0, ROW_WORDS)
    b_before = tl.where(o_w > 0, tl.gather(b_last >> 48, tl.maximum(o_w - 1, 0), axis=0), 0)
    return EVERY_BIT - _four_bits(b_first, b_before) - (_four_bits(b_last, b_first >> 48) << 4)


@triton.jit
def _row_lengths(b_words):
    """LCS lengths with the window up to each of its tokens: of bit k of all words the k-th of WORD [ROW_WORDS]."""
    b_rises = tl.zeros([ROW_WORDS], tl.int32)
    for k in tl.static_range(WORD):
        b_rises += (~b_words >> k) & 1
    b_length = tl.cumsum(b_rises, axis=0) - b_rises
    lengths = ()
    for k in tl.static_range(WORD):
        b_length += (~b_words >> k) & 1
        lengths = lengths + (b_length,)
    return lengths


@triton.jit
def _store_row(p_row, lengths):
    """Store what `row_lengths` returns as `load_row` loads it."""
    p_lengths = p_row.to(tl.pointer_type(tl.int64)) + 2 * tl.arange(0, ROW_WORDS)
    for i in tl.static_range(2):
        b_low = (lengths[4 * i] | (lengths[4 * i + 1] << 16)).to(tl.int64)
        b_high = (lengths[4 * i + 2] | (lengths[4 * i + 3] << 16)).to(tl.int64)
        tl.store(p_lengths + i, b_low | (b_high << 32))


@triton.jit
def _load_window(p_tokens, num_tokens, anchor):
    """The window behind `anchor`, a tuple of WORD [ROW_WORDS] int32, and the bits of each word that stand for a
    token, [ROW_WORDS] int32: it ends with the tokens, of which there is one at least."""
    o_position = anchor + _row_offsets()
    window = ()
    for k in tl.static_range(WORD):
        window = window + (tl.load(p_tokens + tl.minimum(o_position + k, num_tokens - 1)),)
    b_end = tl.minimum(tl.maximum(num_tokens - o_position, 0), WORD)
    return window, (1 << b_end) - 1


@triton.jit
def _match_bits(window, b_bits, token):
    """The bits of each word that stand for `token`, [ROW_WORDS] int32; the window as `load_window` returns it."""
    b_match = tl.zeros([ROW_WORDS], tl.int32)
    for k in tl.static_range(WORD):
        b_match |= tl.where(window[k] == token, 1 << k, 0)
    return b_match & b_bits


@triton.jit
def _extend_words(b_words, window, b_bits, p_tokens, begin, end):
    """The words after ``tokens[begin:end]``, [ROW_WORDS] int32; the window as `load_window` returns it."""
    b_lane = tl.full([ROW_WORDS], 1, tl.int32) << tl.arange(0, ROW_WORDS)
    # Tokens are loaded two turns ahead and compared one turn ahead.
    b_match = _match_bits(window, b_bits, tl.load(p_tokens + tl.minimum(begin, end - 1)))
    next_token = tl.load(p_tokens + tl.minimum(begin + 1, end - 1))
    for i in range(begin, end):
        b_sum = b_words + (b_words & b_match)
        # The carries of all words by one addition: a carry out of word w runs on through words of ones only.
        out = tl.reduce_or(tl.where(b_sum > EVERY_BIT, b_lane, 0), axis=0)
        ones = tl.reduce_or(tl.where(b_sum == EVERY_BIT, b_lane, 0), axis=0)
        carries = tl.add(ones, out << 1, sanitize_overflow=False) ^ ones
        b_sum += (carries & b_lane != 0).to(tl.int32)
        b_words = (b_sum & EVERY_BIT) | (b_words & ~b_match)
        b_match = _match_bits(window, b_bits, next_token)
        next_token = tl.load(p_tokens + tl.minimum(i + 2, end - 1))
    return b_words


class Edits(NamedTuple):
    """What the output put in place of what: edit number i is in lane i % MAX_EDITS."""

    count: Any  # edits recorded
    b_before: Any  # [MAX_EDITS] int32: token before the edit; NO_EDIT: there is none in this lane
    b_at: Any  # ... at its position
    b_behind: Any  # ... and behind that
    b_start: Any  # output position of its first new token
    b_old: Any  # old tokens
    b_new: Any  # new tokens
    b_seen_before: Any  # 1: an edit with the same key was remembered when this one was made
    is_changed: Any  # whether a lane has changed since they were loaded


@triton.jit
def _load_key(prediction, o_position, m_position):
    """Tokens before, at and behind each position: the key of an edit."""
    before = tl.load(prediction.tokens + o_position - 1, mask=m_position & (o_position > 0), other=AT_START)
    at = tl.load(prediction.tokens + o_position, mask=m_position, other=0)
    return before, at, tl.load(prediction.tokens + o_position + 1, mask=m_position, other=0)


@triton.jit
def have_keys(prediction, edits, o_position, m_position):
    """Whether each position has the key of each edit, [positions, MAX_EDITS]."""
    m_position = m_position & (o_position + 1 < prediction.length)
    before, at, behind = _load_key(prediction, o_position, m_position)
    m_same = (before[:, None] == edits.b_before[None, :]) & (at[:, None] == edits.b_at[None, :])
    return m_same & (behind[:, None] == edits.b_behind[None, :]) & m_position[:, None]


@triton.jit
def _run_length(prediction, cursor, p_output, done, num_output):
    """How many of the next `RUN` tokens of output and prediction agree."""
    o_i = tl.arange(0, RUN)
    m_i = o_i < tl.minimum(num_output - done, prediction.length - cursor)
    b_output = tl.load(p_output + done + o_i, mask=m_i, other=0)
    b_prediction = tl.load(prediction.tokens + cursor + o_i, mask=m_i, other=0)
    return tl.min(tl.where(m_i & (b_output == b_prediction), RUN, o_i), axis=0)


@triton.jit
def _invalidate_edits(edits, prediction, cursor, run):
    """The edits without those whose key the output has just passed unedited, `run` positions from the cursor."""
    b_before = edits.b_before
    for i in range(0, run, EDIT_LOOKUPS):
        o_i = i + tl.arange(0, EDIT_LOOKUPS)
        m_edit = have_keys(prediction, edits, cursor + o_i, o_i < run)
        b_before = tl.where(tl.max(m_edit.to(tl.int32), axis=0) > 0, NO_EDIT, b_before)
    is_changed = edits.is_changed | tl.max((b_before != edits.b_before).to(tl.int32), axis=0)
    return Edits(
        edits.count, b_before, edits.b_at, edits.b_behind, edits.b_start, edits.b_old, edits.b_new,
        edits.b_seen_before, is_changed,
    )  # fmt: skip


@triton.jit
def _load_before(prediction, o_position, MATCH: tl.constexpr):
    """The MATCH tokens before each position, from the last on: a tuple of [lanes]; any if it has fewer."""
    m_position = (o_position >= MATCH) & (o_position <= prediction.length)
    # No load has a mask, see `match_length`. A page of the arena is longer than MATCH.
    return load_back(prediction.tokens + tl.where(m_position, o_position, MATCH) - 1, MATCH)


@triton.jit
def _ends_like(before, last, MATCH: tl.constexpr):
    """Whether the tokens of `load_before` are the last of the output, from the last on."""
    m_agree = before[0] == last[0]
    for i in tl.static_range(1, MATCH):
        m_agree &= before[i] == last[i]
    return m_agree


@triton.jit
def _local_looks(prediction, near, o_local, p_output, done, end):
    """``(done, position)`` of the first of ``output[done:end]``, `SPAN` at most, behind which the output ends like
    a position near the anchor; `NOWHERE` without one. near: `load_before` of these positions, `o_local`.
    """
    o_lane = tl.arange(0, SPAN)
    # No token of a prediction is below 0.
    b_tokens = tl.load(p_output + done + o_lane, mask=done + o_lane < end, other=-1)
    before = load_back_clamped(p_output + done - 1 + o_lane * 0, done - 1, LOCAL_MATCH)
    last = ()
    for i in tl.static_range(LOCAL_MATCH):
        last = last + (tl.where(done > i, before[i], -1),)
    b_first = tl.full([LOCAL_RANGE], NOWHERE, tl.int32)  # of each position
    for i in range(done, end, TURN):
        for k in tl.static_range(TURN):
            token = tl.gather(b_tokens, o_lane * 0 + (i - done + k), axis=0)
            last = (token,) + last[: LOCAL_MATCH - 1]
            b_first = tl.where(_ends_like(near, last, LOCAL_MATCH), tl.minimum(b_first, i + k + 1), b_first)
    m_local = (o_local >= LOCAL_MATCH) & (o_local <= prediction.length) & (b_first < NOWHERE)
    first = tl.min(tl.where(m_local, b_first, NOWHERE), axis=0)
    return first, tl.min(tl.where(m_local & (b_first == first), o_local, NOWHERE), axis=0)


@triton.jit
def _global_looks(prediction, anchor, p_output, o_done, m_done):
    """``(done, position)`` of the first look behind which the output is in sync again, `NOWHERE` without one.

    o_done: [looks, 1], the output's tokens at each, rising; m_done: which there are, one at least.
    """
    o_last = tl.where(m_done, o_done, GLOBAL_MATCH) - 1
    begin, end = nearest(prediction, load_bucket(prediction, tl.load(p_output + o_last), m_done), anchor)
    o_entry = begin + tl.arange(0, NEAREST)[None, :]
    m_entry = (o_entry < end) & m_done
    o_position = tl.load(prediction.index.positions + tl.where(m_entry, o_entry, 0))
    m_entry &= (o_position >= GLOBAL_MATCH) & (o_position <= prediction.length)
    # Most differ in their last tokens.
    m_entry &= _ends_like(_load_before(prediction, o_position, 2), load_back(p_output + o_last, 2), 2)
    looked = tl.full([], NOWHERE, tl.int32)
    position = looked
    if tl.max(m_entry.to(tl.int32)) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        texts = _load_before(prediction, tl.where(m_entry, o_position, GLOBAL_MATCH), GLOBAL_MATCH)
        m_same = m_entry & _ends_like(texts, load_back(p_output + o_last, GLOBAL_MATCH), GLOBAL_MATCH)
        b_rank = tl.min(tl.where(m_same, rank_of(o_position, anchor), NOWHERE), axis=1, keep_dims=True)
        looked = tl.min(tl.where(b_rank < NOWHERE, o_done, NOWHERE))
        position = position_of(tl.min(tl.where(o_done == looked, b_rank, NOWHERE)), anchor)
    return looked, position


@triton.jit
def _resync(prediction, anchor, p_output, done, num_output):
    """``(done, position)`` of the first of ``output[done:num_output]`` behind which it is in sync again, or
    `num_output` and `NOWHERE`. `SPAN` tokens a turn, all looks among them at once."""
    o_local = anchor + tl.arange(0, LOCAL_RANGE)
    near = _load_before(prediction, o_local, LOCAL_MATCH)
    position = tl.full([], NOWHERE, tl.int32)
    while (position == NOWHERE) & (done < num_output):
        end = tl.minimum(done + SPAN, num_output)
        first, position = _local_looks(prediction, near, o_local, p_output, done, end)
        look = (done // GLOBAL_EVERY + 1) * GLOBAL_EVERY
        last_look = tl.minimum(end, first - 1)
        if look <= last_look:
            o_done = look + tl.arange(0, SPAN // GLOBAL_EVERY)[:, None] * GLOBAL_EVERY
            looked, found = _global_looks(prediction, anchor, p_output, o_done, o_done <= last_look)
            position = tl.where(looked < first, found, position)
            first = tl.minimum(first, looked)
        done = tl.minimum(first, end)
    return done, position


@triton.jit
def common_end(prediction, alignment, position, p_output, done):
    o_k = tl.arange(0, RUN)
    m_k = o_k < tl.minimum(position - alignment.anchor, done - alignment.diverged_at)
    b_prediction = tl.load(prediction.tokens + position - 1 - o_k, mask=m_k, other=0)
    b_output = tl.load(p_output + done - 1 - o_k, mask=m_k, other=0)
    return tl.min(tl.where(m_k & (b_prediction == b_output), RUN, o_k), axis=0)


@triton.jit
def record_edit(edits, prediction, alignment, old, new):
    """The edits with one more."""
    m_key = alignment.anchor + 1 < prediction.length
    if m_key & (old >= 0) & (old <= MAX_EDIT_LEN) & (new <= MAX_EDIT_LEN):
        before, at, behind = _load_key(prediction, alignment.anchor, m_key)
        m_same = (edits.b_before == before) & (edits.b_at == at) & (edits.b_behind == behind)
        seen_before = tl.max(m_same.to(tl.int32), axis=0)
        m_way = tl.arange(0, MAX_EDITS) == edits.count % MAX_EDITS
        edits = Edits(
            edits.count + 1,
            tl.where(m_way, before, edits.b_before),
            tl.where(m_way, at, edits.b_at),
            tl.where(m_way, behind, edits.b_behind),
            tl.where(m_way, alignment.diverged_at, edits.b_start),
            tl.where(m_way, old, edits.b_old),
            tl.where(m_way, new, edits.b_new),
            tl.where(m_way, seen_before, edits.b_seen_before),
            1,
        )
    return edits


@triton.jit
def in_sync_at(a, cursor, num_in_sync, num_common):
    """The alignment in sync at a cursor; it keeps where the output diverged last."""
    return Alignment(1, cursor, a.anchor, a.diverged_at, num_in_sync, num_common)


@triton.jit
def diverge(a, done):
    """The alignment diverged at its cursor, behind `done` output tokens."""
    return Alignment(0, a.cursor, a.cursor, done, a.num_in_sync, a.num_common)


@triton.jit
def _at_cursor(a, cursor):
    """The alignment with another cursor."""
    return Alignment(a.in_sync, cursor, a.anchor, a.diverged_at, a.num_in_sync, a.num_common)


@triton.jit
def _process_tokens(request, p_output, done, num_output, a, edits):
    """Process ``output[done:num_output]``, but for the row: returns the `Alignment` `a` and the edits after it."""
    prediction = request.prediction
    while done < num_output:
        if a.in_sync > 0:
            run = _run_length(prediction, a.cursor, p_output, done, num_output)
            if edits.count > 0:
                edits = _invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = tl.minimum(a.num_common + run, MAX_MATCH)
            a = in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if (run < RUN) & (done < num_output):
                a = diverge(a, done)
        if a.in_sync == 0:
            done, position = _resync(prediction, a.anchor, p_output, done, num_output)
            if position != NOWHERE:
                common = common_end(prediction, a, position, p_output, done)
                old, new = position - common - a.anchor, done - common - a.diverged_at
                edits = record_edit(edits, prediction, a, old, new)
                a = in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@triton.jit
def load_state(p_align, p_row, p_edits):
    """``(seen, alignment, edits, row)`` of a slot as they were stored."""
    alignment = Alignment(
        tl.load(p_align + IN_SYNC), tl.load(p_align + CURSOR), tl.load(p_align + ANCHOR),
        tl.load(p_align + DIVERGED_AT), tl.load(p_align + NUM_IN_SYNC), tl.load(p_align + NUM_COMMON),
    )  # fmt: skip
    p_ways = p_edits + tl.arange(0, MAX_EDITS) * EDIT
    edits = Edits(
        tl.load(p_align + NUM_EDITS), tl.load(p_ways + EDIT_BEFORE), tl.load(p_ways + EDIT_AT),
        tl.load(p_ways + EDIT_BEHIND), tl.load(p_ways + EDIT_START), tl.load(p_ways + EDIT_OLD),
        tl.load(p_ways + EDIT_NEW), tl.load(p_ways + EDIT_SEEN_BEFORE), 0,
    )  # fmt: skip
    return tl.load(p_align + SEEN), alignment, edits, _load_row(p_row)


@triton.jit
def _start_over(is_fresh, a, edits):
    """The alignment and the edits; of a fresh request in sync at the beginning, and none."""
    alignment = Alignment(
        tl.where(is_fresh, 1, a.in_sync), tl.where(is_fresh, 0, a.cursor), tl.where(is_fresh, 0, a.anchor),
        tl.where(is_fresh, 0, a.diverged_at), tl.where(is_fresh, 0, a.num_in_sync),
        tl.where(is_fresh, 0, a.num_common),
    )  # fmt: skip
    return alignment, Edits(
        tl.where(is_fresh, 0, edits.count), tl.where(is_fresh, NO_EDIT, edits.b_before), edits.b_at,
        edits.b_behind, edits.b_start, edits.b_old, edits.b_new, edits.b_seen_before, edits.is_changed,
    )  # fmt: skip


@triton.jit
def _store_registers(request, a, edits, is_fresh):
    """Write back what `load_state` loads, but for the row; the edits where there is something new in them."""
    p_align = request.align_state
    tl.store(p_align + SEEN, request.context.length)
    tl.store(p_align + IN_SYNC, a.in_sync)
    tl.store(p_align + CURSOR, a.cursor)
    tl.store(p_align + ANCHOR, a.anchor)
    tl.store(p_align + DIVERGED_AT, a.diverged_at)
    tl.store(p_align + NUM_IN_SYNC, a.num_in_sync)
    tl.store(p_align + NUM_EDITS, edits.count)
    tl.store(p_align + NUM_COMMON, a.num_common)
    # Carrying `is_fresh` in `is_changed` took 96 → 102 registers in a step with recipes for sm_90.
    if is_fresh | (edits.is_changed > 0):
        p_ways = request.edits + tl.arange(0, MAX_EDITS) * EDIT
        tl.store(p_ways + EDIT_BEFORE, edits.b_before)
        tl.store(p_ways + EDIT_AT, edits.b_at)
        tl.store(p_ways + EDIT_BEHIND, edits.b_behind)
        tl.store(p_ways + EDIT_START, edits.b_start)
        tl.store(p_ways + EDIT_OLD, edits.b_old)
        tl.store(p_ways + EDIT_NEW, edits.b_new)
        tl.store(p_ways + EDIT_SEEN_BEFORE, edits.b_seen_before)


@triton.jit
def cursor_score(lengths, num_window):
    b_best = tl.full([ROW_WORDS], J_KEYS - 1, tl.int32)  # j = 0, score 0
    for k in tl.static_range(WORD):
        o_j = _row_offsets() + k + 1
        b_key = score_of(lengths[k], o_j) * J_KEYS + (-o_j + (J_KEYS - 1))
        b_best = tl.maximum(b_best, tl.where(o_j <= num_window, b_key, J_KEYS - 1))
    top = tl.max(b_best, axis=0)
    return -(top % J_KEYS) + (J_KEYS - 1), top // J_KEYS


@triton.jit
def realign(request, state):
    """Process what is new of a request's output, after a `load_state`, and write its state back.

    Returns ``(alignment, edits, top)``, with the cursor where the output stands, and `top` its score there.
    """
    prediction, context = request.prediction, request.context
    seen, a, edits, row = state
    is_fresh = starts_over(context.length, seen)
    a, edits = _start_over(is_fresh, a, edits)
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = tl.where(prediction.length > 0, context.length - request.output_start, 0)
    p_output = context.tokens + request.output_start
    done = tl.maximum(tl.where(is_fresh, 0, seen) - request.output_start, 0)
    a, edits = _process_tokens(request, p_output, done, num_output, a, edits)
    b_words = tl.full([ROW_WORDS], EVERY_BIT, tl.int32)
    if a.in_sync == 0:
        # Only the tokens since the output diverged last are in the row.
        first = tl.maximum(done, a.diverged_at)
        window, b_bits = _load_window(prediction.tokens, prediction.length, a.anchor)
        b_words = tl.where(first > a.diverged_at, _row_words(row[0], row[1]), b_words)
        b_words = _extend_words(b_words, window, b_bits, p_output, first, num_output)
    tl.debug_barrier()  # all threads have read what is written now
    _store_registers(request, a, edits, is_fresh)
    top = 0
    if a.in_sync == 0:
        lengths = _row_lengths(b_words)
        _store_row(request.lcs_row, lengths)
        j, top = cursor_score(lengths, tl.minimum(prediction.length - a.anchor, WINDOW))
        a = _at_cursor(a, a.anchor + j)
    return a, edits, top

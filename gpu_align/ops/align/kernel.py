"""Device functions that align a request's output with its prediction: the LCS row, resync, edits."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import c
from ..index.kernel import load_back_clamped, load_bucket, load_each, nearest
from ..layout import Alignment

#: Lanes for the bits of an LCS row, and for half of them; positions that are compared with all edits at once.
ROW_LANES, HALF_ROW, EDIT_LOOKUPS = tl.constexpr(64), tl.constexpr(32), tl.constexpr(32)
#: Tokens of a diverged output in a turn of a loop, which looks at `LOCAL_RANGE` at once, a lane each.
TURN = tl.constexpr(4)


@triton.jit
def _half_window(prediction, position, num):
    """The first `num` tokens from `position` on, and the bit of each, 0 beyond them; [HALF_ROW] int32."""
    o_w = tl.arange(0, HALF_ROW)
    b_token = tl.load(prediction.tokens + position + o_w, mask=o_w < num, other=0)
    return b_token, tl.where(o_w < num, tl.full([HALF_ROW], 1, tl.int32) << o_w, 0)


@triton.jit
def extend_rows(row, prediction, anchor, p_output, begin, num_output):
    num_window = tl.minimum(prediction.length - anchor, c.WINDOW)
    b_low, b_low_bit = _half_window(prediction, anchor, num_window)
    b_high, b_high_bit = _half_window(prediction, anchor + HALF_ROW, num_window - HALF_ROW)
    # Loaded a turn ahead.
    token = tl.load(p_output + tl.minimum(begin, num_output - 1))
    for i in range(begin, num_output):
        next_token = tl.load(p_output + tl.minimum(i + 1, num_output - 1))
        low = tl.reduce_or(tl.where(b_low == token, b_low_bit, 0), axis=0)
        high = tl.reduce_or(tl.where(b_high == token, b_high_bit, 0), axis=0)
        row = c.extend_row(row, (c.int64(high) << HALF_ROW) | (c.int64(low) & 0xFFFFFFFF))
        token = next_token
    return row


@triton.jit
def cursor_of(row, prediction, anchor):
    o_j = tl.arange(0, ROW_LANES)
    # The smallest of the lanes with the largest score: one key.
    b_key = c.score_at(row, tl.minimum(o_j, c.WINDOW)) * ROW_LANES + (-o_j + (ROW_LANES - 1))
    key = tl.max(tl.where(o_j <= tl.minimum(prediction.length - anchor, c.WINDOW), b_key, 0), axis=0)
    return anchor + (-(key % ROW_LANES) + (ROW_LANES - 1))


class Edits(NamedTuple):
    """The edits: tokens of the prediction and those in their place; edit number i is in lane i % c.MAX_EDITS.

    All but the first field and the last are columns of ``edits``.
    """

    count: Any  # edits recorded
    b_at: Any  # [c.MAX_EDITS] int32: token at its position; c.NO_EDIT in an empty lane
    b_after: Any  # ... and after that
    b_start: Any  # output position of its first new token
    b_old: Any  # old tokens
    b_new: Any  # new tokens
    b_seen_before: Any  # 1: an edit with the same key was remembered when this one was made
    is_changed: Any  # whether a lane has changed since they were loaded


@triton.jit
def have_keys(prediction, edits, o_position, m_position):
    """Whether each position has the key of each edit, [positions, c.MAX_EDITS]."""
    m_position = m_position & (o_position + 1 < prediction.length)
    b_at = tl.load(prediction.tokens + o_position, mask=m_position, other=0)
    b_after = tl.load(prediction.tokens + o_position + 1, mask=m_position, other=0)
    m_same = (b_at[:, None] == edits.b_at[None, :]) & (b_after[:, None] == edits.b_after[None, :])
    return m_same & m_position[:, None]


@triton.jit
def _run_length(prediction, cursor, p_output, done, num_output):
    """How many of the next `MAX_MATCH` tokens of output and prediction agree."""
    o_i = tl.arange(0, c.MAX_MATCH)
    m_i = o_i < tl.minimum(num_output - done, prediction.length - cursor)
    b_output = tl.load(p_output + done + o_i, mask=m_i, other=0)
    b_prediction = tl.load(prediction.tokens + cursor + o_i, mask=m_i, other=0)
    return tl.min(tl.where(m_i & (b_output == b_prediction), c.MAX_MATCH, o_i), axis=0)


@triton.jit
def _invalidate_edits(edits, prediction, cursor, run):
    """The edits without those whose key the output has just passed unedited, `run` positions from the cursor."""
    b_at = edits.b_at
    for i in range(0, run, EDIT_LOOKUPS):
        o_i = i + tl.arange(0, EDIT_LOOKUPS)
        m_edit = have_keys(prediction, edits, cursor + o_i, o_i < run)
        b_at = tl.where(tl.max(m_edit.to(tl.int32), axis=0) > 0, c.NO_EDIT, b_at)
    is_changed = edits.is_changed | tl.max((b_at != edits.b_at).to(tl.int32), axis=0)
    return Edits(
        edits.count, b_at, edits.b_after, edits.b_start, edits.b_old, edits.b_new, edits.b_seen_before,
        is_changed,
    )  # fmt: skip


@triton.jit
def _load_before(prediction, o_position, MATCH: tl.constexpr):
    """The MATCH tokens before each position, from the last on: a tuple of [lanes]; any if it has fewer."""
    m_position = (o_position >= MATCH) & (o_position <= prediction.length)
    # No load has a mask, see `match_length`. A page of the arena is longer than MATCH.
    return load_each(prediction.tokens + tl.where(m_position, o_position, MATCH) - 1, MATCH, -1)


@triton.jit
def _ends_like(before, last, MATCH: tl.constexpr):
    """Whether the tokens of `load_before` are the last of the output, from the last on."""
    m_agree = before[0] == last[0]
    for i in tl.static_range(1, MATCH):
        m_agree &= before[i] == last[i]
    return m_agree


@triton.jit
def _local_looks(prediction, near, o_local, p_output, done, end):
    """``(done, position)`` of the first of ``output[done:end]``, `LOCAL_RANGE` at most, after which it ends
    like a position near the anchor; `NOWHERE` without one. near: `load_before` of these positions, `o_local`.
    """
    o_lane = tl.arange(0, c.LOCAL_RANGE)
    # No token of a prediction is below 0.
    b_tokens = tl.load(p_output + done + o_lane, mask=done + o_lane < end, other=-1)
    before = load_back_clamped(p_output + done - 1 + o_lane * 0, done - 1, c.LOCAL_MATCH)
    last = ()
    for i in tl.static_range(c.LOCAL_MATCH):
        last = last + (tl.where(done > i, before[i], -1),)
    b_first = tl.full([c.LOCAL_RANGE], c.NOWHERE, tl.int32)  # of each position
    for i in range(done, end, TURN):
        for k in tl.static_range(TURN):
            token = tl.gather(b_tokens, o_lane * 0 + (i - done + k), axis=0)
            last = (token,) + last[: c.LOCAL_MATCH - 1]
            b_first = tl.where(_ends_like(near, last, c.LOCAL_MATCH), tl.minimum(b_first, i + k + 1), b_first)
    m_local = (o_local >= c.LOCAL_MATCH) & (o_local <= prediction.length) & (b_first < c.NOWHERE)
    first = tl.min(tl.where(m_local, b_first, c.NOWHERE), axis=0)
    return first, tl.min(tl.where(m_local & (b_first == first), o_local, c.NOWHERE), axis=0)


@triton.jit
def _global_looks(prediction, anchor, p_output, o_done):
    """``(done, position)`` of the first check after which the output is back in sync, `NOWHERE` without one.

    o_done: [looks, 1], the output's tokens at each.
    """
    o_last = o_done - 1
    begin, end = nearest(prediction, load_bucket(prediction, tl.load(p_output + o_last)), anchor)
    o_entry = begin + tl.arange(0, c.NEAREST)[None, :]
    m_entry = o_entry < end
    o_position = tl.load(prediction.index.positions + tl.where(m_entry, o_entry, 0))
    m_entry &= (o_position >= c.GLOBAL_MATCH) & (o_position <= prediction.length)
    # Most differ in their last tokens.
    m_entry &= _ends_like(_load_before(prediction, o_position, 2), load_each(p_output + o_last, 2, -1), 2)
    looked = tl.full([], c.NOWHERE, tl.int32)
    position = looked
    if tl.max(m_entry.to(tl.int32)) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        texts = _load_before(prediction, tl.where(m_entry, o_position, c.GLOBAL_MATCH), c.GLOBAL_MATCH)
        m_same = m_entry & _ends_like(texts, load_each(p_output + o_last, c.GLOBAL_MATCH, -1), c.GLOBAL_MATCH)
        b_rank = tl.min(tl.where(m_same, c.rank_of(o_position, anchor), c.NOWHERE), axis=1, keep_dims=True)
        looked = tl.min(tl.where(b_rank < c.NOWHERE, o_done, c.NOWHERE))
        position = c.position_of(tl.min(tl.where(o_done == looked, b_rank, c.NOWHERE)), anchor)
    return looked, position


@triton.jit
def _resync(prediction, anchor, p_output, done, num_output):
    """``(done, position)`` of the first of ``output[done:num_output]`` after which it is in sync again, or
    `num_output` and `NOWHERE`. `LOCAL_RANGE` tokens a turn, all looks among them at once."""
    o_local = anchor + tl.arange(0, c.LOCAL_RANGE)
    near = _load_before(prediction, o_local, c.LOCAL_MATCH)
    position = tl.full([], c.NOWHERE, tl.int32)
    while (position == c.NOWHERE) & (done < num_output):
        end = tl.minimum(done + c.LOCAL_RANGE, num_output)
        first, position = _local_looks(prediction, near, o_local, p_output, done, end)
        look = (done // c.GLOBAL_EVERY + 1) * c.GLOBAL_EVERY
        last_look = tl.minimum(end, first - 1)
        if look <= last_look:
            o_done = look + tl.arange(0, c.LOCAL_RANGE // c.GLOBAL_EVERY)[:, None] * c.GLOBAL_EVERY
            # Another first look stands for one that is not due.
            o_done = tl.where(o_done <= last_look, o_done, look)
            looked, found = _global_looks(prediction, anchor, p_output, o_done)
            position = tl.where(looked < first, found, position)
            first = tl.minimum(first, looked)
        done = tl.minimum(first, end)
    return done, position


@triton.jit
def common_end(prediction, alignment, position, p_output, done):
    o_k = tl.arange(0, c.MAX_MATCH)
    m_k = o_k < tl.minimum(position - alignment.anchor, done - alignment.diverged_at)
    b_prediction = tl.load(prediction.tokens + position - 1 - o_k, mask=m_k, other=0)
    b_output = tl.load(p_output + done - 1 - o_k, mask=m_k, other=0)
    return tl.min(tl.where(m_k & (b_prediction == b_output), c.MAX_MATCH, o_k), axis=0)


@triton.jit
def _record_edit(edits, prediction, position, p_output, done, old, new):
    """The edits with one more."""
    m_key = position + 1 < prediction.length
    if m_key & (old <= c.MAX_EDIT_LEN) & (new <= c.MAX_EDIT_LEN):
        at, after = tl.load(prediction.tokens + position), tl.load(prediction.tokens + position + 1)
        m_same = (edits.b_at == at) & (edits.b_after == after) & (edits.b_old == old) & (edits.b_new == new)
        b_first = tl.load(p_output + edits.b_start, mask=m_same & (edits.b_new > 0), other=0)
        first = tl.load(p_output + done, mask=new > 0, other=0)
        seen_before = tl.max((m_same & (b_first == first)).to(tl.int32), axis=0)
        m_way = tl.arange(0, c.MAX_EDITS) == edits.count % c.MAX_EDITS
        edits = Edits(
            edits.count + 1,
            tl.where(m_way, at, edits.b_at),
            tl.where(m_way, after, edits.b_after),
            tl.where(m_way, done, edits.b_start),
            tl.where(m_way, old, edits.b_old),
            tl.where(m_way, new, edits.b_new),
            tl.where(m_way, seen_before, edits.b_seen_before),
            1,
        )
    return edits


@triton.jit
def _last_common(prediction, alignment, position, p_output, done):
    """``(old, new)``: tokens after the last one that what was edited has before and after, or all."""
    o_back = tl.arange(0, c.MAX_EDIT_LEN)
    m_old = o_back < position - alignment.anchor
    m_new = o_back < done - alignment.diverged_at
    b_old = tl.load(prediction.tokens + position - 1 - o_back, mask=m_old, other=0)
    b_new = tl.load(p_output + done - 1 - o_back, mask=m_new, other=0)
    m_same = (b_old[:, None] == b_new[None, :]) & m_old[:, None] & m_new[None, :]
    b_key = (o_back[:, None] + o_back[None, :]) * c.MAX_EDIT_LEN + o_back[:, None]
    key = tl.min(tl.min(tl.where(m_same, b_key, c.NOWHERE), axis=0), axis=0)
    old = tl.where(key < c.NOWHERE, key % c.MAX_EDIT_LEN, position - alignment.anchor)
    return old, tl.where(key < c.NOWHERE, key // c.MAX_EDIT_LEN - old, done - alignment.diverged_at)


@triton.jit
def record_edits(edits, prediction, alignment, position, p_output, done):
    """The edits with those that made ``output[diverged_at:done]`` of ``prediction[anchor:position]``."""
    for _ in range(c.MAX_EDITS_AT_ONCE):
        common = common_end(prediction, alignment, position, p_output, done)
        position -= common
        done -= common
        if (position > alignment.anchor) | (done > alignment.diverged_at):
            old, new = _last_common(prediction, alignment, position, p_output, done)
            position -= old
            done -= new
            edits = _record_edit(edits, prediction, position, p_output, done, old, new)
    return edits


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
            common = tl.minimum(a.num_common + run, c.MAX_MATCH)
            a = c.in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if (run < c.MAX_MATCH) & (done < num_output):
                a = c.diverge(a, done)
        if a.in_sync == 0:
            done, position = _resync(prediction, a.anchor, p_output, done, num_output)
            if position != c.NOWHERE:
                common = common_end(prediction, a, position, p_output, done)
                if position >= a.anchor:
                    edits = record_edits(edits, prediction, a, position, p_output, done)
                a = c.in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@triton.jit
def _store_columns(p_first, values, FIRST: tl.constexpr, NUM: tl.constexpr):
    """``values[FIRST : FIRST + NUM]`` to as many columns."""
    for i in tl.static_range(NUM):
        tl.store(p_first + i, values[FIRST + i])


@triton.jit
def load_state(request):
    p_align = request.align_state
    p_edits = request.edits + tl.arange(0, c.MAX_EDITS) * c.EDIT
    alignment = Alignment(*load_each(p_align + c.IN_SYNC, c.NUM_ALIGNMENT), tl.load(request.lcs_row))
    edits = Edits(tl.load(p_align + c.NUM_EDITS), *load_each(p_edits, c.EDIT), 0)
    return tl.load(p_align + c.SEEN), alignment, edits


@triton.jit
def _start_over(is_fresh, a, edits):
    """The alignment and the edits; of a fresh request in sync at the beginning, and none."""
    alignment = Alignment(
        tl.where(is_fresh, 1, a.in_sync), tl.where(is_fresh, 0, a.cursor), tl.where(is_fresh, 0, a.anchor),
        tl.where(is_fresh, 0, a.diverged_at), tl.where(is_fresh, 0, a.num_in_sync),
        tl.where(is_fresh, 0, a.num_common), tl.where(is_fresh, 0, a.row),
    )  # fmt: skip
    return alignment, Edits(
        tl.where(is_fresh, 0, edits.count), tl.where(is_fresh, c.NO_EDIT, edits.b_at), edits.b_after,
        edits.b_start, edits.b_old, edits.b_new, edits.b_seen_before, edits.is_changed,
    )  # fmt: skip


@triton.jit
def _store_registers(request, a, edits, is_fresh):
    """Write back what `load_state` loads; the edits where there is something new in them."""
    p_align = request.align_state
    tl.store(p_align + c.SEEN, request.total)
    tl.store(p_align + c.NUM_EDITS, edits.count)
    _store_columns(p_align + c.IN_SYNC, a, 0, c.NUM_ALIGNMENT)
    tl.store(request.lcs_row, a.row)
    # Carrying `is_fresh` in `is_changed` took 96 → 102 registers in a step with recipes for sm_90.
    if is_fresh | (edits.is_changed > 0):
        _store_columns(request.edits + tl.arange(0, c.MAX_EDITS) * c.EDIT, edits, 1, c.EDIT)


@triton.jit
def realign(request, state):
    """Process what is new of a request's output, after a `load_state`, and write its state back.

    Returns ``(alignment, edits)``, with the cursor where the output stands.
    """
    prediction = request.prediction
    seen, a, edits = state
    is_fresh = c.starts_over(request.total, seen)
    a, edits = _start_over(is_fresh, a, edits)
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = tl.where(prediction.length > 0, request.total - request.output_start, 0)
    p_output = request.tokens + request.output_start
    done = tl.maximum(tl.where(is_fresh, 0, seen) - request.output_start, 0)
    a, edits = _process_tokens(request, p_output, done, num_output, a, edits)
    if a.in_sync == 0:
        # Only the tokens since the output diverged last are in the row.
        first = tl.maximum(done, a.diverged_at)
        row = extend_rows(a.row, prediction, a.anchor, p_output, first, num_output)
        a = c.at_cursor(a, cursor_of(row, prediction, a.anchor), row)
    tl.debug_barrier()  # all threads have read what is written now
    _store_registers(request, a, edits, is_fresh)
    return a, edits

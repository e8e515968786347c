"""Device functions of a step that align a request's output with its prediction."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constexprs import *
from .lcs import extend_row, load_row, load_window, row_lengths, row_offsets
from .suffix_match import load_back, load_back_clamped, load_bucket, nearest, position_of, rank_of


class Alignment(NamedTuple):
    """Where a request stands."""

    in_sync: Any  # 1 while the output is in sync with the prediction, 0 after it diverged
    cursor: Any  # position of the prediction that comes next
    anchor: Any  # position of the prediction where the output diverged
    diverged_at: Any  # and of the output
    num_in_sync: Any  # output tokens that were in sync
    num_common: Any  # tokens before the cursor that are known to be the last of the output, while in sync
    b_words: Any  # [words] int32: bits of the LCS row behind the anchor


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
def load_key(prediction, o_position, m_position):
    """Tokens before, at and behind each position: the key of an edit."""
    before = tl.load(prediction.p_tokens + o_position - 1, mask=m_position & (o_position > 0), other=AT_START)
    at = tl.load(prediction.p_tokens + o_position, mask=m_position, other=0)
    return before, at, tl.load(prediction.p_tokens + o_position + 1, mask=m_position, other=0)


@triton.jit
def has_key(prediction, edits, o_position, m_position):
    """Whether each position has the key of each edit, [positions, MAX_EDITS]."""
    m_position = m_position & (o_position + 1 < prediction.length)
    before, at, behind = load_key(prediction, o_position, m_position)
    m_same = (before[:, None] == edits.b_before[None, :]) & (at[:, None] == edits.b_at[None, :])
    return m_same & (behind[:, None] == edits.b_behind[None, :]) & m_position[:, None]


@triton.jit
def run_length(prediction, cursor, p_output, done, num_output):
    """How many of the next `RUN` tokens of output and prediction agree."""
    o_i = tl.arange(0, RUN)
    m_i = o_i < tl.minimum(num_output - done, prediction.length - cursor)
    b_output = tl.load(p_output + done + o_i, mask=m_i, other=0)
    b_prediction = tl.load(prediction.p_tokens + cursor + o_i, mask=m_i, other=0)
    return tl.min(tl.where(m_i & (b_output == b_prediction), RUN, o_i), axis=0)


@triton.jit
def invalidate_edits(edits, prediction, cursor, run):
    """The edits without those whose key the output has just passed unedited, `run` positions from the cursor."""
    b_before = edits.b_before
    for i in range(0, run, EDIT_LOOKUPS):
        o_i = i + tl.arange(0, EDIT_LOOKUPS)
        m_edit = has_key(prediction, edits, cursor + o_i, o_i < run)
        b_before = tl.where(tl.max(m_edit.to(tl.int32), axis=0) > 0, NO_EDIT, b_before)
    is_changed = edits.is_changed | tl.max((b_before != edits.b_before).to(tl.int32), axis=0)
    return Edits(
        edits.count, b_before, edits.b_at, edits.b_behind, edits.b_start, edits.b_old, edits.b_new,
        edits.b_seen_before, is_changed,
    )  # fmt: skip


@triton.jit
def load_before(prediction, o_position, MATCH: tl.constexpr):
    """The MATCH tokens before each position, from the last on: a tuple of [lanes]; any if it has fewer."""
    m_position = (o_position >= MATCH) & (o_position <= prediction.length)
    # No load has a mask, see `match_length`. A page of the arena is longer than MATCH.
    return load_back(prediction.p_tokens + tl.where(m_position, o_position, MATCH) - 1, MATCH)


@triton.jit
def ends_like(prediction, o_position, before, last, done, MATCH: tl.constexpr):
    """Whether the last MATCH tokens of the output are those before each position, [lanes]."""
    m_agree = (o_position >= MATCH) & (o_position <= prediction.length) & (done >= MATCH)
    for i in tl.static_range(MATCH):
        m_agree &= before[i] == last[i]
    return m_agree


@triton.jit
def resync(prediction, anchor, near, recent, p_output, done):
    """`NOWHERE` where there is none. near, recent: `load_before` of the local positions, and likewise of the
    output."""
    o_local = anchor + tl.arange(0, LOCAL_RANGE)
    m_local = ends_like(prediction, o_local, near, recent, done, LOCAL_MATCH)
    position = tl.min(tl.where(m_local, o_local, NOWHERE), axis=0)
    if (position == NOWHERE) & (done % GLOBAL_EVERY == 0):
        begin, end = nearest(prediction, load_bucket(prediction, recent[0]), anchor)
        o_entry = begin + tl.arange(0, NEAREST)
        o_global = tl.load(prediction.p_positions + o_entry, mask=o_entry < end, other=0)
        # `GLOBAL_EVERY` tokens or more are there: no address needs a clamp.
        last = load_back(p_output + done - 1, GLOBAL_MATCH)
        before = load_before(prediction, o_global, GLOBAL_MATCH)
        m_global = ends_like(prediction, o_global, before, last, done, GLOBAL_MATCH)
        rank = tl.min(tl.where(m_global, rank_of(o_global, anchor), NOWHERE), axis=0)
        position = tl.where(rank == NOWHERE, NOWHERE, position_of(rank, anchor))
    return position


@triton.jit
def common_end(prediction, alignment, position, p_output, done):
    o_k = tl.arange(0, RUN)
    m_k = o_k < tl.minimum(position - alignment.anchor, done - alignment.diverged_at)
    b_prediction = tl.load(prediction.p_tokens + position - 1 - o_k, mask=m_k, other=0)
    b_output = tl.load(p_output + done - 1 - o_k, mask=m_k, other=0)
    return tl.min(tl.where(m_k & (b_prediction == b_output), RUN, o_k), axis=0)


@triton.jit
def record_edit(edits, prediction, alignment, old, new):
    """The edits with one more."""
    m_key = alignment.anchor + 1 < prediction.length
    if m_key & (old >= 0) & (old <= MAX_EDIT_LEN) & (new <= MAX_EDIT_LEN):
        before, at, behind = load_key(prediction, alignment.anchor, m_key)
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
    return Alignment(1, cursor, a.anchor, a.diverged_at, num_in_sync, num_common, a.b_words)


@triton.jit
def diverge(a, done):
    """The alignment diverged at its cursor, behind `done` output tokens, with a row of zeros."""
    return Alignment(
        0, a.cursor, a.cursor, done, a.num_in_sync, a.num_common, tl.full([ROW_WORDS], -1, tl.int32)
    )


@triton.jit
def at_cursor(a, cursor):
    """The alignment with another cursor."""
    return Alignment(a.in_sync, cursor, a.anchor, a.diverged_at, a.num_in_sync, a.num_common, a.b_words)


@triton.jit
def with_row(a, b_words):
    """The alignment with another LCS row."""
    return Alignment(a.in_sync, a.cursor, a.anchor, a.diverged_at, a.num_in_sync, a.num_common, b_words)


@triton.jit
def starts_over(context, seen):
    return (seen < 0) | (context.total < seen)


@triton.jit
def process_tokens(prediction, p_output, done, num_output, a, edits):
    """Process ``output[done:num_output]``: returns the `Alignment` `a` and the edits after it."""
    while done < num_output:
        if a.in_sync > 0:
            run = run_length(prediction, a.cursor, p_output, done, num_output)
            if edits.count > 0:
                edits = invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = tl.minimum(a.num_common + run, MAX_MATCH)
            a = in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if (run < RUN) & (done < num_output):
                a = diverge(a, done)
        if a.in_sync == 0:
            b_words = a.b_words
            position = tl.full([], NOWHERE, tl.int32)
            # What is behind the anchor stays what it is until the output is in sync again.
            b_window, b_bit = load_window(prediction.p_tokens, prediction.length, a.anchor)
            near = load_before(prediction, a.anchor + tl.arange(0, LOCAL_RANGE), LOCAL_MATCH)
            next_token = tl.load(p_output + done)  # a turn ahead: it waits for none of it
            recent = load_back_clamped(p_output + done - 1, done - 1, LOCAL_MATCH)
            # A loop of its own, which carries little from turn to turn.
            while (position == NOWHERE) & (done < num_output):
                recent = (next_token,) + recent[: LOCAL_MATCH - 1]
                done += 1
                next_token = tl.load(p_output + tl.minimum(done, num_output - 1))
                b_words = extend_row(b_words, b_window, b_bit, recent[0])
                position = resync(prediction, a.anchor, near, recent, p_output, done)
            a = with_row(a, b_words)
            if position != NOWHERE:
                common = common_end(prediction, a, position, p_output, done)
                old, new = position - common - a.anchor, done - common - a.diverged_at
                edits = record_edit(edits, prediction, a, old, new)
                a = in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@triton.jit
def load_state(p_align, p_edits):
    """``(seen, alignment, edits)`` of a slot as they were stored, without the row."""
    alignment = Alignment(
        tl.load(p_align + IN_SYNC), tl.load(p_align + CURSOR), tl.load(p_align + ANCHOR),
        tl.load(p_align + DIVERGED_AT), tl.load(p_align + NUM_IN_SYNC), tl.load(p_align + NUM_COMMON),
        tl.full([ROW_WORDS], -1, tl.int32),
    )  # fmt: skip
    p_ways = p_edits + tl.arange(0, MAX_EDITS) * EDIT
    edits = Edits(
        tl.load(p_align + NUM_EDITS), tl.load(p_ways + EDIT_BEFORE), tl.load(p_ways + EDIT_AT),
        tl.load(p_ways + EDIT_BEHIND), tl.load(p_ways + EDIT_START), tl.load(p_ways + EDIT_OLD),
        tl.load(p_ways + EDIT_NEW), tl.load(p_ways + EDIT_SEEN_BEFORE), 0,
    )  # fmt: skip
    return tl.load(p_align + SEEN), alignment, edits


@triton.jit
def start_over(is_fresh, a, edits):
    """The alignment and the edits; of a fresh request in sync at the beginning, and none."""
    alignment = Alignment(
        tl.where(is_fresh, 1, a.in_sync), tl.where(is_fresh, 0, a.cursor), tl.where(is_fresh, 0, a.anchor),
        tl.where(is_fresh, 0, a.diverged_at), tl.where(is_fresh, 0, a.num_in_sync),
        tl.where(is_fresh, 0, a.num_common), a.b_words,
    )  # fmt: skip
    return alignment, Edits(
        tl.where(is_fresh, 0, edits.count), tl.where(is_fresh, NO_EDIT, edits.b_before), edits.b_at,
        edits.b_behind, edits.b_start, edits.b_old, edits.b_new, edits.b_seen_before, edits.is_changed,
    )  # fmt: skip


@triton.jit
def store_state(a, edits, p_align, p_edits, is_fresh, total):
    """Write back what `load_state` loads, but for the row; the edits where there is something new in them."""
    tl.store(p_align + SEEN, total)
    tl.store(p_align + IN_SYNC, a.in_sync)
    tl.store(p_align + CURSOR, a.cursor)
    tl.store(p_align + ANCHOR, a.anchor)
    tl.store(p_align + DIVERGED_AT, a.diverged_at)
    tl.store(p_align + NUM_IN_SYNC, a.num_in_sync)
    tl.store(p_align + NUM_EDITS, edits.count)
    tl.store(p_align + NUM_COMMON, a.num_common)
    # Carrying `is_fresh` in `is_changed` took 96 → 102 registers in a step with recipes for sm_90.
    if is_fresh | (edits.is_changed > 0):
        p_ways = p_edits + tl.arange(0, MAX_EDITS) * EDIT
        tl.store(p_ways + EDIT_BEFORE, edits.b_before)
        tl.store(p_ways + EDIT_AT, edits.b_at)
        tl.store(p_ways + EDIT_BEHIND, edits.b_behind)
        tl.store(p_ways + EDIT_START, edits.b_start)
        tl.store(p_ways + EDIT_OLD, edits.b_old)
        tl.store(p_ways + EDIT_NEW, edits.b_new)
        tl.store(p_ways + EDIT_SEEN_BEFORE, edits.b_seen_before)


@triton.jit
def cursor_score(b_row, num_window):
    o_j = row_offsets() + 1
    b_key = (b_row * MATCH_WEIGHT - o_j) * J_KEYS + (-o_j + (J_KEYS - 1))
    b_key = tl.where(o_j <= num_window, b_key, J_KEYS - 1)
    top = tl.maximum(tl.max(tl.max(b_key, axis=0), axis=0), J_KEYS - 1)  # the last: j = 0, score 0
    return -(top % J_KEYS) + (J_KEYS - 1), top // J_KEYS


@triton.jit
def realign(prediction, context, state, p_align, p_row, p_edits):
    """Process what is new of a request's output, after a `load_state`, and write its state back.

    Returns ``(alignment, edits, top)``, with the cursor where the output stands, and `top` its score there.
    """
    seen, a, edits = state
    is_fresh = starts_over(context, seen)
    a, edits = start_over(is_fresh, a, edits)
    if a.in_sync == 0:
        a = with_row(a, load_row(p_row))
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = tl.where(prediction.length > 0, context.total - context.output_start, 0)
    p_output = context.p_tokens + context.output_start
    done = tl.maximum(tl.where(is_fresh, 0, seen) - context.output_start, 0)
    a, edits = process_tokens(prediction, p_output, done, num_output, a, edits)
    tl.debug_barrier()  # all threads have read what is written now
    store_state(a, edits, p_align, p_edits, is_fresh, context.total)
    top = 0
    if a.in_sync == 0:
        b_row = row_lengths(a.b_words)
        tl.store(p_row + row_offsets(), b_row.to(tl.int16))
        j, top = cursor_score(b_row, tl.minimum(prediction.length - a.anchor, WINDOW))
        a = at_cursor(a, a.anchor + j)
    return a, edits, top

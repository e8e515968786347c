"""Device functions that align a request's output with its prediction: the LCS row, resync, edits.

`reference` has the contract of each that both have.
"""

import triton
import triton.language as tl

from ..device import align, layout
from ..index.kernel import load_bucket, nearest
from . import Edits

#: Lanes for the tokens around the anchor, for those of a diverged output that are processed at once, and for
#: positions that are compared with all edits at once.
LANES = tl.constexpr(32)
#: Tokens of a diverged output in a turn of a loop.
TURN = tl.constexpr(4)


@triton.jit
def cursor_of(row, prediction, anchor):
    o_j = tl.arange(0, LANES)
    # The smallest of the lanes with the largest score: one key.
    b_key = align.score_at(row, tl.minimum(o_j, align.WINDOW)) * LANES + (-o_j + (LANES - 1))
    key = tl.max(tl.where(o_j <= tl.minimum(prediction.length - anchor, align.WINDOW), b_key, 0), axis=0)
    return anchor + (-(key % LANES) + (LANES - 1))


@triton.jit
def have_keys(prediction, edits, o_position, m_position):
    """Whether each position has the key of each edit, [positions, layout.MAX_EDITS]."""
    m_position = m_position & (o_position + 1 < prediction.length)
    b_at = tl.load(prediction.tokens + o_position, mask=m_position, other=0)
    b_after = tl.load(prediction.tokens + o_position + 1, mask=m_position, other=0)
    m_same = (b_at[:, None] == edits.at[None, :]) & (b_after[:, None] == edits.after[None, :])
    return m_same & m_position[:, None]


@triton.jit
def _run_length(prediction, cursor, p_output, done, num_output):
    o_i = tl.arange(0, align.MAX_COMMON)
    m_i = o_i < tl.minimum(num_output - done, prediction.length - cursor)
    b_output = tl.load(p_output + done + o_i, mask=m_i, other=0)
    b_prediction = tl.load(prediction.tokens + cursor + o_i, mask=m_i, other=0)
    return tl.min(tl.where(m_i & (b_output == b_prediction), align.MAX_COMMON, o_i), axis=0)


@triton.jit
def _invalidate_edits(edits, prediction, cursor, run):
    b_at = edits.at
    for i in range(0, run, LANES):
        o_i = i + tl.arange(0, LANES)
        m_edit = have_keys(prediction, edits, cursor + o_i, o_i < run)
        b_at = tl.where(tl.max(m_edit.to(tl.int32), axis=0) > 0, align.NO_EDIT, b_at)
    is_changed = edits.is_changed | tl.max((b_at != edits.at).to(tl.int32), axis=0)
    return align.with_keys(edits, edits.count, b_at, is_changed)


@triton.jit
def _agree(p_text, p_last, FIRST: tl.constexpr, END: tl.constexpr):
    """Whether the tokens from FIRST to before END, counted backwards from both, are the same."""
    m_agree = tl.load(p_text - FIRST) == tl.load(p_last - FIRST)
    for i in tl.static_range(FIRST + 1, END):
        m_agree &= tl.load(p_text - i) == tl.load(p_last - i)
    return m_agree


@triton.jit
def _global_looks(prediction, anchor, p_output, o_done):
    """``(done, position)`` of the first check after which the output is back in sync, `NOWHERE` without one.

    o_done: [looks, 1], the output's tokens at each. No load has a mask, see `match_length`.
    """
    p_last = p_output + o_done - 1
    begin, end = nearest(prediction, load_bucket(prediction, tl.load(p_last)), anchor, align.NEAREST)
    o_entry = begin + tl.arange(0, align.NEAREST)[None, :]
    m_entry = o_entry < end
    o_position = tl.load(prediction.index.positions + tl.where(m_entry, o_entry, 0))
    m_entry &= o_position >= align.GLOBAL_MATCH
    # Most differ in their last tokens.
    p_text = prediction.tokens + tl.where(m_entry, o_position, align.GLOBAL_MATCH) - 1
    m_entry &= _agree(p_text, p_last, 0, 2)
    looked = tl.full([], layout.NOWHERE, tl.int32)
    position = looked
    if tl.max(m_entry.to(tl.int32)) > 0:
        # Lanes that are done load one token all together: each place in memory takes a load longer.
        p_text = prediction.tokens + tl.where(m_entry, o_position, align.GLOBAL_MATCH) - 1
        m_same = m_entry & _agree(p_text, p_last, 2, align.GLOBAL_MATCH)
        b_rank = tl.min(
            tl.where(m_same, align.rank_of(o_position, anchor), layout.NOWHERE), axis=1, keep_dims=True
        )
        looked = tl.min(tl.where(b_rank < layout.NOWHERE, o_done, layout.NOWHERE))
        position = align.position_of(tl.min(tl.where(o_done == looked, b_rank, layout.NOWHERE)), anchor)
    return looked, position


@triton.jit
def _word_of(b_window, b_bit, token):
    """The bits of the lanes that have the token."""
    return tl.reduce_or(tl.where(b_window == token, b_bit, 0), axis=0)


@triton.jit
def _resync(prediction, a, p_output, done, num_output):
    """``(done, position, row)`` of the first of ``output[done:num_output]`` after which it is in sync again, or
    `num_output`, `NOWHERE` and the LCS row of all. `LANES` tokens a turn, all global looks among them at once.

    A word has a bit for each token around the anchor: `LOCAL_MATCH` before it, `WINDOW` after it.
    """
    o_lane = tl.arange(0, LANES)
    o_window = a.anchor - align.LOCAL_MATCH + o_lane
    m_window = (o_window >= 0) & (o_window < prediction.length)
    b_window = tl.load(prediction.tokens + o_window, mask=m_window, other=0)
    b_bit = tl.where(m_window, tl.full([LANES], 1, tl.int32) << o_lane, 0)
    words = ()  # of the tokens before, the latest first
    for k in tl.static_range(1, align.LOCAL_MATCH):
        token = tl.load(p_output + tl.maximum(done - k, 0))
        words = words + (tl.where(done >= k, _word_of(b_window, b_bit, token), 0),)
    row = a.lcs_row
    position = tl.full([], layout.NOWHERE, tl.int32)
    while (position == layout.NOWHERE) & (done < num_output):
        end = tl.minimum(done + LANES, num_output)
        # No token of a prediction is below 0.
        b_tokens = tl.load(p_output + done + o_lane, mask=done + o_lane < end, other=-1)
        first = position  # tokens after which the window has the last `LOCAL_MATCH`,
        ends = tl.zeros([], tl.int32)  # and the bits where these end
        i = done
        while (ends == 0) & (i < end):
            for k in tl.static_range(TURN):
                b_token = tl.gather(b_tokens, o_lane * 0 + (i - done + k), axis=0)
                word = _word_of(b_window, b_bit, b_token)
                matches = word.to(tl.uint32, bitcast=True) >> align.LOCAL_MATCH
                row = align.extend_row(row, matches.to(tl.int32, bitcast=True))
                here = word
                for j in tl.static_range(align.LOCAL_MATCH - 1):
                    here &= words[j] << (j + 1)
                words = (word,) + words[: align.LOCAL_MATCH - 2]
                first = tl.where((ends == 0) & (here != 0), i + k + 1, first)
                ends = tl.where(ends == 0, here, ends)
            i += TURN
        if ends != 0:
            lane = tl.min(tl.where((ends & b_bit) != 0, o_lane, LANES), axis=0)
            position = a.anchor + lane - (align.LOCAL_MATCH - 1)
        look = (done // align.GLOBAL_EVERY + 1) * align.GLOBAL_EVERY
        last_look = tl.minimum(end, first - 1)
        if look <= last_look:
            o_done = look + tl.arange(0, LANES // align.GLOBAL_EVERY)[:, None] * align.GLOBAL_EVERY
            # Another first look stands for one that is not due.
            o_done = tl.where(o_done <= last_look, o_done, look)
            looked, found = _global_looks(prediction, a.anchor, p_output, o_done)
            position = tl.where(looked < first, found, position)
            first = tl.minimum(first, looked)
        done = tl.minimum(first, end)
    return done, position, row


@triton.jit
def common_end(prediction, alignment, position, p_output, done):
    o_k = tl.arange(0, align.MAX_COMMON)
    m_k = o_k < tl.minimum(position - alignment.anchor, done - alignment.diverged_at)
    b_prediction = tl.load(prediction.tokens + position - 1 - o_k, mask=m_k, other=0)
    b_output = tl.load(p_output + done - 1 - o_k, mask=m_k, other=0)
    return tl.min(tl.where(m_k & (b_prediction == b_output), align.MAX_COMMON, o_k), axis=0)


@triton.jit
def _record_edit(edits, prediction, position, p_output, done, old, new):
    m_key = position + 1 < prediction.length
    if m_key & (old <= align.MAX_EDIT_LEN) & (new <= align.MAX_EDIT_LEN):
        at, after = tl.load(prediction.tokens + position), tl.load(prediction.tokens + position + 1)
        m_same = (edits.at == at) & (edits.after == after) & (edits.old == old) & (edits.new == new)
        b_first = tl.load(p_output + edits.start, mask=m_same & (edits.new > 0), other=0)
        first = tl.load(p_output + done, mask=new > 0, other=0)
        seen_before = tl.max((m_same & (b_first == first)).to(tl.int32), axis=0)
        m_way = tl.arange(0, layout.MAX_EDITS) == edits.count % layout.MAX_EDITS
        edits = Edits(
            edits.count + 1,
            tl.where(m_way, at, edits.at),
            tl.where(m_way, after, edits.after),
            tl.where(m_way, done, edits.start),
            tl.where(m_way, old, edits.old),
            tl.where(m_way, new, edits.new),
            tl.where(m_way, seen_before, edits.seen_before),
            1,
        )
    return edits


@triton.jit
def _last_common(prediction, alignment, position, p_output, done):
    o_back = tl.arange(0, align.MAX_EDIT_LEN)
    m_old = o_back < position - alignment.anchor
    m_new = o_back < done - alignment.diverged_at
    b_old = tl.load(prediction.tokens + position - 1 - o_back, mask=m_old, other=0)
    b_new = tl.load(p_output + done - 1 - o_back, mask=m_new, other=0)
    m_same = (b_old[:, None] == b_new[None, :]) & m_old[:, None] & m_new[None, :]
    b_key = (o_back[:, None] + o_back[None, :]) * align.MAX_EDIT_LEN + o_back[:, None]
    key = tl.min(tl.min(tl.where(m_same, b_key, layout.NOWHERE), axis=0), axis=0)
    old = tl.where(key < layout.NOWHERE, key % align.MAX_EDIT_LEN, position - alignment.anchor)
    return old, tl.where(key < layout.NOWHERE, key // align.MAX_EDIT_LEN - old, done - alignment.diverged_at)


@triton.jit
def record_edits(edits, prediction, alignment, position, p_output, done):
    num = 0
    while (num < align.MAX_EDITS_AT_ONCE) & ((position > alignment.anchor) | (done > alignment.diverged_at)):
        num += 1
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
def realign(request, seen, a, edits):
    prediction = request.prediction
    p_output = request.tokens + request.output_start
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = tl.where(prediction.length > 0, request.total - request.output_start, 0)
    done = tl.maximum(seen - request.output_start, 0)
    while done < num_output:
        if a.in_sync > 0:
            run = _run_length(prediction, a.cursor, p_output, done, num_output)
            if edits.count > 0:
                edits = _invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = tl.minimum(a.num_common + run, align.MAX_COMMON)
            a = align.in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if (run < align.MAX_COMMON) & (done < num_output):
                a = align.diverge(a, done)
        if a.in_sync == 0:
            done, position, row = _resync(prediction, a, p_output, done, num_output)
            if position == layout.NOWHERE:
                a = align.at_cursor(a, cursor_of(row, prediction, a.anchor), row)
            else:
                common = common_end(prediction, a, position, p_output, done)
                if position >= a.anchor:
                    edits = record_edits(edits, prediction, a, position, p_output, done)
                a = align.in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@triton.jit
def score_deficit(position, alignment):
    b_deficit = align.deficit_of(position - alignment.cursor)
    if alignment.in_sync == 0:
        o_j = position - alignment.anchor
        m_window = (o_j >= 0) & (o_j <= align.WINDOW)
        top = align.score_at(alignment.lcs_row, alignment.cursor - alignment.anchor)
        b_score = align.score_at(alignment.lcs_row, tl.where(m_window, o_j, 0))
        b_deficit = tl.where(m_window, top - b_score, align.FAR_DEFICIT)
    return b_deficit

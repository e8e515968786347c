"""Device functions of a step that fold new output into the alignment with the prediction.

Away from the prediction, H of the LCS with the `WINDOW` tokens behind the anchor is kept as the bits of 8 words of
32: bit j % 32 of word j // 32 is 0 where H rises from j to j + 1. One token of the output turns the bits V into
(Hyyrö 2004)::

    M = the bits j with text[anchor + j] == token
    V = (V + (V & M)) | (V & ~M)          # one addition over all words, carries run from word to word

Edits are six blocks of [`EDITS`], one for each column.
"""

import triton
import triton.language as tl

from ..index.kernels import _nearest_part
from ..layout import (
    AT_START,
    EDITS,
    FAR_EVERY,
    FAR_MATCH,
    MATCH_WEIGHT,
    MAX_EDIT,
    NEAR,
    NEAR_MATCH,
    NEAREST,
    NO_EDIT,
    WINDOW,
)

_AT_START = tl.constexpr(AT_START)
_NO_EDIT = tl.constexpr(NO_EDIT)
_EDITS = tl.constexpr(EDITS)
_MAX_EDIT = tl.constexpr(MAX_EDIT)
_NEAR = tl.constexpr(NEAR)
_NEAR_MATCH = tl.constexpr(NEAR_MATCH)
_NEAREST = tl.constexpr(NEAREST)
_FAR_EVERY = tl.constexpr(FAR_EVERY)
_FAR_MATCH = tl.constexpr(FAR_MATCH)
_MATCH_WEIGHT = tl.constexpr(MATCH_WEIGHT)
_WINDOW = tl.constexpr(WINDOW)
_WORDS = tl.constexpr(WINDOW // 32)
_NOWHERE = tl.constexpr(0x7FFFFFFF)
#: Most tokens that are compared at once, and counted as a match.
_RUN = tl.constexpr(64)
#: Places whose edits are looked for at once.
_LOOK = tl.constexpr(32)


@triton.jit
def _load_key(p_text, o_place, m_place):
    """Tokens before, at and behind each place: what an edit is recognised by."""
    before = tl.load(p_text + o_place - 1, mask=m_place & (o_place > 0), other=_AT_START)
    at = tl.load(p_text + o_place, mask=m_place, other=0)
    return before, at, tl.load(p_text + o_place + 1, mask=m_place, other=0)


@triton.jit
def _row_offsets():
    """[_WORDS, 32]: which token of the window each bit stands for."""
    return tl.arange(0, _WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _load_row(p_row):
    """The words of a stored row, [_WORDS] int32. ``row[j]`` is H of the first j + 1 tokens of the window."""
    o_j = _row_offsets()
    b_common = tl.load(p_row + o_j).to(tl.int32)
    b_before = tl.load(p_row + o_j - 1, mask=o_j > 0, other=0).to(tl.int32)
    return tl.sum((1 - (b_common - b_before)) << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def _row_of(b_words):
    """H behind each token of the window, [_WORDS, 32] int32: the opposite of `_load_row`."""
    b_rise = (~b_words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    b_total = tl.sum(b_rise, axis=1)
    return (tl.cumsum(b_total, axis=0) - b_total)[:, None] + tl.cumsum(b_rise, axis=1)


@triton.jit
def _extend_row(b_words, p_text, num_text, anchor, token):
    """The words after one more token of the output, [_WORDS] int32."""
    o_place = anchor + _row_offsets()
    m_place = o_place < num_text
    m_same = m_place & (tl.load(p_text + o_place, mask=m_place, other=0) == token)
    b_match = tl.sum(tl.where(m_same, 1 << tl.arange(0, 32)[None, :], 0), axis=1)
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
def _standing(b_row, num_window):
    """``(j, score)``: the smallest j with the largest ``MATCH_WEIGHT * H[j] - j``, ``0 <= j <= num_window``."""
    o_j = _row_offsets() + 1
    b_key = (_MATCH_WEIGHT * b_row - o_j) * 512 + (511 - o_j)
    b_key = tl.where(o_j <= num_window, b_key, 511)
    top = tl.maximum(tl.max(tl.max(b_key, axis=1), axis=0), 511)  # 511: j = 0, score 0
    return 511 - top % 512, top // 512


@triton.jit
def _run(p_text, num_text, cursor, p_output, done, num_output):
    """How many of the next `_RUN` tokens of output and prediction agree."""
    o_i = tl.arange(0, _RUN)
    m_i = o_i < tl.minimum(num_output - done, num_text - cursor)
    b_output = tl.load(p_output + done + o_i, mask=m_i, other=0)
    b_text = tl.load(p_text + cursor + o_i, mask=m_i, other=0)
    return tl.min(tl.where(m_i & (b_output == b_text), _RUN, o_i), axis=0)


@triton.jit
def _kill_edits(b_before, b_at, b_behind, p_text, num_text, cursor, run):
    """`b_before` without the edits of the places that a run of the output has left as they were."""
    b_left = b_before
    for i in range(0, run, _LOOK):
        o_i = i + tl.arange(0, _LOOK)
        o_place = cursor + o_i
        m_place = (o_i < run) & (o_place + 1 < num_text)
        before, at, behind = _load_key(p_text, o_place, m_place)
        m_same = (before[:, None] == b_before[None, :]) & (at[:, None] == b_at[None, :])
        m_same = m_same & (behind[:, None] == b_behind[None, :]) & m_place[:, None]
        b_left = tl.where(tl.max(m_same.to(tl.int32), axis=0) > 0, _NO_EDIT, b_left)
    return b_left


@triton.jit
def _agrees(p_text, num_text, o_end, p_output, done, MATCH: tl.constexpr):
    """Whether the last MATCH tokens of the output are those before each end, [lanes]; ends beyond are none."""
    o_k = tl.arange(0, MATCH)[:, None]
    m_k = (o_k < done) & (o_k < o_end[None, :]) & (o_end[None, :] <= num_text)
    b_output = tl.load(p_output + done - 1 - o_k, mask=o_k < done, other=0)
    b_text = tl.load(p_text + o_end[None, :] - 1 - o_k, mask=m_k, other=0)
    return tl.min((m_k & (b_text == b_output)).to(tl.int32), axis=0) > 0


@triton.jit
def _find_back(p_text, num_text, p_order, p_first, shift, anchor, p_output, done, token):
    """The end at which the output is back in the prediction, or `_NOWHERE`; `token` is its last.

    ::

        for end in range(anchor, anchor + NEAR):
            if the last NEAR_MATCH tokens of the output are those before `end`: return end
        if done % FAR_EVERY == 0:
            return the nearest of the ends in _nearest(token) before which the last FAR_MATCH are
    """
    o_end = anchor + tl.arange(0, _NEAR)
    m_end = _agrees(p_text, num_text, o_end, p_output, done, _NEAR_MATCH)
    end = tl.min(tl.where(m_end, o_end, _NOWHERE), axis=0)
    if (end == _NOWHERE) & (done % _FAR_EVERY == 0):
        begin, stop = _nearest_part(p_order, p_first, token, shift, num_text, anchor)
        o_entry = begin + tl.arange(0, _NEAREST)
        o_far = tl.load(p_order + o_entry, mask=o_entry < stop, other=0)
        m_far = _agrees(p_text, num_text, o_far, p_output, done, _FAR_MATCH)
        # At the same distance the one ahead: its rank is even.
        b_rank = tl.where(o_far >= anchor, 2 * (o_far - anchor), 2 * (anchor - o_far) + 1)
        rank = tl.min(tl.where(m_far, b_rank, _NOWHERE), axis=0)
        away = tl.where(rank % 2 == 0, rank // 2, -(rank // 2))
        end = tl.where(rank == _NOWHERE, _NOWHERE, anchor + away)
    return end


@triton.jit
def _same_before(p_text, anchor, end, p_output, left_at, done):
    """Common suffix, up to `_RUN`, of ``text[anchor:end]`` and of the output since it left."""
    o_k = tl.arange(0, _RUN)
    m_k = o_k < tl.minimum(end - anchor, done - left_at)
    b_text = tl.load(p_text + end - 1 - o_k, mask=m_k, other=0)
    b_output = tl.load(p_output + done - 1 - o_k, mask=m_k, other=0)
    return tl.min(tl.where(m_k & (b_text == b_output), _RUN, o_k), axis=0)


@triton.jit
def _fold(
    p_text, num_text, p_order, p_first, shift, p_output, done, num_output,
    follows, cursor, anchor, left_at, followed, num_edits, b_words,
    b_before, b_at, b_behind, b_start, b_old, b_new,
):  # fmt: skip
    """Take in the output tokens from `done` on; returns the last two lines of arguments, and if edits changed.

    ::

        while done < num_output:
            if follows:
                run of tokens that are those at the cursor: kill the edits met, move all of
                done, cursor and followed on; at a token that is not: leave, with H = 0
            if not follows:
                extend the row by the token; if that brings the output back: record the edit, follow
    """
    edits_changed = 0
    while done < num_output:
        if follows > 0:
            run = _run(p_text, num_text, cursor, p_output, done, num_output)
            if num_edits > 0:
                b_left = _kill_edits(b_before, b_at, b_behind, p_text, num_text, cursor, run)
                edits_changed |= tl.max((b_left != b_before).to(tl.int32), axis=0)
                b_before = b_left
            done += run
            cursor += run
            followed += run
            if (run < _RUN) & (done < num_output):
                follows = 0
                anchor = cursor
                left_at = done
                b_words = tl.full([_WORDS], -1, tl.int32)
        if follows == 0:
            token = tl.load(p_output + done)
            done += 1
            b_words = _extend_row(b_words, p_text, num_text, anchor, token)
            end = _find_back(p_text, num_text, p_order, p_first, shift, anchor, p_output, done, token)
            if end != _NOWHERE:
                same = _same_before(p_text, anchor, end, p_output, left_at, done)
                old = end - same - anchor
                new = done - same - left_at
                if (anchor + 1 < num_text) & (old >= 0) & (old <= _MAX_EDIT) & (new <= _MAX_EDIT):
                    before, at, behind = _load_key(p_text, anchor, anchor + 1 < num_text)
                    m_way = tl.arange(0, _EDITS) == num_edits % _EDITS
                    b_before = tl.where(m_way, before, b_before)
                    b_at = tl.where(m_way, at, b_at)
                    b_behind = tl.where(m_way, behind, b_behind)
                    b_start = tl.where(m_way, left_at, b_start)
                    b_old = tl.where(m_way, old, b_old)
                    b_new = tl.where(m_way, new, b_new)
                    num_edits += 1
                    edits_changed = 1
                follows = 1
                cursor = end
                followed += same
    return (
        follows, cursor, anchor, left_at, followed, num_edits, b_words,
        b_before, b_at, b_behind, b_start, b_old, b_new, edits_changed,
    )  # fmt: skip

"""Device functions of a step that weigh the candidates of a request and compose its draft.

Candidates are lanes: four matches in the prediction, the window around the cursor, four matches in the own
context, then nothing.
"""

import triton
import triton.language as tl

from ..index.kernels import _bucket, _match_lengths, _nearest_part
from ..layout import EDITS, MATCH_WEIGHT, MAX_REPLAYS, NEAREST, WAYS
from ..realign.kernels import _LOOK, _load_key
from .tables import (
    MAX_MATCH,
    NUM_MARGINS,
    NUM_PLACES,
    NUM_TRUSTS,
    PLACE_CONTEXT,
    WINDOW_AHEAD,
    WINDOW_BEHIND,
)

_MAX_MATCH = tl.constexpr(MAX_MATCH)
_NUM_MARGINS = tl.constexpr(NUM_MARGINS)
_NUM_PLACES = tl.constexpr(NUM_PLACES)
_NUM_TRUSTS = tl.constexpr(NUM_TRUSTS)
_PLACE_CONTEXT = tl.constexpr(PLACE_CONTEXT)
_BEHIND = tl.constexpr(WINDOW_BEHIND)
_AHEAD = tl.constexpr(WINDOW_AHEAD)
_MATCH_WEIGHT = tl.constexpr(MATCH_WEIGHT)
_MAX_REPLAYS = tl.constexpr(MAX_REPLAYS)
_EDITS = tl.constexpr(EDITS)
_NEAREST = tl.constexpr(NEAREST)
_WAYS = tl.constexpr(WAYS)
#: Best matches of each source that are candidates; the lane of the cursor and of the first match in the context.
_BEST = tl.constexpr(4)
_AT_CURSOR = tl.constexpr(4 + WINDOW_BEHIND)
_OWN = tl.constexpr(4 + WINDOW_BEHIND + 1 + WINDOW_AHEAD)
_LANES = tl.constexpr(32)
#: Lanes in which matches are looked for: `NEAREST` in the prediction, `WAYS` in the context.
_LOOKED = tl.constexpr(64)
#: A match is a key of 31 bits: its length less one, then the rest, larger for the better of two as long.
_REST = tl.constexpr(1 << 25)
_WHOLE = tl.constexpr((1 << 26) - 1)
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _at(b_values, lane):
    """One lane's value."""
    return tl.sum(tl.where(tl.arange(0, _LANES) == lane, b_values, 0), axis=0)


@triton.jit
def _find_matches(
    p_text, num_text, p_order, p_first, shift, cursor, num_output,
    p_recent, recent_shift, uses_context, p_context, total, min_match, min_context_match,
):  # fmt: skip
    """Keys of the matches, [_LOOKED] int32, -1 for none: lanes below `NEAREST` are in the prediction.

    ::

        for e in nearest(token):    key = (matched, nearest to the cursor, or of two the one ahead)
        for e in recent[token]:     key = (matched, latest)
    """
    o_c = tl.arange(0, _LOOKED)
    token = tl.load(p_context + total - 1, mask=total > 0, other=0)
    begin, stop = _nearest_part(p_order, p_first, token, shift, tl.where(num_output > 0, num_text, 0), cursor)
    p_ways = p_recent + _bucket(token, recent_shift) * _WAYS
    m_own = (o_c >= _NEAREST) & (o_c < tl.where(uses_context, _NEAREST + _WAYS, 0))
    o_own = tl.load(p_ways + o_c - _NEAREST, mask=m_own, other=0)
    m_text = o_c < tl.minimum(stop - begin, _NEAREST)
    o_end = tl.load(p_order + begin + o_c, mask=m_text, other=0)
    o_end = tl.where(m_own, tl.where(o_own < total, o_own, 0), o_end)
    num_last = tl.where(m_own, total, num_output)
    b_room = tl.maximum(tl.minimum(tl.minimum(o_end, num_last), _MAX_MATCH), 0)
    p_end = tl.where(m_own, p_context + o_end, p_text + o_end)
    b_matched = _match_lengths(p_end, b_room, p_context + total, total, 8)
    b_rank = tl.where(o_end >= cursor, 2 * (o_end - cursor), 2 * (cursor - o_end) + 1)
    b_key = (b_matched - 1) * _REST + tl.where(m_own, o_end, _REST - 1 - b_rank)
    b_least = tl.where(m_own, min_context_match, min_match)
    return tl.where(b_matched >= b_least, b_key, -1)


@triton.jit
def _best_matches(b_key, cursor):
    """``(position, matched)`` of the best of each source in the lanes that they have, [_LANES]; -1, 0 for none."""
    o_looked = tl.arange(0, _LOOKED)
    o_c = tl.arange(0, _LANES)
    b_text = tl.where(o_looked < _NEAREST, b_key, -1)
    b_own = tl.where(o_looked < _NEAREST, -1, b_key)
    b_best = tl.full([_LANES], -1, tl.int32)
    for i in tl.static_range(_BEST):
        text = tl.max(b_text, axis=0)
        own = tl.max(b_own, axis=0)
        b_best = tl.where(o_c == i, text, tl.where(o_c == _OWN + i, own, b_best))
        b_text = tl.where(b_text == text, -1, b_text)
        b_own = tl.where(b_own == own, -1, b_own)
    rest = b_best % _REST
    b_rank = _REST - 1 - rest
    o_text = cursor + tl.where(b_rank % 2 == 0, b_rank // 2, -(b_rank // 2))
    o_position = tl.where(o_c < _OWN, o_text, rest)
    return tl.where(b_best >= 0, o_position, -1), tl.where(b_best >= 0, b_best // _REST + 1, 0)


@triton.jit
def _candidates(
    p_text, num_text, p_order, p_first, shift, cursor, num_output,
    p_recent, recent_shift, uses_context, p_context, total, min_match, min_context_match,
):  # fmt: skip
    """``(position, matched)`` of every candidate, [_LANES] int32; position -1 where there is none."""
    o_c = tl.arange(0, _LANES)
    b_key = _find_matches(
        p_text, num_text, p_order, p_first, shift, cursor, num_output,
        p_recent, recent_shift, uses_context, p_context, total, min_match, min_context_match,
    )  # fmt: skip
    o_position, b_matched = _best_matches(b_key, cursor)
    o_window = cursor + o_c - _AT_CURSOR
    m_window = (o_c >= _BEST) & (o_c < _OWN) & (o_window >= 0) & (o_window < num_text)
    b_room = tl.where(m_window, tl.minimum(tl.minimum(o_window, num_output), _MAX_MATCH), 0)
    b_matched += _match_lengths(p_text + o_window, b_room, p_context + total, num_output, 16)
    return tl.where(m_window, o_window, o_position), b_matched


@triton.jit
def _margins(b_token, b_matched, m_live, followed, num_output):
    """Matched tokens ahead of the longest match that expects another token next, [_LANES] int32.

    A prediction that the output does not follow has no say in it.
    """
    o_c = tl.arange(0, _LANES)
    m_heard = m_live & (o_c >= tl.where(8 * followed < num_output, _OWN, 0))
    b_reach = tl.where(m_heard, b_matched, -1)
    reach = tl.max(b_reach, axis=0)
    first = tl.min(tl.where(b_reach == reach, o_c, _LANES), axis=0)
    m_agrees = b_token == _at(b_token, first)
    rival = tl.max(tl.where(m_agrees, 0, tl.where(m_heard, b_matched, 0)), axis=0)
    # Where nothing is heard, nothing is ahead of anything.
    return tl.where(m_live, b_matched - tl.where(m_agrees, rival, tl.maximum(reach, 0)), 0)


@triton.jit
def _drops(o_position, cursor, follows, p_row, anchor, num_window, top):
    """How much worse than the cursor each position stands, [_LANES] int32.

    Following: the tokens skipped, and two to go back. Else what `MATCH_WEIGHT` * H[j] - j is below its largest,
    `top`, at j = position - anchor; 99 outside the window.
    """
    away = o_position - cursor
    b_drop = tl.where(away > 0, away, 2 - away)
    if follows == 0:
        o_j = o_position - anchor
        m_row = (o_j >= 1) & (o_j <= num_window)
        b_common = tl.load(p_row + o_j - 1, mask=m_row, other=0).to(tl.int32)
        m_window = (o_j >= 0) & (o_j <= num_window)
        b_drop = tl.where(m_window, top - (_MATCH_WEIGHT * b_common - o_j), 99)
    return b_drop


@triton.jit
def _places(o_position, cursor, b_drop):
    """Place of every candidate, [_LANES] int32, see `gpu_align.ops.draft.tables`."""
    away = o_position - cursor
    near = tl.where(b_drop <= 2, 2, tl.where(b_drop <= 5, 3, 4))
    place = tl.where((away >= -_BEHIND) & (away <= _AHEAD), near, tl.where(b_drop <= 16, 5, 6))
    place = tl.where((away == 0) | (away == 1), away, place)
    return tl.where(tl.arange(0, _LANES) < _OWN, place, _PLACE_CONTEXT)


@triton.jit
def _classes(b_matched, b_margin, b_place, followed, num_output, length_bucket_ptr, margin_bucket_ptr):
    """Class of every candidate, [_LANES] int32."""
    trust = tl.where(8 * followed < num_output, 0, tl.where(2 * followed < num_output, 1, 2))
    evidence = tl.load(length_bucket_ptr + b_matched) * _NUM_MARGINS
    evidence += tl.load(margin_bucket_ptr + b_margin + _MAX_MATCH)
    return (evidence * _NUM_PLACES + b_place) * _NUM_TRUSTS + trust


@triton.jit
def _choose(b_class, b_matched, m_live, is_whole, keep_ptr, gain_ptr, length_quarters, K: tl.constexpr):
    """``(lane, num, gain)`` of the candidate with the largest gain, the lower lane of two; 0, 0 where all are 0.

    Gains are below ``K * 2**16``, K at most 256: with the lane they are a key of 31 bits. A whole output beats
    all.
    """
    o_c = tl.arange(0, _LANES)
    m_whole = o_c == tl.where(is_whole, _AT_CURSOR, _LANES)
    b_num = tl.minimum(length_quarters * (b_matched + 1) // 4, K)
    b_num = tl.where(b_matched >= _MAX_MATCH, K, b_num)
    b_num = tl.minimum(b_num, tl.load(keep_ptr + b_class, mask=m_live, other=0))
    b_gain = tl.load(gain_ptr + b_class * (K + 1) + b_num, mask=m_live, other=0)
    b_num = tl.where(m_whole, K, b_num)
    b_gain = tl.where(m_whole, _WHOLE, b_gain)
    top = tl.max(tl.where(m_live, b_gain * _LANES + (_LANES - 1 - o_c), 0), axis=0)
    lane = _LANES - 1 - top % _LANES
    return lane, tl.where(top >= _LANES, _at(b_num, lane), 0), top // _LANES


@triton.jit
def _compose(
    p_text, num_text, position, num, output_start, num_edits,
    b_before, b_at, b_behind, b_start, b_old, b_new, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``(offset [BLOCK_K], from_context [BLOCK_K], num)``: where each draft is read, and how many there are.

    ::

        while len(draft) < num and position < num_text:
            edit = the latest with the key of `position` and position + old <= num_text
            if there is none, or MAX_REPLAYS were replayed:
                draft += [text[position]]; position += 1
            else:
                draft += context[output_start + start:][:new]; position += old
                draft += text[position : position + 1]; position += 1      # without a look for edits
        return draft[:num]
    """
    o_k = tl.arange(0, BLOCK_K)
    o_way = tl.arange(0, _EDITS)
    o_source = position + o_k
    b_context = tl.zeros([BLOCK_K], tl.int32)
    # From draft `since` on the text is read on from `position`; edits are looked for from `clear` on.
    since = 0
    clear = 0
    replays = tl.where(num_edits > 0, 0, _MAX_REPLAYS)
    while (replays < _MAX_REPLAYS) & (clear < num):
        o_look = clear + tl.arange(0, _LOOK)
        o_place = position + o_look - since
        m_place = (o_look < num) & (o_place + 1 < num_text)
        before, at, behind = _load_key(p_text, o_place, m_place)
        m_edit = (before[:, None] == b_before[None, :]) & (at[:, None] == b_at[None, :])
        m_edit = m_edit & (behind[:, None] == b_behind[None, :]) & m_place[:, None]
        m_edit = m_edit & (o_place[:, None] + b_old[None, :] <= num_text)
        # The first place with an edit, and of its edits the latest: `age` 0 is that of the last way written.
        b_age = (num_edits - 1 - o_way) & (_EDITS - 1)
        b_key = tl.where(m_edit, (o_look * _EDITS)[:, None] + b_age[None, :], _NONE)
        key = tl.min(tl.min(b_key, axis=0), axis=0)
        clear += _LOOK
        if key != _NONE:
            replays += 1
            k = key // _EDITS
            m_way = b_age == key % _EDITS
            position += k - since + tl.sum(tl.where(m_way, b_old, 0), axis=0)
            since = k + tl.sum(tl.where(m_way, b_new, 0), axis=0)
            clear = since + 1
            start = output_start + tl.sum(tl.where(m_way, b_start, 0), axis=0)
            o_new = tl.where(o_k < since, start + o_k - k, position + o_k - since)
            o_source = tl.where(o_k >= k, o_new, o_source)
            b_context = tl.where(o_k >= k, (o_k < since).to(tl.int32), b_context)
    return o_source, b_context, tl.minimum(num, since + num_text - position)

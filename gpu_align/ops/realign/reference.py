"""`realign` in NumPy, for many requests at once: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..index.reference import match_lengths, nearest
from ..layout import (
    ANCHOR,
    AT_START,
    CURSOR,
    EDIT,
    EDIT_AT,
    EDIT_BEFORE,
    EDIT_BEHIND,
    EDIT_NEW,
    EDIT_OLD,
    EDIT_START,
    EDITS,
    FAR_EVERY,
    FAR_MATCH,
    FOLLOWED,
    FOLLOWS,
    LEFT_AT,
    MATCH_WEIGHT,
    MAX_EDIT,
    NEAR,
    NEAR_MATCH,
    NO_EDIT,
    NUM_EDITS,
    OUTPUT_START,
    SEEN,
    TEXT_BASE,
    TEXT_LEN,
    WINDOW,
)
from ..state import StepArrays

IntArray = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]

_MAX_MATCH = 64
_AHEAD = np.arange(64)
_AROUND = np.arange(-NEAR_MATCH, WINDOW)
_SKIPPED = np.arange(WINDOW + 1)
#: Stands where the prediction has no token; any int32 may be one of the output.
_NO_TOKEN = 1 << 40


def start_over(state: StepArrays, slots: IntArray) -> None:
    """Forget where these requests stand."""
    state.aligned[slots] = 0
    state.aligned[slots, FOLLOWS] = 1
    state.edits[slots, :, EDIT_BEFORE] = NO_EDIT


def realign_reference(state: StepArrays, context: IntArray, slots: IntArray, totals: IntArray) -> None:
    """Fold the tokens that are new in these requests' contexts; ``aligned[:, SEEN]`` says which are.

    context: [S, T]. slots, totals: [R], the requests and their valid tokens; each slot has a prediction.
    """
    starts = state.about[slots, OUTPUT_START]
    done = np.maximum(state.aligned[slots, SEEN], starts)
    while (pending := np.flatnonzero(done < totals)).size:
        follows = state.aligned[slots[pending], FOLLOWS] > 0
        on = pending[follows]
        if on.size:
            done[on] += _follow(state, context, slots[on], done[on], totals[on])
            # Whoever has tokens left has left the prediction, or has more of them than one look takes.
            on = on[done[on] < totals[on]]
            _leave(state, context, slots[on], done[on])
        off = pending[~follows]
        if off.size:
            done[off] = _fold(state, context, slots[off], done[off], totals[off])


def _follow(
    state: StepArrays, context: IntArray, slots: IntArray, done: IntArray, totals: IntArray
) -> IntArray:
    """How many of the new tokens are the next ones of the prediction, at most 64; the cursor moves along."""
    about, aligned = state.about[slots], state.aligned
    cursor = aligned[slots, CURSOR]
    room = np.minimum(totals - done, about[:, TEXT_LEN] - cursor)
    inside = room[:, None] > _AHEAD
    place = np.where(inside, (about[:, TEXT_BASE] + cursor)[:, None] + _AHEAD, 0)
    new = context[slots[:, None], np.where(inside, done[:, None] + _AHEAD, 0)]
    same = inside & (state.text[place] == new)
    run: IntArray = np.where(same.all(axis=1), len(_AHEAD), same.argmin(axis=1))
    met = edits_at(state, slots, cursor[:, None] + np.arange(run.max(initial=0)))
    # The place was left as it is: an edit that was made in such a place before is not made any more.
    gone = (met & (_AHEAD[: met.shape[2]] < run[:, None])[:, None, :]).any(axis=2)
    state.edits[slots, :, EDIT_BEFORE] = np.where(gone, NO_EDIT, state.edits[slots, :, EDIT_BEFORE])
    aligned[slots, CURSOR] += run
    aligned[slots, FOLLOWED] += run
    return run


def keys_at(state: StepArrays, slots: IntArray, places: IntArray) -> IntArray:
    """[3, R, P]: the tokens before, at and behind places [R, P] of each prediction.

    The one before is `AT_START` at the beginning. No edit has the keys of a place that has nothing behind it.
    """
    base, num_text = state.about[slots, TEXT_BASE, None], state.about[slots, TEXT_LEN, None]
    known = (places >= 0) & (places + 1 < num_text)
    at = np.where(known, base + places, 0)
    before = np.where(places > 0, state.text[np.maximum(at - 1, 0)], AT_START)
    keys = np.stack([before, state.text[at], state.text[np.minimum(at + 1, len(state.text) - 1)]])
    return np.where(known, keys, NO_EDIT - 1)


def edits_at(state: StepArrays, slots: IntArray, places: IntArray) -> Bools:
    """[R, `EDITS`, P]: whether each edit was made in such a place: the same tokens before, at and behind it."""
    hits = np.zeros((len(slots), EDITS, places.shape[1]), dtype=np.bool_)
    live = np.flatnonzero((state.edits[slots, :, EDIT_BEFORE] != NO_EDIT).any(axis=1))
    if live.size and places.shape[1]:
        keys, edits = keys_at(state, slots[live], places[live]), state.edits[slots[live]]
        found = edits[:, :, EDIT_AT, None] == keys[1][:, None]
        some = found.any(axis=(1, 2))
        live, keys, edits, found = live[some], keys[:, some], edits[some], found[some]
        found &= edits[:, :, EDIT_BEFORE, None] == keys[0][:, None]
        found &= edits[:, :, EDIT_BEHIND, None] == keys[2][:, None]
        hits[live] = found
    return hits


def _leave(state: StepArrays, context: IntArray, slots: IntArray, done: IntArray) -> None:
    """Of these, those whose next token is not the prediction's have left it here."""
    about, aligned = state.about[slots], state.aligned
    cursor = aligned[slots, CURSOR]
    more = cursor < about[:, TEXT_LEN]
    next_token = state.text[np.where(more, about[:, TEXT_BASE] + cursor, 0)]
    left = ~more | (next_token != context[slots, done])
    slots = slots[left]
    aligned[slots, FOLLOWS] = 0
    aligned[slots, ANCHOR] = cursor[left]
    aligned[slots, LEFT_AT] = done[left] - about[left, OUTPUT_START]
    state.row[slots] = 0


def _fold(
    state: StepArrays, context: IntArray, slots: IntArray, done: IntArray, totals: IntArray
) -> IntArray:
    """Take in tokens of requests that have left their prediction, until one is back or has no more; new `done`."""
    about, aligned = state.about[slots], state.aligned[slots]
    base, num_text, anchor = about[:, TEXT_BASE], about[:, TEXT_LEN], aligned[:, ANCHOR]
    # The window, and before it the tokens that the first ends of `_near` are compared with.
    place = anchor[:, None] + _AROUND
    inside = (place >= 0) & (place < num_text[:, None])
    around = np.where(
        inside, state.text[np.where(inside, base[:, None] + place, 0)].astype(np.int64), _NO_TOKEN
    )
    # A request a column: NumPy then takes the running maximum of all requests at once.
    window, row = around[:, NEAR_MATCH:].T.copy(), state.row[slots].T.copy()
    longer = np.ones_like(row)
    ends = np.zeros(0, dtype=np.int64)
    for _ in range(int((totals - done).min())):
        done = done + 1
        num_output = done - about[:, OUTPUT_START]
        np.add(row[:-1], 1, out=longer[1:])
        np.copyto(row, longer, where=window == context[slots, done - 1])
        np.maximum.accumulate(row, axis=0, out=row)
        ends = _near(around, context, slots, done, num_output, anchor, num_text)
        far = np.flatnonzero((ends < 0) & (num_output % FAR_EVERY == 0))
        if far.size:
            ends[far] = _far(state, context, slots[far], done[far], num_output[far])
        if (ends >= 0).any():
            break
    state.row[slots] = row.T
    back = ends >= 0
    if back.any():
        _resume(state, context, slots[back], ends[back], done[back])
    return done


def _near(
    around: IntArray,
    context: IntArray,
    slots: IntArray,
    done: IntArray,
    num_output: IntArray,
    anchor: IntArray,
    num_text: IntArray,
) -> IntArray:
    """[R]: the first end from the anchor on with the output's last `NEAR_MATCH` tokens before it, or -1.

    around: [R, `NEAR_MATCH` + `WINDOW`], the prediction from `NEAR_MATCH` tokens before the anchor on.
    """
    found = np.full(len(slots), -1, dtype=np.int64)
    # Column j: the end ``anchor + j``, and before it the columns ``j … j + NEAR_MATCH - 1`` of `around`.
    good = around[:, NEAR_MATCH - 1 : NEAR_MATCH - 1 + NEAR] == context[slots, done - 1][:, None]
    at = np.flatnonzero(good.any(axis=1) & (num_output >= NEAR_MATCH))
    for back in range(1, NEAR_MATCH):
        if not at.size:
            return found
        first = NEAR_MATCH - 1 - back
        good[at] &= around[at, first : first + NEAR] == context[slots[at], done[at] - 1 - back][:, None]
        at = at[good[at].any(axis=1)]
    found[at] = anchor[at] + good[at].argmax(axis=1)
    return found


def _far(
    state: StepArrays, context: IntArray, slots: IntArray, done: IntArray, num_output: IntArray
) -> IntArray:
    """[R]: the end nearest to the anchor, of those in the index, behind the output's last `FAR_MATCH` tokens."""
    anchor = state.aligned[slots, ANCHOR]
    ends = nearest(state, slots, context[slots, done - 1], anchor)
    flat, width = context.reshape(-1), context.shape[1]
    lengths = match_lengths(
        state.text, state.about[slots, TEXT_BASE], ends, flat, slots * width + done, num_output, FAR_MATCH
    )
    rank = np.where(lengths >= FAR_MATCH, rank_of(ends, anchor[:, None]), np.iinfo(np.int64).max)
    best = rank.argmin(axis=1)
    at = np.arange(len(best))
    return np.where(lengths[at, best] >= FAR_MATCH, ends[at, best], -1)


def rank_of(ends: IntArray, anchor: IntArray) -> IntArray:
    """Ties: the nearest to the anchor; at the same distance the one ahead of it."""
    return np.where(ends >= anchor, 2 * (ends - anchor), 2 * (anchor - ends) + 1)


def _resume(state: StepArrays, context: IntArray, slots: IntArray, ends: IntArray, done: IntArray) -> None:
    """Follow again from `ends` on, and remember what was written instead of what."""
    about, aligned = state.about[slots], state.aligned
    anchor, left_at = aligned[slots, ANCHOR], aligned[slots, LEFT_AT]
    num_output = done - about[:, OUTPUT_START]
    width = context.shape[1]
    # Never further back than where the output left the prediction.
    limit = np.minimum(ends - anchor, num_output - left_at)
    length = match_lengths(
        state.text,
        about[:, TEXT_BASE],
        ends[:, None],
        context.reshape(-1),
        slots * width + done,
        limit,
        _MAX_MATCH,
    )[:, 0]
    old, new = ends - length - anchor, num_output - length - left_at
    before, at, behind = keys_at(state, slots, anchor[:, None])[:, :, 0]
    kept = (old >= 0) & (old <= MAX_EDIT) & (new <= MAX_EDIT) & (before >= AT_START)
    edit = np.zeros((len(slots), EDIT), dtype=np.int32)
    for column, value in (
        (EDIT_BEFORE, before), (EDIT_AT, at), (EDIT_BEHIND, behind),
        (EDIT_START, left_at), (EDIT_OLD, old), (EDIT_NEW, new),
    ):  # fmt: skip
        edit[:, column] = value
    way = aligned[slots, NUM_EDITS] % EDITS
    state.edits[slots[kept], way[kept]] = edit[kept]
    aligned[slots, NUM_EDITS] += kept
    aligned[slots, FOLLOWS], aligned[slots, CURSOR] = 1, ends
    aligned[slots, FOLLOWED] += length


def standing(state: StepArrays, slots: IntArray) -> tuple[IntArray, IntArray]:
    """``(cursor [R], drop [R, WINDOW + 1])``: where each request stands, and how much worse every place is.

    A request that follows its prediction stands at its cursor, and its drops are not looked at. One that has left
    it stands behind the anchor at the smallest j with the largest ``MATCH_WEIGHT * H[j] - j``; what of the window
    lies behind the prediction's end has a drop above 90.
    """
    aligned = state.aligned[slots]
    cursor = aligned[:, CURSOR].astype(np.int64)
    drop = np.zeros((len(slots), WINDOW + 1), dtype=np.int32)
    left = np.flatnonzero(aligned[:, FOLLOWS] == 0)
    if left.size:
        anchor = aligned[left, ANCHOR]
        scores = np.zeros((len(left), WINDOW + 1), dtype=np.int32)
        scores[:, 1:] = MATCH_WEIGHT * state.row[slots[left]].astype(np.int32)
        scores -= _SKIPPED
        room = state.about[slots[left], TEXT_LEN] - anchor
        scores[room[:, None] < _SKIPPED] = -(1 << 20)
        best = scores.argmax(axis=1)
        cursor[left] = anchor + best
        drop[left] = scores[np.arange(len(left)), best][:, None] - scores
    return cursor, drop

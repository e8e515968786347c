"""`realign` as loops: what the kernel is checked against, and what runs on the CPU. Context is one row [T]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._jit import njit
from ..index.reference import match_length, nearest
from ..layout import (
    ANCHOR,
    AT_START,
    CURSOR,
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

_MAX_MATCH = 64
_BLOCK = 64
#: Keys of one score: j is 0 to `WINDOW`.
_KEYS = WINDOW + 1


@njit
def start_over(state: StepArrays, slot: int) -> None:
    """Forget where this request stands."""
    state.aligned[slot] = 0
    state.aligned[slot, FOLLOWS] = 1
    state.edits[slot, :, EDIT_BEFORE] = NO_EDIT


@njit
def realign(state: StepArrays, context: IntArray, slot: int, total: int) -> None:
    """Fold the tokens that are new; ``aligned[SEEN]`` says which are. The slot has a prediction."""
    start = state.about[slot, OUTPUT_START]
    for done in range(max(state.aligned[slot, SEEN], start), total):
        fold(state, context, slot, done, done + 1 - start)


@njit
def fold(state: StepArrays, context: IntArray, slot: int, done: int, num_output: int) -> None:
    """Fold ``context[done]``, with which the output has `num_output` tokens."""
    aligned, text = state.aligned[slot], state.text
    base, num_text = int(state.about[slot, TEXT_BASE]), int(state.about[slot, TEXT_LEN])
    if aligned[FOLLOWS] > 0:
        cursor = int(aligned[CURSOR])
        if cursor < num_text and text[base + cursor] == context[done]:
            # The place was left as it is: an edit that was made in such a place before is not made any more.
            for i in range(EDITS):
                if applies(state, slot, i, cursor):
                    state.edits[slot, i, EDIT_BEFORE] = NO_EDIT
            aligned[CURSOR] += 1
            aligned[FOLLOWED] += 1
            return
        aligned[FOLLOWS], aligned[ANCHOR], aligned[LEFT_AT] = 0, cursor, num_output - 1
        state.row[slot] = 0
    anchor = int(aligned[ANCHOR])
    begin = base + anchor
    _fold_row(state.row[slot], text[begin : begin + min(num_text - anchor, WINDOW)], context[done])
    end = _find_back(state, context, slot, done + 1, num_output)
    if end >= 0:
        _resume(state, context, slot, end, done + 1, num_output)


@njit
def applies(state: StepArrays, slot: int, i: int, place: int) -> bool:
    """Whether edit i was made in such a place: the same tokens before, at and behind it."""
    edit = state.edits[slot, i]
    if edit[EDIT_BEFORE] == NO_EDIT or place + 1 >= state.about[slot, TEXT_LEN]:
        return False
    at = int(state.about[slot, TEXT_BASE]) + place
    before = state.text[at - 1] if place > 0 else AT_START
    return bool(
        edit[EDIT_AT] == state.text[at]
        and edit[EDIT_BEFORE] == before
        and edit[EDIT_BEHIND] == state.text[at + 1]
    )


@njit
def _fold_row(row: IntArray, window: IntArray, token: int) -> None:
    """One more token in the row: ``row[j]`` is H[j + 1] over the tokens of the window.

    H never rises by more than 1, so a match at j raises a run of equal values, to H[j] + 1. From the back: the
    values before j are still those without the token.
    """
    for block in range((len(window) - 1) // _BLOCK, -1, -1):
        tokens = window[block * _BLOCK : (block + 1) * _BLOCK]
        if not _holds(tokens, token):
            continue
        for i in range(len(tokens) - 1, -1, -1):
            j = block * _BLOCK + i
            if tokens[i] == token:
                longer = (int(row[j - 1]) if j > 0 else 0) + 1
                while j < WINDOW and row[j] < longer:
                    row[j] = longer
                    j += 1


@njit
def _holds(tokens: IntArray, token: int) -> bool:
    """Whether the token is there. No early exit: a CPU compares many at a time, and mostly it is not."""
    found = False
    for i in range(len(tokens)):
        found |= tokens[i] == token
    return found


@njit
def _find_back(state: StepArrays, context: IntArray, slot: int, total: int, num_output: int) -> int:
    """The end where the output, ``context[:total]``, is back in the prediction, or -1."""
    text, base = state.text, int(state.about[slot, TEXT_BASE])
    num_text, anchor = int(state.about[slot, TEXT_LEN]), int(state.aligned[slot, ANCHOR])
    first, behind = max(anchor, NEAR_MATCH), min(anchor + NEAR, num_text + 1)
    if num_output >= NEAR_MATCH and _holds(text[base + first - 1 : base + behind - 1], context[total - 1]):
        for end in range(first, behind):
            if match_length(text, base, end, context, total, NEAR_MATCH) == NEAR_MATCH:
                return end
    best = -1
    if num_output % FAR_EVERY == 0:
        begin, stop = nearest(state, slot, context[total - 1], anchor)
        for i in range(begin, stop):
            end = int(state.order[i])
            if best >= 0 and rank_of(end, anchor) > rank_of(best, anchor):
                continue
            if match_length(text, base, end, context, total, min(num_output, FAR_MATCH)) == FAR_MATCH:
                best = end
    return best


@njit
def rank_of(end: int, anchor: int) -> int:
    """Ties: the nearest to the anchor; at the same distance the one ahead of it."""
    return 2 * (end - anchor) if end >= anchor else 2 * (anchor - end) + 1


@njit
def _resume(state: StepArrays, context: IntArray, slot: int, end: int, total: int, num_output: int) -> None:
    """Follow again from `end` on, and remember what was written instead of what."""
    aligned, base = state.aligned[slot], int(state.about[slot, TEXT_BASE])
    anchor, left_at = int(aligned[ANCHOR]), int(aligned[LEFT_AT])
    # Never further back than where the output left the prediction.
    most = min(end - anchor, num_output - left_at, _MAX_MATCH)
    length = match_length(state.text, base, end, context, total, most)
    old, new = end - length - anchor, num_output - length - left_at
    if 0 <= old <= MAX_EDIT and new <= MAX_EDIT and anchor + 1 < state.about[slot, TEXT_LEN]:
        edit = state.edits[slot, aligned[NUM_EDITS] % EDITS]
        edit[EDIT_BEFORE] = state.text[base + anchor - 1] if anchor > 0 else AT_START
        edit[EDIT_AT], edit[EDIT_BEHIND] = state.text[base + anchor], state.text[base + anchor + 1]
        edit[EDIT_START], edit[EDIT_OLD], edit[EDIT_NEW] = left_at, old, new
        aligned[NUM_EDITS] += 1
    aligned[FOLLOWS], aligned[CURSOR] = 1, end
    aligned[FOLLOWED] += length


@njit
def score(row: IntArray, j: int) -> int:
    """How well the output fits that has left the prediction, if it stands j tokens behind the anchor."""
    return MATCH_WEIGHT * (int(row[j - 1]) if j > 0 else 0) - j


@njit
def standing(state: StepArrays, slot: int) -> tuple[int, int]:
    """``(cursor, top)``: where the request stands, and the best score.

    A request that follows its prediction stands at its cursor and has no scores. One that has left it stands
    behind the anchor at the smallest j with the largest `score`.
    """
    aligned = state.aligned[slot]
    if aligned[FOLLOWS] > 0:
        return int(aligned[CURSOR]), 0
    anchor = int(aligned[ANCHOR])
    row = state.row[slot, : min(WINDOW, int(state.about[slot, TEXT_LEN]) - anchor)]
    # One key of score and j: its maximum is found for many at a time.
    best = 0
    for i in range(len(row)):
        best = max(best, (MATCH_WEIGHT * int(row[i]) - i - 1) * _KEYS - i - 1)
    top = (best + WINDOW) // _KEYS
    return anchor + top * _KEYS - best, top

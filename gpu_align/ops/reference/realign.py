"""`realign` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import constants as c
from ..jit import njit
from .lcs import extend_row, holds
from .suffix_match import Context, Prediction, match_length, nearest, rank_of

IntArray = npt.NDArray[np.signedinteger[Any]]

#: Keys of one score in `standing`: j is 0 to `WINDOW`.
_J_KEYS = c.WINDOW + 1


class Alignment(NamedTuple):
    """Where a request stands, and its edits: rows of the state, changed in place."""

    #: [ALIGN_STATE] int32; `gpu_align.ops.constants` has the columns.
    state: IntArray
    #: [WINDOW] int16: LCS lengths behind the anchor.
    row: IntArray
    #: [MAX_EDITS, EDIT] int32: edit number i is in row i % MAX_EDITS.
    edits: IntArray


@njit
def start_over(alignment: Alignment) -> None:
    """In sync at the beginning, without edits."""
    alignment.state[:] = 0
    alignment.state[c.IN_SYNC] = 1
    alignment.edits[:, c.EDIT_BEFORE] = c.NO_EDIT


@njit
def has_key(prediction: Prediction, edit: IntArray, position: int) -> bool:
    """Whether a position has the key of an edit: the same tokens before, at and behind it."""
    tokens = prediction.tokens
    if edit[c.EDIT_BEFORE] == c.NO_EDIT or position + 1 >= len(tokens):
        return False
    return bool(
        edit[c.EDIT_AT] == tokens[position]
        and edit[c.EDIT_BEFORE] == (tokens[position - 1] if position > 0 else c.AT_START)
        and edit[c.EDIT_BEHIND] == tokens[position + 1]
    )


@njit
def run_length(prediction: Prediction, cursor: int, output: IntArray, done: int) -> int:
    """How many of the next tokens of output and prediction agree."""
    most = min(len(output) - done, len(prediction.tokens) - cursor)
    run = 0
    while run < most and output[done + run] == prediction.tokens[cursor + run]:
        run += 1
    return run


@njit
def invalidate_edits(alignment: Alignment, prediction: Prediction, cursor: int, run: int) -> None:
    """Drop the edits whose key the output has just passed unedited: `run` positions from the cursor on."""
    for edit in alignment.edits:
        for position in range(cursor, cursor + run):
            if has_key(prediction, edit, position):
                edit[c.EDIT_BEFORE] = c.NO_EDIT


@njit
def resync(prediction: Prediction, anchor: int, output: IntArray) -> int:
    """The position at which the output is in sync again, or -1."""
    tokens, done = prediction.tokens, len(output)
    first, behind = max(anchor, c.LOCAL_MATCH), min(anchor + c.LOCAL_RANGE, len(tokens) + 1)
    if done >= c.LOCAL_MATCH and holds(tokens[first - 1 : behind - 1], output[done - 1]):
        for position in range(first, behind):
            if match_length(tokens, position, output, c.LOCAL_MATCH) == c.LOCAL_MATCH:
                return position
    best = -1
    if done % c.GLOBAL_EVERY == 0:
        begin, end = nearest(prediction, output[done - 1], anchor)
        for i in range(begin, end):
            position = int(prediction.positions[i])
            if best >= 0 and rank_of(position, anchor) > rank_of(best, anchor):
                continue
            if match_length(tokens, position, output, min(done, c.GLOBAL_MATCH)) == c.GLOBAL_MATCH:
                best = position
    return best


@njit
def common_end(prediction: Prediction, alignment: Alignment, position: int, output: IntArray) -> int:
    """Length of the common end, up to `RUN`, of ``prediction[anchor:position]`` and ``output[diverged_at:]``."""
    most = min(position - int(alignment.state[c.ANCHOR]), len(output) - int(alignment.state[c.DIVERGED_AT]))
    return match_length(prediction.tokens, position, output, min(most, c.RUN))


@njit
def record_edit(alignment: Alignment, prediction: Prediction, old: int, new: int) -> None:
    """Remember that `old` tokens from the anchor on became `new` tokens from `diverged_at` on.

    Nothing is recorded where the position has no key or a side is too long.
    """
    state, tokens = alignment.state, prediction.tokens
    anchor = int(state[c.ANCHOR])
    if anchor + 1 < len(tokens) and 0 <= old <= c.MAX_EDIT_LEN and new <= c.MAX_EDIT_LEN:
        edit = alignment.edits[state[c.NUM_EDITS] % c.MAX_EDITS]
        repeats = False
        for other in alignment.edits:
            repeats = repeats or has_key(prediction, other, anchor)
        edit[c.EDIT_REPEATS] = repeats
        edit[c.EDIT_BEFORE] = tokens[anchor - 1] if anchor > 0 else c.AT_START
        edit[c.EDIT_AT], edit[c.EDIT_BEHIND] = tokens[anchor], tokens[anchor + 1]
        edit[c.EDIT_START], edit[c.EDIT_OLD], edit[c.EDIT_NEW] = state[c.DIVERGED_AT], old, new
        state[c.NUM_EDITS] += 1


@njit
def fold(prediction: Prediction, output: IntArray, done: int, alignment: Alignment) -> None:
    """Process ``output[done:]``; the kernel's `_fold` has the loop in words."""
    state = alignment.state
    while done < len(output):
        if state[c.IN_SYNC] > 0:
            cursor = int(state[c.CURSOR])
            run = run_length(prediction, cursor, output, done)
            if state[c.NUM_EDITS] > 0:
                invalidate_edits(alignment, prediction, cursor, run)
            done += run
            state[c.CURSOR] += run
            state[c.NUM_IN_SYNC] += run
            state[c.NUM_COMMON] = min(state[c.NUM_COMMON] + run, c.MAX_MATCH)
            if done < len(output):
                state[c.IN_SYNC], state[c.ANCHOR], state[c.DIVERGED_AT] = 0, cursor + run, done
                alignment.row[:] = 0
        if state[c.IN_SYNC] == 0:
            anchor = int(state[c.ANCHOR])
            extend_row(alignment.row, prediction.tokens[anchor : anchor + c.WINDOW], output[done])
            done += 1
            position = resync(prediction, anchor, output[:done])
            if position >= 0:
                common = common_end(prediction, alignment, position, output[:done])
                old, new = position - common - anchor, done - common - int(state[c.DIVERGED_AT])
                record_edit(alignment, prediction, old, new)
                state[c.IN_SYNC], state[c.CURSOR] = 1, position
                state[c.NUM_IN_SYNC] += common
                state[c.NUM_COMMON] = common


@njit
def standing(prediction: Prediction, alignment: Alignment) -> tuple[int, int]:
    """``(cursor, top)``: where the request stands, and the best score.

    In sync that is its cursor, and there are no scores. After it diverged it is the position j behind the anchor
    with the largest `score`, the smallest such j.
    """
    if alignment.state[c.IN_SYNC] > 0:
        return int(alignment.state[c.CURSOR]), 0
    anchor = int(alignment.state[c.ANCHOR])
    row = alignment.row[: min(c.WINDOW, len(prediction.tokens) - anchor)]
    # One key of score and j: its maximum is found for many at a time.
    best = 0
    for i in range(len(row)):
        best = max(best, (c.MATCH_WEIGHT * int(row[i]) - i - 1) * _J_KEYS - i - 1)
    top = (best + c.WINDOW) // _J_KEYS
    return anchor + top * _J_KEYS - best, top


@njit
def score(row: IntArray, j: int) -> int:
    """``MATCH_WEIGHT * H[j] - j``: how well a diverged output fits that stands j tokens behind the anchor."""
    return c.MATCH_WEIGHT * (int(row[j - 1]) if j > 0 else 0) - j


@njit
def realign(prediction: Prediction, context: Context, alignment: Alignment, seen: int) -> None:
    """Process what is new of a request's output, after `seen` tokens of the context."""
    if len(prediction.tokens) > 0 and len(context.tokens) > context.output_start:
        output = context.tokens[context.output_start :]
        fold(prediction, output, max(seen - context.output_start, 0), alignment)

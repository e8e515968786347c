"""`realign` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import constants as c
from ..jit import njit
from .lcs import extend_row, holds
from .suffix_match import ContextArrays, PredictionArrays, match_length, nearest, rank_of

IntArray = npt.NDArray[np.signedinteger[Any]]


class AlignmentArrays(NamedTuple):
    """Where a request stands, and its edits: rows of the state, changed in place."""

    #: [ALIGN_STATE] int32; `gpu_align.ops.constants` has the columns.
    state: IntArray
    #: [WINDOW] int16: LCS lengths behind the anchor.
    row: IntArray
    #: [MAX_EDITS, EDIT] int32: edit number i is in row i % MAX_EDITS.
    edits: IntArray


@njit
def has_key(prediction: PredictionArrays, edit: IntArray, position: int) -> bool:
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
def run_length(prediction: PredictionArrays, cursor: int, output: IntArray, done: int) -> int:
    """How many of the next tokens of output and prediction agree."""
    most = min(len(output) - done, len(prediction.tokens) - cursor)
    run = 0
    while run < most and output[done + run] == prediction.tokens[cursor + run]:
        run += 1
    return run


@njit
def invalidate_edits(alignment: AlignmentArrays, prediction: PredictionArrays, cursor: int, run: int) -> None:
    """Drop the edits whose key the output has just passed unedited: `run` positions from the cursor on."""
    for edit in alignment.edits:
        for position in range(cursor, cursor + run):
            if has_key(prediction, edit, position):
                edit[c.EDIT_BEFORE] = c.NO_EDIT


@njit
def local_resync(prediction: PredictionArrays, anchor: int, output: IntArray) -> int:
    """The first of `LOCAL_RANGE` positions from the anchor on that the output ends like, or -1."""
    tokens, done = prediction.tokens, len(output)
    first, behind = max(anchor, c.LOCAL_MATCH), min(anchor + c.LOCAL_RANGE, len(tokens) + 1)
    if done >= c.LOCAL_MATCH and holds(tokens[first - 1 : behind - 1], output[done - 1]):
        for position in range(first, behind):
            if match_length(tokens, position, output, c.LOCAL_MATCH) == c.LOCAL_MATCH:
                return position
    return -1


@njit
def global_resync(prediction: PredictionArrays, anchor: int, output: IntArray) -> int:
    """The position of the lowest rank, of those near the anchor, that the output ends like, or -1."""
    best = -1
    begin, end = nearest(prediction, output[-1], anchor)
    for i in range(begin, end):
        position = int(prediction.positions[i])
        if best >= 0 and rank_of(position, anchor) > rank_of(best, anchor):
            continue
        most = min(len(output), c.GLOBAL_MATCH)
        if match_length(prediction.tokens, position, output, most) == c.GLOBAL_MATCH:
            best = position
    return best


@njit
def resync(prediction: PredictionArrays, anchor: int, output: IntArray) -> int:
    """Where the output is in sync again, or -1: local, or global at every `GLOBAL_EVERY`-th token."""
    position = local_resync(prediction, anchor, output)
    if position < 0 and len(output) % c.GLOBAL_EVERY == 0:
        position = global_resync(prediction, anchor, output)
    return position


@njit
def common_end(
    prediction: PredictionArrays, alignment: AlignmentArrays, position: int, output: IntArray
) -> int:
    """Length of the common end, up to `RUN`, of ``prediction[anchor:position]`` and ``output[diverged_at:]``."""
    most = min(position - int(alignment.state[c.ANCHOR]), len(output) - int(alignment.state[c.DIVERGED_AT]))
    return match_length(prediction.tokens, position, output, min(most, c.RUN))


@njit
def record_edit(alignment: AlignmentArrays, prediction: PredictionArrays, old: int, new: int) -> None:
    """Remember that `old` tokens from the anchor on became `new` tokens from `diverged_at` on.

    Nothing is recorded where the position has no key or a side is too long.
    """
    state, tokens = alignment.state, prediction.tokens
    anchor = int(state[c.ANCHOR])
    if anchor + 1 < len(tokens) and 0 <= old <= c.MAX_EDIT_LEN and new <= c.MAX_EDIT_LEN:
        edit = alignment.edits[state[c.NUM_EDITS] % c.MAX_EDITS]
        seen_before = False
        for other in alignment.edits:
            seen_before = seen_before or has_key(prediction, other, anchor)
        edit[c.EDIT_SEEN_BEFORE] = seen_before
        edit[c.EDIT_BEFORE] = tokens[anchor - 1] if anchor > 0 else c.AT_START
        edit[c.EDIT_AT], edit[c.EDIT_BEHIND] = tokens[anchor], tokens[anchor + 1]
        edit[c.EDIT_START], edit[c.EDIT_OLD], edit[c.EDIT_NEW] = state[c.DIVERGED_AT], old, new
        state[c.NUM_EDITS] += 1


@njit
def in_sync_at(alignment: AlignmentArrays, cursor: int, num_in_sync: int, num_common: int) -> None:
    """In sync at a cursor; where the output diverged last stays."""
    state = alignment.state
    state[c.IN_SYNC], state[c.CURSOR], state[c.NUM_IN_SYNC], state[c.NUM_COMMON] = (
        1,
        cursor,
        num_in_sync,
        num_common,
    )


@njit
def diverge(alignment: AlignmentArrays, done: int) -> None:
    """Diverged at the cursor, behind `done` output tokens, with a row of zeros."""
    state = alignment.state
    state[c.IN_SYNC], state[c.ANCHOR], state[c.DIVERGED_AT] = 0, state[c.CURSOR], done
    alignment.row[:] = 0


@njit
def starts_over(context: ContextArrays, seen: int) -> bool:
    """Whether nothing is known of a request: it is new, or tokens of it were taken back."""
    return seen < 0 or len(context.tokens) < seen


@njit
def process_tokens(
    prediction: PredictionArrays, output: IntArray, done: int, alignment: AlignmentArrays
) -> None:
    """Process ``output[done:]``; what is in sync runs on, what diverged looks for where it is in sync again."""
    state = alignment.state
    while done < len(output):
        if state[c.IN_SYNC] > 0:
            cursor = int(state[c.CURSOR])
            run = run_length(prediction, cursor, output, done)
            if state[c.NUM_EDITS] > 0:
                invalidate_edits(alignment, prediction, cursor, run)
            done += run
            common = min(int(state[c.NUM_COMMON]) + run, c.MAX_MATCH)
            in_sync_at(alignment, cursor + run, int(state[c.NUM_IN_SYNC]) + run, common)
            if done < len(output):
                diverge(alignment, done)
        if state[c.IN_SYNC] == 0:
            anchor = int(state[c.ANCHOR])
            extend_row(alignment.row, prediction.tokens[anchor : anchor + c.WINDOW], output[done])
            done += 1
            position = resync(prediction, anchor, output[:done])
            if position >= 0:
                common = common_end(prediction, alignment, position, output[:done])
                old, new = position - common - anchor, done - common - int(state[c.DIVERGED_AT])
                record_edit(alignment, prediction, old, new)
                in_sync_at(alignment, position, int(state[c.NUM_IN_SYNC]) + common, common)


@njit
def start_over(alignment: AlignmentArrays) -> None:
    """In sync at the beginning, without edits."""
    alignment.state[:] = 0
    alignment.state[c.IN_SYNC] = 1
    alignment.edits[:, c.EDIT_BEFORE] = c.NO_EDIT


@njit
def cursor_score(row: IntArray, num_window: int) -> tuple[int, int]:
    """``(j, score)``: the smallest j with the largest ``MATCH_WEIGHT * H[j] - j``, ``0 <= j <= num_window``."""
    # One key of score and j: its maximum is found for many at a time.
    best = 0
    for i in range(num_window):
        best = max(best, (c.MATCH_WEIGHT * int(row[i]) - i - 1) * c.J_KEYS - i - 1)
    top = (best + c.WINDOW) // c.J_KEYS
    return top * c.J_KEYS - best, top


@njit
def realign(
    prediction: PredictionArrays, context: ContextArrays, alignment: AlignmentArrays
) -> tuple[int, int]:
    """Process what is new of a request's output, after the tokens that its state has seen.

    Returns ``(cursor, top)``: where the output stands, which after it diverged is a position behind the anchor,
    and its score there.
    """
    state, total = alignment.state, len(context.tokens)
    if starts_over(context, int(state[c.SEEN])):
        start_over(alignment)
    # An output is neither in sync with an empty prediction nor diverged from it.
    if len(prediction.tokens) > 0 and total > context.output_start:
        done = max(int(state[c.SEEN]) - context.output_start, 0)
        process_tokens(prediction, context.tokens[context.output_start :], done, alignment)
    state[c.SEEN] = total
    if state[c.IN_SYNC] > 0:
        return int(state[c.CURSOR]), 0
    anchor = int(state[c.ANCHOR])
    j, top = cursor_score(alignment.row, min(c.WINDOW, len(prediction.tokens) - anchor))
    return anchor + j, top

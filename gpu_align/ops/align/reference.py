"""`realign` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..host import align, layout, lcs, match, njit, to_int
from ..index.reference import load_bucket, nearest
from ..layout import Alignment, IntArray, Request, SourceText
from ..match.reference import match_length


class EditRows(NamedTuple):
    """The edits: tokens of the prediction and those of the output in their place."""

    count: Any  # edits recorded
    rows: IntArray  # [MAX_EDITS, EDIT] int32, changed in place: edit number i is in row i % MAX_EDITS


@njit
def _holds(tokens: IntArray, token: int) -> bool:
    """Whether the token is there. No early exit: a CPU compares many at a time, and mostly it is not."""
    found = False
    for i in range(len(tokens)):
        found |= tokens[i] == token
    return found


@njit
def _extend_rows(row: int, prediction: SourceText, anchor: int, output: IntArray, begin: int) -> int:
    """The LCS row after ``output[begin:]``."""
    window = prediction.tokens[anchor : anchor + align.WINDOW]
    for i in range(begin, len(output)):
        matches = 0
        if _holds(window, output[i]):
            for j in range(len(window)):
                matches |= int(window[j] == output[i]) << j
        row = lcs.extend_row(row, matches)
    return row


@njit
def cursor_of(row: int, prediction: SourceText, anchor: int) -> int:
    """The place of a diverged output: the first position from the anchor on with the largest `score_at`."""
    best, top = 0, 0
    for j in range(1, min(align.WINDOW, prediction.length - anchor) + 1):
        score = align.score_at(row, j)
        if score > top:
            best, top = j, score
    return anchor + best


@njit
def has_key(prediction: SourceText, edit: IntArray, position: int) -> bool:
    """Whether a position has the key of an edit."""
    tokens = prediction.tokens
    if position + 1 >= prediction.length or edit[layout.EDIT_AT] != tokens[position]:
        return False
    return bool(edit[layout.EDIT_AFTER] == tokens[position + 1])


@njit
def _run_length(prediction: SourceText, cursor: int, output: IntArray, done: int) -> int:
    """How many of the next tokens of output and prediction agree."""
    most = min(len(output) - done, prediction.length - cursor)
    run = 0
    while run < most and output[done + run] == prediction.tokens[cursor + run]:
        run += 1
    return run


@njit
def _invalidate_edits(edits: EditRows, prediction: SourceText, cursor: int, run: int) -> None:
    """Drop the edits whose key the output has just passed unedited: `run` positions from the cursor on."""
    for edit in edits.rows:
        for position in range(cursor, cursor + run):
            if has_key(prediction, edit, position):
                edit[layout.EDIT_AT] = align.NO_EDIT


@njit
def _local_resync(prediction: SourceText, anchor: int, output: IntArray) -> int:
    """The first position from the anchor to `WINDOW` after it that the output ends like, or -1."""
    tokens, done = prediction.tokens, len(output)
    first, behind = max(anchor, align.LOCAL_MATCH), min(anchor + align.WINDOW, prediction.length) + 1
    if done >= align.LOCAL_MATCH and _holds(tokens[first - 1 : behind - 1], output[done - 1]):
        for position in range(first, behind):
            if match_length(tokens, position, output, align.LOCAL_MATCH) == align.LOCAL_MATCH:
                return position
    return -1


@njit
def _global_resync(prediction: SourceText, anchor: int, output: IntArray) -> int:
    """The position of the lowest rank, of those near the anchor, that the output ends like, or -1."""
    best, most = -1, min(len(output), align.GLOBAL_MATCH)
    begin, end = nearest(prediction, load_bucket(prediction, output[-1]), anchor, align.NEAREST)
    for i in range(begin, end):
        position = int(prediction.index.positions[i])
        is_nearer = best < 0 or layout.rank_of(position, anchor) < layout.rank_of(best, anchor)
        if is_nearer and match_length(prediction.tokens, position, output, most) == align.GLOBAL_MATCH:
            best = position
    return best


@njit
def common_end(
    prediction: SourceText, alignment: Alignment, position: int, output: IntArray, done: int
) -> int:
    """Length of the common end, up to `MAX_MATCH`, of ``prediction[anchor:position]`` and
    ``output[diverged_at:done]``."""
    most = min(position - alignment.anchor, done - alignment.diverged_at)
    return match_length(prediction.tokens, position, output[:done], min(most, match.MAX_MATCH))


@njit
def _record_edit(
    edits: EditRows, prediction: SourceText, position: int, output: IntArray, done: int, old: int, new: int
) -> EditRows:
    """The edits with one more: `old` tokens from the position on became `new` tokens of ``output[done:]``.

    Nothing is recorded where the position has no key or a side is too long.
    """
    tokens = prediction.tokens
    if position + 1 >= prediction.length or old > align.MAX_EDIT_LEN or new > align.MAX_EDIT_LEN:
        return edits
    seen_before = False
    for other in edits.rows:
        if (
            other[layout.EDIT_OLD] == old
            and other[layout.EDIT_NEW] == new
            and has_key(prediction, other, position)
        ):
            seen_before |= new == 0 or output[other[layout.EDIT_START]] == output[done]
    edit = edits.rows[edits.count % layout.MAX_EDITS]
    edit[layout.EDIT_SEEN_BEFORE] = seen_before
    edit[layout.EDIT_AT], edit[layout.EDIT_AFTER] = tokens[position], tokens[position + 1]
    edit[layout.EDIT_START], edit[layout.EDIT_OLD], edit[layout.EDIT_NEW] = done, old, new
    return EditRows(edits.count + 1, edits.rows)


@njit
def _last_common(
    prediction: SourceText, alignment: Alignment, position: int, output: IntArray, done: int
) -> tuple[int, int]:
    """How far back the last token is that what was edited has before and after: ``(old, new)`` tokens after it.

    Before, it is ``prediction[anchor:position]``, after, ``output[diverged_at:done]``; looked at are the last
    `MAX_EDIT_LEN` tokens of each. The fewest tokens in sum count, then the fewest old ones. All without one.
    """
    most_old, most_new = position - alignment.anchor, done - alignment.diverged_at
    for back in range(2 * align.MAX_EDIT_LEN - 1):
        for old in range(max(back - align.MAX_EDIT_LEN + 1, 0), min(back + 1, align.MAX_EDIT_LEN)):
            new = back - old
            is_inside = old < most_old and new < most_new
            if is_inside and prediction.tokens[position - 1 - old] == output[done - 1 - new]:
                return old, new
    return most_old, most_new


@njit
def record_edits(
    edits: EditRows, prediction: SourceText, alignment: Alignment, position: int, output: IntArray, done: int
) -> EditRows:
    """The edits with those that made ``output[diverged_at:done]`` of ``prediction[anchor:position]``.

    They are what is between the tokens that both have, the last `MAX_EDITS_AT_ONCE`.
    """
    for _ in range(align.MAX_EDITS_AT_ONCE):
        common = common_end(prediction, alignment, position, output, done)
        position, done = position - common, done - common
        if position > alignment.anchor or done > alignment.diverged_at:
            old, new = _last_common(prediction, alignment, position, output, done)
            position, done = position - old, done - new
            edits = _record_edit(edits, prediction, position, output, done, old, new)
    return edits


@njit
def _process_tokens(
    request: Request, output: IntArray, done: int, a: Alignment, edits: EditRows
) -> tuple[Alignment, EditRows]:
    """Process ``output[done:]``, but for the row: find where it diverges and where it is in sync again."""
    prediction = request.prediction
    while done < len(output):
        if a.in_sync > 0:
            run = _run_length(prediction, a.cursor, output, done)
            if edits.count > 0:
                _invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = min(a.num_common + run, match.MAX_MATCH)
            a = align.in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if done < len(output):
                a = align.diverge(a, done)
        if a.in_sync == 0:
            done += 1
            position = _local_resync(prediction, a.anchor, output[:done])
            if position < 0 and done % align.GLOBAL_EVERY == 0:
                position = _global_resync(prediction, a.anchor, output[:done])
            if position >= 0:
                common = common_end(prediction, a, position, output, done)
                if position >= a.anchor:
                    edits = record_edits(edits, prediction, a, position, output, done)
                a = align.in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@njit
def load_state(request: Request) -> tuple[int, Alignment, EditRows]:
    """``(seen, alignment, edits)`` of a slot as they were stored."""
    state = request.align_state
    alignment = Alignment(
        to_int(state[layout.IN_SYNC]), to_int(state[layout.CURSOR]), to_int(state[layout.ANCHOR]),
        to_int(state[layout.DIVERGED_AT]), to_int(state[layout.NUM_IN_SYNC]), to_int(state[layout.NUM_COMMON]),
        to_int(state[layout.LCS_ROW]),
    )  # fmt: skip
    return to_int(state[layout.SEEN]), alignment, EditRows(to_int(state[layout.NUM_EDITS]), request.edits)


@njit
def _store_state(request: Request, a: Alignment, edits: EditRows) -> None:
    state = request.align_state
    state[layout.SEEN], state[layout.NUM_EDITS] = request.total, edits.count
    for i in range(layout.ALIGN_STATE - layout.IN_SYNC):
        state[layout.IN_SYNC + i] = a[i]


@njit
def realign(request: Request, state: tuple[int, Alignment, EditRows]) -> tuple[Alignment, EditRows]:
    """Process what is new of a request's output, after a `load_state`, and write its state back.

    Returns ``(alignment, edits)``, with the cursor where the output stands.
    """
    prediction = request.prediction
    seen, a, edits = state
    if layout.starts_over(request.total, seen):
        seen, a, edits = 0, Alignment(1, 0, 0, 0, 0, 0, -1), EditRows(0, edits.rows)
        edits.rows[:, layout.EDIT_AT] = align.NO_EDIT
    # An output is neither in sync with an empty prediction nor diverged from it.
    if prediction.length > 0 and request.total > request.output_start:
        done, output = max(seen - request.output_start, 0), request.tokens[request.output_start :]
        a, edits = _process_tokens(request, output, done, a, edits)
        if a.in_sync == 0:
            # Only the tokens since the output diverged last are in the row.
            row = _extend_rows(a.row, prediction, a.anchor, output, max(done, a.diverged_at))
            a = align.at_cursor(a, cursor_of(row, prediction, a.anchor), row)
    _store_state(request, a, edits)
    return a, edits

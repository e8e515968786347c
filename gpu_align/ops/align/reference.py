"""`realign` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from ..host import align, layout, lcs, match, njit, to_int
from ..index.reference import load_bucket, nearest
from ..layout import Alignment, IntArray, Request, SourceText
from ..match.reference import match_length
from . import Edits


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
def has_key(prediction: SourceText, edits: Edits, i: int, position: int) -> bool:
    """Whether a position has the key of edit i."""
    tokens = prediction.tokens
    if position + 1 >= prediction.length or edits.at[i] != tokens[position]:
        return False
    return bool(edits.after[i] == tokens[position + 1])


@njit
def _run_length(prediction: SourceText, cursor: int, output: IntArray, done: int) -> int:
    """How many of the next `MAX_MATCH` tokens of output and prediction agree."""
    most = min(len(output) - done, prediction.length - cursor, match.MAX_MATCH)
    run = 0
    while run < most and output[done + run] == prediction.tokens[cursor + run]:
        run += 1
    return run


@njit
def _invalidate_edits(edits: Edits, prediction: SourceText, cursor: int, run: int) -> Edits:
    """The edits without those whose key the output has just passed unedited, `run` positions from the cursor."""
    for i in range(layout.MAX_EDITS):
        for position in range(cursor, cursor + run):
            if has_key(prediction, edits, i, position):
                edits.at[i] = align.NO_EDIT
    return edits


@njit
def _word_around(prediction: SourceText, anchor: int, token: int) -> int:
    """The bits of the tokens that are this one: of `LOCAL_MATCH` before the anchor and `WINDOW` after it."""
    first, word = max(anchor - align.LOCAL_MATCH, 0), 0
    window = prediction.tokens[first : anchor + align.WINDOW]
    for i in range(len(window)):
        word |= int(window[i] == token) << i
    return int(word << (first - anchor + align.LOCAL_MATCH))


@njit
def _local_ends(prediction: SourceText, anchor: int, output: IntArray, done: int) -> int:
    """The bits where the last `LOCAL_MATCH` tokens of ``output[:done]`` end."""
    if done < align.LOCAL_MATCH:
        return 0
    ends = _word_around(prediction, anchor, output[done - 1])
    for j in range(1, align.LOCAL_MATCH):
        if ends != 0:
            ends &= _word_around(prediction, anchor, output[done - 1 - j]) << j
    return ends


@njit
def _global_look(prediction: SourceText, anchor: int, output: IntArray) -> int:
    """The position of the lowest rank, of those near the anchor, that the output ends like, or `NOWHERE`."""
    best, most = int(layout.NOWHERE), min(len(output), align.GLOBAL_MATCH)
    begin, end = nearest(prediction, load_bucket(prediction, output[-1]), anchor, align.NEAREST)
    for i in range(begin, end):
        position = int(prediction.index.positions[i])
        is_nearer = best == layout.NOWHERE or layout.rank_of(position, anchor) < layout.rank_of(best, anchor)
        if is_nearer and match_length(prediction.tokens, position, output, most) == align.GLOBAL_MATCH:
            best = position
    return best


@njit
def _resync(prediction: SourceText, a: Alignment, output: IntArray, done: int) -> tuple[int, int, int]:
    """``(done, position, lcs_row)`` of the first of ``output[done:]`` after which it is in sync again, or
    len(output), `NOWHERE` and the LCS row of all."""
    row, position = a.lcs_row, layout.NOWHERE
    while position == layout.NOWHERE and done < len(output):
        row = lcs.extend_row(row, _word_around(prediction, a.anchor, output[done]) >> align.LOCAL_MATCH)
        done += 1
        ends, lane = _local_ends(prediction, a.anchor, output, done), 0
        if ends != 0:
            while not (ends >> lane) & 1:
                lane += 1
            position = a.anchor + lane - (align.LOCAL_MATCH - 1)
        elif done % align.GLOBAL_EVERY == 0:
            position = _global_look(prediction, a.anchor, output[:done])
    return done, position, row


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
    edits: Edits, prediction: SourceText, position: int, output: IntArray, done: int, old: int, new: int
) -> Edits:
    """The edits with one more: `old` tokens from the position on became `new` tokens of ``output[done:]``.

    Nothing is recorded where the position has no key or a side is too long.
    """
    tokens = prediction.tokens
    if position + 1 >= prediction.length or old > align.MAX_EDIT_LEN or new > align.MAX_EDIT_LEN:
        return edits
    seen_before = False
    for i in range(layout.MAX_EDITS):
        if edits.old[i] == old and edits.new[i] == new and has_key(prediction, edits, i, position):
            seen_before |= new == 0 or output[edits.start[i]] == output[done]
    i = edits.count % layout.MAX_EDITS
    edits.at[i], edits.after[i] = tokens[position], tokens[position + 1]
    edits.start[i], edits.old[i], edits.new[i], edits.seen_before[i] = done, old, new, seen_before
    return _counted(edits, edits.count + 1)


@njit
def _counted(edits: Edits, count: int) -> Edits:
    """The same columns with another number of edits."""
    return Edits(
        count, edits.at, edits.after, edits.start, edits.old, edits.new, edits.seen_before, edits.is_changed
    )


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
    edits: Edits, prediction: SourceText, alignment: Alignment, position: int, output: IntArray, done: int
) -> Edits:
    """The edits with those that made ``output[diverged_at:done]`` of ``prediction[anchor:position]``.

    They are what is between the tokens that both have, the last `MAX_EDITS_AT_ONCE`.
    """
    num = 0
    while num < align.MAX_EDITS_AT_ONCE and (position > alignment.anchor or done > alignment.diverged_at):
        num += 1
        common = common_end(prediction, alignment, position, output, done)
        position, done = position - common, done - common
        if position > alignment.anchor or done > alignment.diverged_at:
            old, new = _last_common(prediction, alignment, position, output, done)
            position, done = position - old, done - new
            edits = _record_edit(edits, prediction, position, output, done, old, new)
    return edits


@njit
def _process_tokens(
    request: Request, output: IntArray, done: int, a: Alignment, edits: Edits
) -> tuple[Alignment, Edits]:
    """Process ``output[done:]``: returns the `Alignment` `a` and the edits after it."""
    prediction = request.prediction
    while done < len(output):
        if a.in_sync > 0:
            run = _run_length(prediction, a.cursor, output, done)
            if edits.count > 0:
                edits = _invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = min(a.num_common + run, match.MAX_MATCH)
            a = align.in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if run < match.MAX_MATCH and done < len(output):
                a = align.diverge(a, done)
        if a.in_sync == 0:
            done, position, row = _resync(prediction, a, output, done)
            if position == layout.NOWHERE:
                a = align.at_cursor(a, cursor_of(row, prediction, a.anchor), row)
            else:
                common = common_end(prediction, a, position, output, done)
                if position >= a.anchor:
                    edits = record_edits(edits, prediction, a, position, output, done)
                a = align.in_sync_at(a, position, a.num_in_sync + common, common)
    return a, edits


@njit
def load_state(request: Request) -> tuple[int, int, Alignment, Edits]:
    """``(seen, indexed, alignment, edits)`` of a slot as they were stored, column by column."""
    state, e = request.align_state, request.edits
    a = state[layout.IN_SYNC :]
    alignment = Alignment(
        to_int(a[0]), to_int(a[1]), to_int(a[2]), to_int(a[3]), to_int(a[4]), to_int(a[5]), to_int(a[6])
    )
    num_edits = to_int(state[layout.NUM_EDITS])
    edits = Edits(num_edits, e[:, 0], e[:, 1], e[:, 2], e[:, 3], e[:, 4], e[:, 5], 0)
    return to_int(state[layout.SEEN]), to_int(state[layout.INDEXED]), alignment, edits


@njit
def _start_over(is_fresh: bool, a: Alignment, edits: Edits) -> tuple[Alignment, Edits]:
    """The alignment and the edits; of a fresh request in sync at the beginning, and none."""
    if is_fresh:
        a, edits = Alignment(1, 0, 0, 0, 0, 0, -1), _counted(edits, 0)
        edits.at[:] = align.NO_EDIT
    return a, edits


@njit
def _store_state(request: Request, a: Alignment, edits: Edits) -> None:
    """Write back what `load_state` loads, but for the columns of the edits, which are written already."""
    state = request.align_state
    state[layout.SEEN], state[layout.NUM_EDITS] = request.total, edits.count
    for i in range(layout.ALIGN_STATE - layout.IN_SYNC):
        state[layout.IN_SYNC + i] = a[i]


@njit
def realign(request: Request, state: tuple[int, int, Alignment, Edits]) -> tuple[Alignment, Edits]:
    """Process what is new of a request's output, after a `load_state`, and write its state back.

    Returns ``(alignment, edits)``, with the cursor where the output stands.
    """
    prediction = request.prediction
    seen, _, a, edits = state
    is_fresh = layout.starts_over(request.total, seen)
    a, edits = _start_over(is_fresh, a, edits)
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = request.total - request.output_start if prediction.length > 0 else 0
    output = request.tokens[request.output_start :][: max(num_output, 0)]
    done = max((0 if is_fresh else seen) - request.output_start, 0)
    a, edits = _process_tokens(request, output, done, a, edits)
    _store_state(request, a, edits)
    return a, edits

"""`realign` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from ..host import align, layout, njit
from ..index.reference import load_bucket, nearest
from ..layout import Alignment, IntArray, Request, SourceText
from . import Edits


@njit
def match_length(text: IntArray, position: int, last: IntArray, most: int) -> int:
    """Length of the common end of ``text[:position]`` and `last`, at most `most`, which is at most len(last)."""
    most = min(most, position)
    length = 0
    while length < most and text[position - 1 - length] == last[len(last) - 1 - length]:
        length += 1
    return length


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
    """How many of the next `MAX_COMMON` tokens of output and prediction agree."""
    most = min(len(output) - done, prediction.length - cursor, align.MAX_COMMON)
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
        is_nearer = best == layout.NOWHERE or align.rank_of(position, anchor) < align.rank_of(best, anchor)
        if is_nearer and match_length(prediction.tokens, position, output, most) == align.GLOBAL_MATCH:
            best = position
    return best


@njit
def _resync(prediction: SourceText, a: Alignment, output: IntArray, done: int) -> tuple[int, int, int]:
    """``(done, position, lcs_row)`` of the first of ``output[done:]`` after which it is in sync again, or
    len(output), `NOWHERE` and the LCS row of all."""
    row, position = a.lcs_row, layout.NOWHERE
    while position == layout.NOWHERE and done < len(output):
        row = align.extend_row(row, _word_around(prediction, a.anchor, output[done]) >> align.LOCAL_MATCH)
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
    """Length of the common end, up to `MAX_COMMON`, of ``prediction[anchor:position]`` and
    ``output[diverged_at:done]``."""
    most = min(position - alignment.anchor, done - alignment.diverged_at)
    return match_length(prediction.tokens, position, output[:done], min(most, align.MAX_COMMON))


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
    edits = align.with_keys(edits, edits.count + 1, edits.at, 1)
    return edits


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
def realign(request: Request, seen: int, a: Alignment, edits: Edits) -> tuple[Alignment, Edits]:
    """Process the output after the first `seen` tokens of prompt and output: ``(alignment, edits)`` after all."""
    prediction = request.prediction
    # An output is neither in sync with an empty prediction nor diverged from it.
    num_output = request.total - request.output_start if prediction.length > 0 else 0
    output = request.tokens[request.output_start :][: max(num_output, 0)]
    done = max(seen - request.output_start, 0)
    while done < num_output:
        if a.in_sync > 0:
            run = _run_length(prediction, a.cursor, output, done)
            if edits.count > 0:
                edits = _invalidate_edits(edits, prediction, a.cursor, run)
            done += run
            common = min(a.num_common + run, align.MAX_COMMON)
            a = align.in_sync_at(a, a.cursor + run, a.num_in_sync + run, common)
            if run < align.MAX_COMMON and done < num_output:
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
def score_deficit(position: int, alignment: Alignment) -> int:
    """How much worse than the cursor the alignment finds a position in the prediction.

    In sync: `deficit_of` the distance. Diverged: by how much `score_at` is lower.
    """
    if alignment.in_sync > 0:
        return int(align.deficit_of(position - alignment.cursor))
    j = position - alignment.anchor
    if not 0 <= j <= align.WINDOW:
        return int(align.FAR_DEFICIT)
    top = align.score_at(alignment.lcs_row, alignment.cursor - alignment.anchor)
    return int(top - align.score_at(alignment.lcs_row, j))

"""`draft` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import constants as c
from ..draft import TableArrays, length_buckets, margin_buckets
from ..jit import njit
from .realign import AlignmentArrays, has_key
from .suffix_match import ContextArrays, PredictionArrays, best_matches, find_matches, match_length

IntArray = npt.NDArray[np.signedinteger[Any]]

LENGTH_BUCKET, MARGIN_BUCKET = length_buckets(), margin_buckets()
#: Which lanes are in the context.
IS_CONTEXT = np.arange(c.NUM_CANDIDATES) >= c.FIRST_CONTEXT


class CandidateArrays(NamedTuple):
    """Where the next tokens may be read from, in the order that ties prefer; int64 [NUM_CANDIDATES] each."""

    #: -1 where there is no candidate.
    position: IntArray
    #: Tokens of the text from the position on; 0 where there is no candidate.
    remaining: IntArray
    matched: IntArray
    #: Of matches: the one with the larger key comes first.
    key: IntArray
    #: What it expects next.
    token: IntArray
    #: See `margins`; only of candidates.
    margin: IntArray
    #: -1 where there is no candidate.
    class_id: IntArray


def allocate_candidates(*batch: int) -> CandidateArrays:
    """Space for the candidates of one request, or of a batch of them."""
    return CandidateArrays(
        *(np.zeros((*batch, c.NUM_CANDIDATES), dtype=np.int64) for _ in CandidateArrays._fields)
    )


@njit
def candidates(
    prediction: PredictionArrays,
    context: ContextArrays,
    cursor: int,
    min_match: int,
    min_context_match: int,
    found: CandidateArrays,
) -> None:
    """Write all candidates of a request that stands at `cursor`, but for their margins and classes."""
    tokens, total, length = context.tokens, len(context.tokens), len(prediction.tokens)
    find_matches(prediction, context, cursor, min_match, min_context_match, found.key)
    best_matches(found.key, cursor, found.position, found.matched)
    most = min(max(total - context.output_start, 0), c.MAX_MATCH)
    for lane in range(c.NUM_MATCHES, c.FIRST_CONTEXT):
        position = cursor + lane - c.AT_CURSOR
        if 0 <= position < length:
            found.position[lane] = position
            found.matched[lane] = match_length(prediction.tokens, position, tokens, most)
    for lane in range(c.NUM_CANDIDATES):
        position, in_context = found.position[lane], lane >= c.FIRST_CONTEXT
        found.remaining[lane] = 0
        if position >= 0:
            found.remaining[lane] = (total if in_context else length) - position
            found.token[lane] = tokens[position] if in_context else prediction.tokens[position]


@njit
def adherence_of(num_in_sync: int, num_output: int) -> int:
    """Bucket of the share of the output that was in sync with the prediction."""
    if c.LOST_SHARE * num_in_sync < num_output:
        return c.ADHERENCE_LOST
    return c.ADHERENCE_LOOSE if c.LOOSE_SHARE * num_in_sync < num_output else c.ADHERENCE_CLOSE


@njit
def margins(found: CandidateArrays, adherence: int) -> None:
    """Write how many matched tokens each candidate is ahead of the longest match that expects another token next.

    A prediction that the output hardly adheres to is ignored.
    """
    first = c.FIRST_CONTEXT if adherence == c.ADHERENCE_LOST else 0
    reach, leader, runner_up = 0, -1, 0
    for lane in range(first, c.NUM_CANDIDATES):
        if found.remaining[lane] > 0 and (leader < 0 or found.matched[lane] > reach):
            reach, leader = found.matched[lane], lane
    # Where nothing is considered, nothing is ahead of anything.
    token = found.token[leader] if leader >= 0 else 0
    for lane in range(first, c.NUM_CANDIDATES):
        if found.remaining[lane] > 0 and found.token[lane] != token:
            runner_up = max(runner_up, found.matched[lane])
    for lane in range(c.NUM_CANDIDATES):
        agrees = leader >= 0 and found.token[lane] == token
        found.margin[lane] = found.matched[lane] - (runner_up if agrees else reach)


@njit
def score_deficit(position: int, length: int, alignment: AlignmentArrays, cursor: int, top: int) -> int:
    """How much worse than the cursor the alignment finds a position in a prediction of `length` tokens.

    In sync: the tokens skipped, and `BACKWARD_DEFICIT` to go back. Diverged: what ``MATCH_WEIGHT * H[j] - j`` is
    below its largest, `top`, at j = position - anchor; `NO_SCORE` outside the window.
    """
    if alignment.state[c.IN_SYNC] > 0:
        ahead = position - cursor
        return ahead if ahead > 0 else c.BACKWARD_DEFICIT - ahead
    anchor = int(alignment.state[c.ANCHOR])
    j = position - anchor
    if not 0 <= j <= min(c.WINDOW, length - anchor):
        return c.NO_SCORE
    common = int(alignment.row[j - 1]) if j > 0 else 0
    return top - (c.MATCH_WEIGHT * common - j)


@njit
def alignment_bucket(position: int, length: int, alignment: AlignmentArrays, cursor: int, top: int) -> int:
    """Alignment bucket of a candidate in the prediction."""
    ahead = position - cursor
    # At the cursor and next to it the distance is the bucket.
    if ahead == 0 or ahead == c.ALIGNMENT_NEXT:
        return ahead
    deficit = score_deficit(position, length, alignment, cursor, top)
    if -c.CURSOR_BEHIND <= ahead <= c.CURSOR_AHEAD:
        if deficit <= c.SMALL_DEFICIT:
            return c.ALIGNMENT_SMALL
        return c.ALIGNMENT_MEDIUM if deficit <= c.MEDIUM_DEFICIT else c.ALIGNMENT_NEAR
    return c.ALIGNMENT_LARGE if deficit <= c.LARGE_DEFICIT else c.ALIGNMENT_FAR


@njit
def classes(
    prediction: PredictionArrays,
    found: CandidateArrays,
    alignment: AlignmentArrays,
    cursor: int,
    top: int,
    num_output: int,
) -> None:
    """Write the class of every candidate. num_output: with the adherence prior."""
    adherence = adherence_of(int(alignment.state[c.NUM_IN_SYNC]), num_output)
    length = len(prediction.tokens)
    margins(found, adherence)
    for lane in range(c.NUM_CANDIDATES):
        found.class_id[lane] = -1
        if found.remaining[lane] > 0:
            bucket = c.ALIGNMENT_CONTEXT
            if lane < c.FIRST_CONTEXT:
                bucket = alignment_bucket(found.position[lane], length, alignment, cursor, top)
            class_id = LENGTH_BUCKET[found.matched[lane]] * c.NUM_MARGINS
            class_id += MARGIN_BUCKET[found.margin[lane] + c.MAX_MATCH]
            found.class_id[lane] = (class_id * c.NUM_ALIGNMENTS + bucket) * c.NUM_ADHERENCES + adherence


@njit
def is_exact_prefix(alignment: AlignmentArrays, num_output: int) -> bool:
    """Whether the whole output, at most `MAX_MATCH` tokens, is the beginning of the prediction.

    With an adherence prior in `num_output` it never is: the beginning of a memory says nothing.
    """
    state = alignment.state
    return bool(state[c.IN_SYNC] > 0 and state[c.CURSOR] == num_output == state[c.NUM_IN_SYNC] <= c.MAX_MATCH)


@njit
def worth(
    matched: int, class_id: int, tables: TableArrays, length_quarters: int, first_row: int
) -> tuple[int, int]:
    """``(num, expected)``: drafts of a candidate and how many of them are expected to be accepted.

    How many tokens of its text remain does not limit either. first_row: where the limits of the request's text
    kind begin in the tables.
    """
    K = tables.expected_accepted.shape[1] - 1
    num = K if matched >= c.MAX_MATCH else min(length_quarters * (matched + 1) // 4, K)
    num = min(num, int(tables.max_draft_len[first_row + class_id]))
    # Most candidates are worth nothing, and a table is more than a cache holds.
    return num, int(tables.expected_accepted[class_id, num]) if num > 0 else 0


@njit
def choose(
    found: CandidateArrays, exact_prefix: bool, tables: TableArrays, length_quarters: int, first_row: int
) -> tuple[int, int, int]:
    """``(lane, num, expected)`` of the candidate with the most expected accepted drafts, the lower lane of two.

    num and expected are 0 where no candidate is. An exact prefix goes before all.
    """
    if exact_prefix and found.remaining[c.AT_CURSOR] > 0:
        return c.AT_CURSOR, tables.expected_accepted.shape[1] - 1, c.EXACT_PREFIX
    best, best_num, best_expected = 0, 0, 0
    for lane in range(c.NUM_CANDIDATES):
        if found.remaining[lane] > 0:
            num, expected = worth(
                found.matched[lane], found.class_id[lane], tables, length_quarters, first_row
            )
            if expected > best_expected:
                best, best_num, best_expected = lane, num, expected
    return best, best_num, best_expected


@njit
def wraps_around(matched: int, period: int) -> bool:
    """Whether the output repeats itself: a match as long as what is behind its position, `period` tokens."""
    return matched >= period


@njit
def trusts_edits(alignment: AlignmentArrays) -> bool:
    """Whether of the remembered edits at least as many were seen before as have become invalid."""
    seen_before, invalid = 0, 0
    for number in range(min(int(alignment.state[c.NUM_EDITS]), c.MAX_EDITS)):
        if alignment.edits[number, c.EDIT_BEFORE] == c.NO_EDIT:
            invalid += 1
        elif alignment.edits[number, c.EDIT_SEEN_BEFORE] > 0:
            seen_before += 1
    return seen_before >= invalid


@njit
def latest_edit(prediction: PredictionArrays, alignment: AlignmentArrays, position: int) -> int:
    """The latest edit that has the key of a position and whose old tokens are all there, or -1.

    An edit that was not seen before counts only where `trusts_edits`.
    """
    count, trusted = int(alignment.state[c.NUM_EDITS]), trusts_edits(alignment)
    for number in range(count - 1, max(count - c.MAX_EDITS, 0) - 1, -1):
        edit = alignment.edits[number % c.MAX_EDITS]
        is_there = has_key(prediction, edit, position) and position + edit[c.EDIT_OLD] <= len(
            prediction.tokens
        )
        if is_there and (trusted or edit[c.EDIT_SEEN_BEFORE] > 0):
            return number % c.MAX_EDITS
    return -1


@njit
def compose(
    prediction: PredictionArrays,
    context: ContextArrays,
    alignment: AlignmentArrays,
    position: int,
    num: int,
    shift: int,
    indents: IntArray,
    draft: IntArray,
) -> tuple[int, int]:
    """Write `num` tokens of the prediction, those indented by `shift` more, and earlier edits as they were made.

    Returns ``(length, edits replayed)``. draft: [K].
    """
    tokens = prediction.tokens
    length, replays = 0, 0
    while length < num and position < len(tokens):
        i = latest_edit(prediction, alignment, position) if replays < c.MAX_REPLAYS else -1
        if i >= 0:
            replays += 1
            edit = alignment.edits[i]
            for k in range(edit[c.EDIT_NEW]):
                if length < num:
                    draft[length] = context.tokens[context.output_start + edit[c.EDIT_START] + k]
                    length += 1
            position += int(edit[c.EDIT_OLD])
        # The token behind an edit is copied as it is.
        if length < num and position < len(tokens):
            draft[length] = shifted(tokens, position, shift, indents)
            length += 1
        position += 1
    return length, replays


@njit
def line_layout(indents: IntArray, token: int) -> int:
    """What a token does to a line: `LINE_END`, the number of a run, or 0."""
    return int(indents[c.NUM_RUNS + min(max(token, 0), len(indents) - c.NUM_RUNS - 1)])


@njit
def indentation_shift(
    text: IntArray, position: int, matched: int, context: ContextArrays, indents: IntArray
) -> int:
    """How much further than `text` the output is indented, in numbers of runs; 0 where nothing says so.

    The match of `matched` tokens before `position` stopped at two runs of one character, each behind a line end.
    """
    i, j = position - matched - 1, len(context.tokens) - matched - 1
    if not len(indents) or matched >= c.MAX_MATCH or i < 1 or j <= context.output_start:
        return 0
    for here, before in ((text[i], text[i - 1]), (context.tokens[j], context.tokens[j - 1])):
        if line_layout(indents, here) <= 0 or line_layout(indents, before) != c.LINE_END:
            return 0
    shift = line_layout(indents, context.tokens[j]) - line_layout(indents, text[i])
    return shift if shift % 2 == 0 else 0


@njit
def shifted(text: IntArray, position: int, shift: int, indents: IntArray) -> int:
    """The token at a position; of a run behind a line end, the run that is so much wider, -1 if there is none."""
    token = int(text[position])
    if shift == 0 or position == 0 or line_layout(indents, text[position - 1]) != c.LINE_END:
        return token
    run = line_layout(indents, token)
    if run <= 0:
        return token
    return int(indents[run + shift]) if 2 <= run + shift < c.NUM_RUNS else -1

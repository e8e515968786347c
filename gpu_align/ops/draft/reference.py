"""`draft` as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._jit import njit
from ..index.reference import bucket_of, match_length, nearest, recent_shift
from ..layout import (
    ANCHOR,
    CONTEXT_START,
    EDIT_NEW,
    EDIT_OLD,
    EDIT_START,
    EDITS,
    FOLLOWED,
    FOLLOWS,
    MAX_REPLAYS,
    NUM_EDITS,
    OUTPUT_START,
    TEXT_BASE,
    TEXT_LEN,
    VACANT,
    WAYS,
    WINDOW,
)
from ..realign.reference import applies, rank_of, score, standing
from ..state import StepArrays
from .tables import (
    MAX_MATCH,
    NUM_MARGINS,
    NUM_MATCHES,
    NUM_PLACES,
    NUM_TRUSTS,
    PLACE_CONTEXT,
    WINDOW_AHEAD,
    WINDOW_BEHIND,
    length_buckets,
    margin_buckets,
)

IntArray = npt.NDArray[np.signedinteger[Any]]

#: More than any rank of an end, or any end.
_TIES = (1 << 32) - 1
#: More than any gain.
_WHOLE = (1 << 31) - 1
#: The lane at the cursor, the first one in the request's own context, and all of them.
AT_CURSOR = NUM_MATCHES + WINDOW_BEHIND
FIRST_OWN = NUM_MATCHES + WINDOW_BEHIND + 1 + WINDOW_AHEAD
NUM_CANDIDATES = FIRST_OWN + NUM_MATCHES
IS_CONTEXT = np.arange(NUM_CANDIDATES) >= FIRST_OWN
_LENGTH_BUCKET, _MARGIN_BUCKET = length_buckets(), margin_buckets()


class Candidates(NamedTuple):
    """Places that the next tokens may be read from, in the order that ties prefer; int64 [C] each."""

    #: -1 where there is none.
    position: IntArray
    #: Tokens of the text from the position on; those with 0 are no candidates.
    room: IntArray
    matched: IntArray
    #: Of matches: the one with the larger key comes first.
    key: IntArray
    #: What it expects next.
    token: IntArray
    #: -1 where there is no candidate.
    klass: IntArray


def allocate_candidates(*batch: int) -> Candidates:
    """Room for the candidates of one request, or of a batch of them."""
    return Candidates(*(np.empty((*batch, NUM_CANDIDATES), dtype=np.int64) for _ in Candidates._fields))


@njit
def candidates(
    state: StepArrays,
    context: IntArray,
    slot: int,
    total: int,
    min_match: int,
    min_context_match: int,
    found: Candidates,
) -> int:
    """Write the candidates of a request, after `realign`, and return its cursor. context: [T]."""
    about, text = state.about[slot], state.text
    base, num_text = int(about[TEXT_BASE]), int(about[TEXT_LEN])
    num_output = max(total - int(about[OUTPUT_START]), 0)
    most = min(num_output, MAX_MATCH)
    last = context[total - 1] if total > 0 else 0
    cursor, top = standing(state, slot) if num_text > 0 else (0, 0)
    for lane in range(NUM_CANDIDATES):
        found.position[lane], found.matched[lane], found.key[lane] = -1, 0, -1
    # In the prediction: where the last token occurs, and around the cursor.
    begin, stop = nearest(state, slot, last, cursor)
    for i in range(begin, stop):
        end = int(state.order[i])
        matched = match_length(text, base, end, context, total, most)
        if matched >= max(min_match, 1):
            _enter(found, 0, end, matched, _TIES - rank_of(end, cursor))
    for i in range(WINDOW_BEHIND + 1 + WINDOW_AHEAD):
        end = cursor - WINDOW_BEHIND + i
        if 0 <= end < num_text:
            found.position[NUM_MATCHES + i] = end
            found.matched[NUM_MATCHES + i] = match_length(text, base, end, context, total, most)
    # In the request's own context.
    if about[CONTEXT_START] != VACANT and total > 0:
        bucket = bucket_of(last, recent_shift(state.recent[slot]))
        for way in range(WAYS):
            end = int(state.recent[slot, bucket, way])
            if 0 < end < total:
                matched = match_length(context, 0, end, context, total, MAX_MATCH)
                if matched >= max(min_context_match, 1):
                    _enter(found, FIRST_OWN, end, matched, end)
    for lane in range(NUM_CANDIDATES):
        position, own = found.position[lane], lane >= FIRST_OWN
        found.room[lane] = 0 if position < 0 else (total if own else num_text) - position
        if found.room[lane] > 0:
            found.token[lane] = context[position] if own else text[base + position]
    _classify(state, slot, found, cursor, top, num_output)
    return cursor


@njit
def _enter(found: Candidates, first: int, end: int, matched: int, tie: int) -> None:
    """Enter a match among the `NUM_MATCHES` lanes from `first` on: the longest, of equal ones the larger `tie`."""
    key = (matched << 32) + tie
    lane = first + NUM_MATCHES
    while lane > first and found.key[lane - 1] < key:
        lane -= 1
    for worse in range(first + NUM_MATCHES - 1, lane, -1):
        for field in (found.position, found.matched, found.key):
            field[worse] = field[worse - 1]
    if lane < first + NUM_MATCHES:
        found.position[lane], found.matched[lane], found.key[lane] = end, matched, key


@njit
def _classify(
    state: StepArrays, slot: int, found: Candidates, cursor: int, top: int, num_output: int
) -> None:
    """Write the class of every candidate; see the README of the operation."""
    followed = int(state.aligned[slot, FOLLOWED])
    trust = 0 if 8 * followed < num_output else 1 if 2 * followed < num_output else 2
    # Margin: matched tokens ahead of the longest match that expects another token next. A prediction that the
    # output does not follow has no say in it.
    heard = FIRST_OWN if trust == 0 else 0
    reach, leader, rival = -1, -1, 0
    for c in range(heard, NUM_CANDIDATES):
        if found.room[c] > 0 and found.matched[c] > reach:
            reach, leader = found.matched[c], found.token[c]
    for c in range(heard, NUM_CANDIDATES):
        if found.room[c] > 0 and found.token[c] != leader:
            rival = max(rival, found.matched[c])
    for c in range(NUM_CANDIDATES):
        if found.room[c] <= 0:
            found.klass[c] = -1
            continue
        matched = found.matched[c]
        margin = matched - (rival if found.token[c] == leader else max(reach, 0))
        place = PLACE_CONTEXT if c >= FIRST_OWN else place_of(state, slot, found.position[c], cursor, top)
        evidence = _LENGTH_BUCKET[matched] * NUM_MARGINS + _MARGIN_BUCKET[margin + MAX_MATCH]
        found.klass[c] = (evidence * NUM_PLACES + place) * NUM_TRUSTS + trust


@njit
def place_of(state: StepArrays, slot: int, position: int, cursor: int, top: int) -> int:
    """Where a candidate in the prediction is as the alignment sees it; see the README of the operation."""
    away = position - cursor
    if away == 0 or away == 1:
        return away
    if state.aligned[slot, FOLLOWS] > 0:
        worse = away if away > 0 else 2 - away
    else:
        j = position - int(state.aligned[slot, ANCHOR])
        inside = 0 <= j <= min(WINDOW, int(state.about[slot, TEXT_LEN]) - int(state.aligned[slot, ANCHOR]))
        worse = top - score(state.row[slot], j) if inside else 99
    if -WINDOW_BEHIND <= away <= WINDOW_AHEAD:
        return 2 if worse <= 2 else 3 if worse <= 5 else 4
    return 5 if worse <= 16 else 6


@njit
def is_whole(state: StepArrays, slot: int, cursor: int, total: int) -> bool:
    """Whether everything generated so far, at most `MAX_MATCH` tokens, is the beginning of the prediction."""
    num_output = max(total - int(state.about[slot, OUTPUT_START]), 0)
    followed = int(state.aligned[slot, FOLLOWED])
    return bool(state.aligned[slot, FOLLOWS] > 0 and cursor == num_output == followed <= MAX_MATCH)


@njit
def value_of(
    matched: int, klass: int, keep: npt.NDArray[np.int32], gain: npt.NDArray[np.int32], length_quarters: int
) -> tuple[int, int]:
    """``(num, value)``: drafts of a candidate, its room aside, and what they are worth."""
    K = gain.shape[1] - 1
    num = K if matched >= MAX_MATCH else min(length_quarters * (matched + 1) // 4, K)
    num = min(num, int(keep[klass]))
    # Most are worth nothing, and a table is more than a cache holds.
    return num, int(gain[klass, num]) if num > 0 else 0


@njit
def choose(
    found: Candidates,
    whole: bool,
    keep: npt.NDArray[np.int32],
    gain: npt.NDArray[np.int32],
    length_quarters: int,
) -> tuple[int, int, int]:
    """``(lane, num, value)`` of the candidate that promises the most accepted drafts; of equal ones the first.

    num is 0 where there is nothing to draft from, and `value` what it promises: nothing beats a whole output.
    """
    if whole and found.room[AT_CURSOR] > 0:
        return AT_CURSOR, gain.shape[1] - 1, _WHOLE
    best, best_num, best_value = 0, 0, 0
    for lane in range(NUM_CANDIDATES):
        if found.room[lane] > 0:
            num, value = value_of(found.matched[lane], found.klass[lane], keep, gain, length_quarters)
            if value > best_value:
                best, best_num, best_value = lane, num, value
    return best, best_num, best_value


@njit
def compose(
    state: StepArrays,
    context: IntArray,
    slot: int,
    lane: int,
    position: int,
    num: int,
    total: int,
    draft: IntArray,
) -> tuple[int, int]:
    """Write the continuation with the edits made before made again; ``(length, edits made)``. draft: [K]."""
    if lane >= FIRST_OWN:
        num = min(num, total - position)
        for k in range(num):
            draft[k] = context[position + k]
        return num, 0
    base, num_text = int(state.about[slot, TEXT_BASE]), int(state.about[slot, TEXT_LEN])
    start = int(state.about[slot, OUTPUT_START])
    length, made = 0, 0
    while length < num and position < num_text:
        i = _latest(state, slot, position) if made < MAX_REPLAYS else -1
        if i >= 0:
            made += 1
            edit = state.edits[slot, i]
            for k in range(edit[EDIT_NEW]):
                if length < num:
                    draft[length] = context[start + edit[EDIT_START] + k]
                    length += 1
            position += int(edit[EDIT_OLD])
        # The token behind an edit is copied as it is.
        if length < num and position < num_text:
            draft[length] = state.text[base + position]
            length += 1
        position += 1
    return length, made


@njit
def _latest(state: StepArrays, slot: int, place: int) -> int:
    """The latest edit that applies at this place and whose old tokens are all there, or -1."""
    count = int(state.aligned[slot, NUM_EDITS])
    room = int(state.about[slot, TEXT_LEN]) - place
    for number in range(count - 1, max(count - EDITS, 0) - 1, -1):
        i = number % EDITS
        if applies(state, slot, i, place) and state.edits[slot, i, EDIT_OLD] <= room:
            return i
    return -1

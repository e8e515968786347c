"""`draft` in NumPy, for many requests at once: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..index.reference import match_lengths, nearest, recent_ends
from ..layout import (
    ANCHOR,
    CONTEXT_START,
    EDIT_NEW,
    EDIT_OLD,
    EDIT_START,
    EDITS,
    FOLLOWED,
    FOLLOWS,
    MAX_EDIT,
    MAX_REPLAYS,
    NUM_EDITS,
    OUTPUT_START,
    TEXT_BASE,
    TEXT_LEN,
    WINDOW,
)
from ..realign.reference import edits_at, rank_of, standing
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

_BEST_GAIN = 0x7FFFFFFF
_WINDOW = np.arange(-WINDOW_BEHIND, WINDOW_AHEAD + 1)
#: The lane at the cursor, and which lanes are places in the request's own context.
_AT_CURSOR = NUM_MATCHES + WINDOW_BEHIND
IS_CONTEXT = np.repeat([False, True], [NUM_MATCHES + len(_WINDOW), NUM_MATCHES])
_LENGTH_BUCKET, _MARGIN_BUCKET = length_buckets(), margin_buckets()
_LOWER = (1 << 32) - 1


class Candidates(NamedTuple):
    """Places that the next tokens may be read from, in the order that ties prefer; [R, C] where not said."""

    position: IntArray
    #: Tokens of the text from the position on; those with 0 are no candidates.
    room: IntArray
    matched: IntArray
    klass: IntArray
    #: [R]: whether everything generated so far is the beginning of the prediction.
    whole: npt.NDArray[np.bool_]
    #: [R]: where the output stands in the prediction.
    cursor: IntArray

    def values(
        self, keep: npt.NDArray[np.int32], gain: npt.NDArray[np.int32], length_quarters: int
    ) -> tuple[IntArray, IntArray]:
        """``(num, value)``, both [R, C]: drafts of each candidate, room aside, and what they are worth."""
        K = gain.shape[1] - 1
        limit = np.minimum(length_quarters * (self.matched + 1) // 4, K)
        limit[self.matched >= MAX_MATCH] = K
        num = np.minimum(limit, keep[self.klass])
        value = gain[self.klass, num]
        value[self.room <= 0] = 0
        whole = self.whole & (self.room[:, _AT_CURSOR] > 0)
        num[whole, _AT_CURSOR], value[whole, _AT_CURSOR] = K, _BEST_GAIN
        return num, value


def candidates(
    state: StepArrays,
    context: IntArray,
    slots: IntArray,
    totals: IntArray,
    min_match: int,
    min_context_match: int,
    recent_shift: int,
) -> Candidates:
    """The candidates of these requests, after `realign_reference`. context: [S, T]. slots, totals: [R]."""
    about, at = state.about[slots], np.arange(len(slots))[:, None]
    base, num_text = about[:, TEXT_BASE], about[:, TEXT_LEN]
    num_output = np.maximum(totals - about[:, OUTPUT_START], 0)
    flat, width = context.reshape(-1), context.shape[1]
    context_end = slots * width + totals
    last = flat[np.maximum(context_end - 1, 0)]
    cursor, drop = standing(state, slots)

    # In the prediction: where the last token occurs, and around the cursor.
    ends = nearest(state, slots, last, cursor)
    window = cursor[:, None] + _WINDOW
    window = np.where((window >= 0) & (window < num_text[:, None]), window, -1)
    ends = np.concatenate([ends, window], axis=1)
    lengths = match_lengths(state.text, base, ends, flat, context_end, num_output, MAX_MATCH)
    found = ends[:, : -len(_WINDOW)], lengths[:, : -len(_WINDOW)]
    tie = _LOWER - rank_of(found[0], cursor[:, None])
    best = _best(found[1], tie, min_match)
    rank = _LOWER - (best & _LOWER)
    end = cursor[:, None] + np.where(rank % 2 == 0, rank // 2, -(rank // 2))
    in_text = np.where(best > 0, end, -1), np.where(best > 0, best >> 32, 0)

    # In the request's own context.
    begin = about[:, CONTEXT_START]
    ends = recent_ends(state.recent, slots, last, recent_shift)
    known = (ends > begin[:, None]) & (ends < totals[:, None])
    limit = np.maximum(totals - begin, 0)
    shifted = np.where(known, ends - begin[:, None], -1)
    matched = match_lengths(flat, slots * width + begin, shifted, flat, context_end, limit, MAX_MATCH)
    best = _best(matched, ends, min_context_match)
    in_context = np.where(best > 0, best & _LOWER, -1), np.where(best > 0, best >> 32, 0)

    position = np.concatenate([in_text[0], window, in_context[0]], axis=1)
    matched = np.concatenate([in_text[1], lengths[:, -len(_WINDOW) :], in_context[1]], axis=1)
    room = np.where(position < 0, 0, np.where(IS_CONTEXT, totals[:, None], num_text[:, None]) - position)
    live = room > 0
    read = np.where(live, np.where(IS_CONTEXT, (slots * width)[:, None], base[:, None]) + position, 0)
    token = np.where(
        IS_CONTEXT, flat[np.where(IS_CONTEXT, read, 0)], state.text[np.where(IS_CONTEXT, 0, read)]
    )

    # Margin: matched tokens ahead of the longest match that expects another token next.
    reach = np.where(live, matched, -1)
    first = reach.argmax(axis=1)[:, None]
    agrees = token == token[at, first]
    rival = np.where(live & ~agrees, matched, 0).max(axis=1)[:, None]
    margin = np.where(live, matched - np.where(agrees, rival, np.maximum(reach[at, first], 0)), 0)
    place = _places(state.aligned[slots], position, cursor, drop)
    followed = state.aligned[slots, FOLLOWED]
    trust = np.where(8 * followed < num_output, 0, np.where(2 * followed < num_output, 1, 2))
    evidence = _LENGTH_BUCKET[np.where(live, matched, 0)] * NUM_MARGINS + _MARGIN_BUCKET[margin + MAX_MATCH]
    klass = (evidence * NUM_PLACES + place) * NUM_TRUSTS + trust[:, None]
    whole = (state.aligned[slots, FOLLOWS] > 0) & (cursor == num_output) & (followed == num_output)
    whole &= num_output <= MAX_MATCH
    return Candidates(position, room, matched, klass, whole, cursor)


def _best(lengths: IntArray, tie: IntArray, shortest: int) -> IntArray:
    """[R, `NUM_MATCHES`]: keys of the longest matches, of equally long ones those of the larger `tie`; 0: none."""
    key = np.where((lengths >= shortest) & (lengths > 0), (lengths << 32) | tie, 0)
    return np.sort(key, axis=1)[:, : -NUM_MATCHES - 1 : -1]


def _places(aligned: IntArray, position: IntArray, cursor: IntArray, drop: IntArray) -> IntArray:
    """[R, C]: where each candidate is as the alignment sees it; see the README of the operation."""
    away = position - cursor[:, None]
    j = position - aligned[:, ANCHOR, None]
    inside = (j >= 0) & (j <= WINDOW)
    lost = np.where(inside, drop[np.arange(len(j))[:, None], np.where(inside, j, 0)], 99)
    follows = aligned[:, FOLLOWS, None] > 0
    worse = np.where(follows, np.where(away > 0, away, 2 - away), lost)
    near = np.where(worse <= 2, 2, np.where(worse <= 5, 3, 4))
    place = np.where((away >= -WINDOW_BEHIND) & (away <= WINDOW_AHEAD), near, np.where(worse <= 16, 5, 6))
    place = np.where((away == 0) | (away == 1), away, place)
    return np.where(IS_CONTEXT, PLACE_CONTEXT, place)


class Chosen(NamedTuple):
    """What is drafted from; all [R]."""

    lane: IntArray
    #: Drafts; 0 where there is nothing to draft from.
    num: IntArray


def choose(
    found: Candidates, keep: npt.NDArray[np.int32], gain: npt.NDArray[np.int32], length_quarters: int
) -> Chosen:
    """The candidate with the largest expected number of accepted drafts; of equal ones the first."""
    num, value = found.values(keep, gain, length_quarters)
    at, lane = np.arange(len(value)), value.argmax(axis=1)
    return Chosen(lane, np.where(value[at, lane] > 0, num[at, lane], 0))


class Composed(NamedTuple):
    """What is drafted, before it is cut at the context's end and the vocabulary's."""

    #: [R, K]
    tokens: IntArray
    #: [R]
    length: IntArray
    #: [R]: edits that were made again.
    edits: IntArray


def compose(
    state: StepArrays,
    context: IntArray,
    slots: IntArray,
    found: Candidates,
    chosen: Chosen,
    totals: IntArray,
    K: int,
) -> Composed:
    """The chosen continuation, with the edits made before made again."""
    at, ahead = np.arange(len(slots)), np.arange(K)
    own = IS_CONTEXT[chosen.lane]
    position = found.position[at, chosen.lane]
    length = np.minimum(chosen.num, found.room[at, chosen.lane])
    inside = ahead < length[:, None]
    place = position[:, None] + ahead
    flat, width = context.reshape(-1), context.shape[1]
    in_context = flat[np.where(inside & own[:, None], (slots * width)[:, None] + place, 0)]
    in_text = state.text[np.where(inside & ~own[:, None], state.about[slots, TEXT_BASE, None] + place, 0)]
    tokens = np.where(own[:, None], in_context, in_text)
    # As far as K tokens can reach when edits take tokens away.
    span = np.arange(int(chosen.num.max(initial=0)) + MAX_REPLAYS * (MAX_EDIT + 1))
    drafting = np.flatnonzero(~own & (length > 0))
    places = position[drafting, None] + span
    hits = edits_at(state, slots[drafting], places)
    hits &= (
        places[:, None] + state.edits[slots[drafting], :, EDIT_OLD, None]
        <= (state.about[slots[drafting], None, None, TEXT_LEN])
    )
    made = np.zeros(len(slots), dtype=np.int64)
    for i in np.flatnonzero(hits.any(axis=(1, 2))):
        r = drafting[i]
        slot, start = int(slots[r]), int(state.about[slots[r], OUTPUT_START])
        output = context[slot, start : int(totals[r])]
        draft, made[r] = replay(state, slot, output, int(position[r]), int(chosen.num[r]), hits[i])
        length[r] = len(draft)
        tokens[r, : len(draft)] = draft
    return Composed(tokens, length, made)


def replay(
    state: StepArrays, slot: int, output: IntArray, position: int, num: int, hits: npt.NDArray[np.bool_]
) -> tuple[IntArray, int]:
    """``(tokens, edits)``: `num` tokens of the prediction from `position` on, with the slot's edits made again.

    Of several edits that apply in one place the latest is made; at most `MAX_REPLAYS` in all.

    hits: [`EDITS`, P], which edit applies how far behind the position.
    """
    base, num_text = int(state.about[slot, TEXT_BASE]), int(state.about[slot, TEXT_LEN])
    newest_first = np.argsort(-((np.arange(EDITS) - state.aligned[slot, NUM_EDITS]) % EDITS))
    edits, hits = state.edits[slot][newest_first], hits[newest_first]
    span = min(hits.shape[1], num_text - position)
    parts: list[IntArray] = []
    length, done, replays = 0, 0, 0
    while length < num and done < span:
        ahead = (
            np.flatnonzero(hits[:, done:span].any(axis=0)) if replays < MAX_REPLAYS else np.zeros(0, np.int64)
        )
        upto = done + int(ahead[0]) if ahead.size else span
        parts.append(state.text[base + position + done : base + position + upto])
        length += upto - done
        done = upto
        if ahead.size and length < num:
            edit = edits[int(hits[:, done].argmax())]
            new = output[edit[EDIT_START] : edit[EDIT_START] + edit[EDIT_NEW]]
            done += int(edit[EDIT_OLD])
            # The token behind an edit is copied as it is.
            parts += [new, state.text[base + position + done : base + min(position + done + 1, num_text)]]
            length += len(new) + len(parts[-1])
            done += 1
            replays += 1
    return np.concatenate(parts)[:num], replays

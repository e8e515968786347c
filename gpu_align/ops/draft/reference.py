"""`draft` in plain Python and NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .tables import (
    MAX_MATCH,
    NUM_MARGINS,
    NUM_PLACES,
    NUM_TRUSTS,
    PLACE_CONTEXT,
    TRUST_FROM,
    WINDOW_AHEAD,
    WINDOW_BEHIND,
    SurvivalTables,
    length_buckets,
    margin_buckets,
)

IntArray = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.signedinteger[Any]]

_BEST_GAIN = 0x7FFFFFFF
_WINDOW = np.arange(-WINDOW_BEHIND, WINDOW_AHEAD + 1)
_IS_CONTEXT = np.array([False] * (2 + len(_WINDOW)) + [True] * 2)
_LENGTH_BUCKET, _MARGIN_BUCKET = length_buckets(), margin_buckets()
_BACK = np.arange(MAX_MATCH)


class Candidates(NamedTuple):
    """Places that the next tokens may be read from, in the order that ties prefer; all [C]."""

    #: Whether the text is the request's own context, else the prediction.
    is_context: npt.NDArray[np.bool_]
    position: IntArray
    #: Tokens of the text from the position on; those with 0 are no candidates.
    room: IntArray
    matched: IntArray
    klass: IntArray
    #: Whether everything generated so far is the beginning of the prediction.
    whole: npt.NDArray[np.bool_]

    def values(
        self, keep: npt.NDArray[np.int32], gain: npt.NDArray[np.int32], length_quarters: int
    ) -> tuple[IntArray, IntArray]:
        """``(num, value)``, both [C]: drafts of each candidate, room aside, and what they are worth."""
        K = gain.shape[1] - 1
        limit = np.minimum(length_quarters * self.matched // 4 + 1, K)
        limit[self.matched >= MAX_MATCH] = K
        num = np.where(self.whole, K, np.minimum(limit, keep[self.klass]))
        value = np.where(self.whole, _BEST_GAIN, gain[self.klass, num])
        value[self.room <= 0] = 0
        return num, value


def trust_of(followed: int, num_output: int) -> int:
    """How much of the output follows its prediction: 0 hardly any, 1 less than half, 2 more."""
    if num_output < TRUST_FROM:
        return 2
    return 0 if 8 * followed < num_output else 1 if 2 * followed < num_output else 2


def place_of(away: IntArray) -> IntArray:
    """Distance from the cursor -> place."""
    steps = [away == 0, away == 1, away < -2, away < 0, away <= 4, away <= 16]
    return np.select(steps, [0, 1, 5, 4, 2, 3], default=6)


def window_matches(prediction: Tokens, output: Tokens, position: IntArray) -> IntArray:
    """Common suffix of the output and of ``prediction[:position]``, at most `MAX_MATCH`, for each position."""
    read = position[:, None] - 1 - _BACK
    possible = (read >= 0) & (read < len(prediction)) & (len(output) > _BACK)
    if not (len(prediction) and len(output)):
        return np.zeros(len(position), dtype=np.int64)
    same = prediction[np.where(possible, read, 0)] == output[np.where(len(output) > _BACK, -1 - _BACK, 0)]
    differs = ~(same & possible)
    return np.where(differs.any(axis=1), differs.argmax(axis=1), MAX_MATCH)


def candidates(
    prediction: Tokens,
    context: Tokens,
    num_output: int,
    cursor: int,
    followed: int,
    matches: tuple[tuple[int, int], ...],
) -> Candidates:
    """The candidates of one request. matches: ``(end, length)`` of the best and second best match in the
    prediction, then of those in the context, ``(-1, 0)`` where there is none."""
    output = context[len(context) - num_output :]
    window = cursor + _WINDOW
    inside = np.where((window >= 0) & (window < len(prediction)), window, -1)
    ends, lengths = zip(*matches, strict=True)
    position = np.array([*ends[:2], *inside, *ends[2:]])
    matched = np.array([*lengths[:2], *window_matches(prediction, output, inside), *lengths[2:]])
    room = np.where(_IS_CONTEXT, len(context), len(prediction)) - position
    room[position < 0] = 0
    live = room > 0
    token = np.full(len(position), -1)
    for text, mask in ((prediction, live & ~_IS_CONTEXT), (context, live & _IS_CONTEXT)):
        token[mask] = text[position[mask]]
    # Margin: matched tokens ahead of the longest match that expects another token next.
    reach = np.where(live, matched, -1)
    first = int(reach.argmax())
    agrees = token == token[first]
    rival = int(np.where(live & ~agrees, matched, 0).max())
    margin = np.where(live, matched - np.where(agrees, rival, reach[first]), 0)
    place = np.where(_IS_CONTEXT, PLACE_CONTEXT, place_of(position - cursor))
    evidence = _LENGTH_BUCKET[np.where(live, matched, 0)] * NUM_MARGINS + _MARGIN_BUCKET[margin + MAX_MATCH]
    klass = (evidence * NUM_PLACES + place) * NUM_TRUSTS + trust_of(followed, num_output)
    whole = np.zeros(len(position), dtype=np.bool_)
    whole[0] = ends[0] == num_output <= MAX_MATCH and lengths[0] == MAX_MATCH
    return Candidates(_IS_CONTEXT, position, room, matched, klass, whole)


def choose(
    found: Candidates, keep: npt.NDArray[np.int32], gain: npt.NDArray[np.int32], length_quarters: int
) -> tuple[int, int] | None:
    """``(index, drafts)`` of the candidate with the largest expected number of accepted drafts."""
    num, value = found.values(keep, gain, length_quarters)
    best = int(value.argmax())
    return (best, int(min(num[best], found.room[best]))) if value[best] > 0 else None


def draft_reference(
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
    followed: torch.Tensor,
    prediction_end: torch.Tensor,
    prediction_matched: torch.Tensor,
    prediction_second_end: torch.Tensor,
    prediction_second_matched: torch.Tensor,
    context_end: torch.Tensor,
    context_matched: torch.Tensor,
    context_second_end: torch.Tensor,
    context_second_matched: torch.Tensor,
    tables: SurvivalTables,
    token_ids: torch.Tensor,
    length: torch.Tensor,
    confidence: torch.Tensor,
    source: torch.Tensor,
    length_quarters: int,
    vocab_size: int,
) -> None:
    """Same arguments, same results as the kernel's launcher; all on the CPU."""
    keep, gain, probability = (t.numpy() for t in (tables.keep, tables.gain, tables.confidence))
    predictions, contexts = prediction.numpy(), context.numpy()
    starts, totals, text_lens = (t.numpy() for t in (context_start, context_len, prediction_len))
    drafted, lengths, confidences, sources = (t.numpy() for t in (token_ids, length, confidence, source))
    found_ends = (prediction_end, prediction_second_end, context_end, context_second_end)
    found_lengths = (prediction_matched, prediction_second_matched, context_matched, context_second_matched)
    for b, (slot, is_active) in enumerate(zip(slots.tolist(), active.tolist(), strict=True)):
        total, start = int(totals[slot]), int(starts[slot])
        row = contexts[slot, : max(total, 0)]
        last = int(row[-1]) if total > 0 else 0
        drafted[b] = last if 0 <= last < vocab_size else 0
        lengths[b], confidences[b], sources[b] = 0, 0.0, 0
        if is_active <= 0:
            continue
        text = predictions[slot, : text_lens[slot]]
        matches = tuple(
            (int(e[b]), int(matched[b])) for e, matched in zip(found_ends, found_lengths, strict=True)
        )
        found = candidates(text, row, max(total - start, 0), int(cursor[b]), int(followed[b]), matches)
        chosen = choose(found, keep, gain, length_quarters)
        if chosen is None:
            continue
        best, num = chosen
        num = max(min(num, contexts.shape[1] - total), 0)
        position = found.position[best]
        tokens = (row if found.is_context[best] else text)[position : position + num]
        bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        num = int(bad[0]) if bad.size else num
        if num:
            drafted[b, :num], confidences[b, :num] = tokens[:num], probability[found.klass[best], :num]
            lengths[b], sources[b] = num, 2 if found.is_context[best] else 1

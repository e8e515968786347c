"""Matches and candidates as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np

from ..align.reference import match_length, score_deficit
from ..host import align, layout, match, njit
from ..index.reference import nearest
from ..layout import Alignment, IntArray, Request, StepSettings
from . import Candidates, Workspace


def allocate_workspace(*batch: int) -> Workspace:
    """The workspace of one request, or of a batch of them."""
    shape = len(Candidates._fields) + 3, *batch, match.NUM_CANDIDATES
    *found, key, margin, class_id = np.zeros(shape, np.int64)
    return Workspace(Candidates(*found), key, margin, class_id)


@njit
def _common_before(text: IntArray, position: int, last: IntArray) -> int:
    """The LCS of the `COMMON_WINDOW` tokens before a position of a text and those at the end of `last`."""
    row = -1
    for b in range(min(match.COMMON_WINDOW, len(last))):
        matches = 0
        for a in range(min(match.COMMON_WINDOW, position)):
            matches |= int(text[position - 1 - a] == last[len(last) - 1 - b]) << a
        row = align.extend_row(row, matches)
    return int(align.count_ones(~row))


@njit
def _match_keys(
    request: Request, bucket: tuple[int, int], alignment: Alignment, settings: StepSettings, keys: IntArray
) -> IntArray:
    """The keys of the `NUM_MATCHES` best matches of each text, in falling order; -1 for none.

    Matches in the prediction are in the first lanes, those in the context in the lanes from `FIRST_CONTEXT` on.
    """
    prediction, context = request.prediction, request.context
    tokens, total, cursor = request.tokens, request.total, alignment.cursor
    output, settled = tokens[min(request.output_start, total) :], match.is_settled(alignment)
    keys[:] = -1
    begin, end = nearest(prediction, bucket, cursor, layout.WAYS)
    for i in range(begin, end):
        position = int(prediction.index.positions[i])
        tie = match.COMMON_TIE - 1 - align.rank_of(position, cursor)
        _enter(keys, 0, _match_key(prediction.tokens, position, output, tie, settled, settings.min_match))
    if context.length > 0:
        bucket_id = layout.bucket_of(request.last, context.index.shift)
        for way in range(layout.WAYS):
            position = int(context.index.ways[bucket_id, way])
            if 0 < position < total:
                key = _match_key(tokens, position, tokens, position, settled, settings.min_match)
                _enter(keys, match.FIRST_CONTEXT, key)
    return keys


@njit
def _match_key(text: IntArray, position: int, last: IntArray, tie: int, settled: bool, least: int) -> int:
    """The key of a position of a text that `last` may end like; -1 where fewer than `least` tokens match."""
    matched = match_length(text, position, last, min(len(last), match.MAX_MATCH))
    if matched < least:
        return -1
    common = 0 if settled else _common_before(text, position - matched, last[: len(last) - matched])
    return int(match.key_of(matched, common, tie))


@njit
def _enter(keys: IntArray, first: int, key: int) -> None:
    """Put a key in its place among the `NUM_MATCHES` lanes from `first` on, if it is among the largest."""
    lane = first + match.NUM_MATCHES - 1
    if key < 0 or keys[lane] > key:
        return
    while lane > first and keys[lane - 1] < key:
        keys[lane] = keys[lane - 1]
        lane -= 1
    keys[lane] = key


@njit
def candidates(
    request: Request, bucket: tuple[int, int], alignment: Alignment, settings: StepSettings, space: Workspace
) -> Candidates:
    """All candidates of a request that stands where `alignment` says.

    bucket: of the output's last token in the prediction. space: written.
    """
    prediction, cursor, found = request.prediction, alignment.cursor, space.found
    keys = _match_keys(request, bucket, alignment, settings, space.key)
    most = min(max(request.total - request.output_start, 0), match.MAX_MATCH)
    for lane in range(match.NUM_CANDIDATES):
        in_context, key = lane >= match.FIRST_CONTEXT, int(keys[lane])
        position, matched, common = -1, 0, 0
        if key >= 0:
            tie = key % match.COMMON_TIE
            position = tie if in_context else align.position_of(match.COMMON_TIE - 1 - tie, cursor)
            matched, common = key // match.TIE + 1, key % match.TIE // match.COMMON_TIE
        elif match.AT_CURSOR <= lane < match.FIRST_CONTEXT:
            near = cursor + lane - match.AT_CURSOR
            if near < prediction.length:
                position, matched = near, match_length(prediction.tokens, near, request.tokens, most)
        found.source[lane] = layout.TEXT_CONTEXT if in_context else prediction.rules.source
        found.position[lane], found.matched[lane] = position, matched
        found.deficit[lane] = 0 if in_context else score_deficit(position, alignment)
        found.strength[lane] = matched + (common // 2 if in_context else 0)
        text = request.tokens if in_context else prediction.tokens
        found.token[lane] = text[position] if position >= 0 else 0
    return found

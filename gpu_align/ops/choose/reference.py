"""Classes and the choice as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np

from ..host import choose, layout, match, njit, to_int
from ..layout import Alignment, IntArray, Request
from ..match import Candidates, Workspace
from . import Choice, SurvivalTables

#: Above every strength.
_MOST = 2 * match.MAX_MATCH
#: The bucket of each strength, and of each margin + `_MOST`: how many edges it has reached.
LENGTH_BUCKET = np.searchsorted(choose.LENGTH_EDGES, np.arange(_MOST + 1), side="right")
MARGIN_BUCKET = np.searchsorted(choose.MARGIN_EDGES, np.arange(-_MOST, _MOST + 1), side="right")


@njit
def margins(found: Candidates, adherence: int, margin: IntArray) -> IntArray:
    """How much stronger each candidate is than the strongest one that expects another token next; in `margin`.

    Candidates in a prediction that the output hardly adheres to are ignored.
    """
    reach, leader, runner_up = -1, 0, 0
    for lane in range(match.NUM_CANDIDATES):
        is_followed = found.source[lane] == layout.TEXT_CONTEXT or adherence != choose.ADHERENCE_LOST
        strength = found.strength[lane] if found.position[lane] >= 0 and is_followed else -1
        margin[lane] = strength  # for now; below 0 it is not considered
        if strength > reach:
            reach, leader = strength, lane
    token = found.token[leader]
    for lane in range(match.NUM_CANDIDATES):
        if found.token[lane] != token:
            runner_up = max(runner_up, margin[lane])
    # Where nothing is considered, nothing is ahead of anything.
    reach = max(reach, 0)
    for lane in range(match.NUM_CANDIDATES):
        margin[lane] = found.strength[lane] - (runner_up if found.token[lane] == token else reach)
    return margin


@njit
def votes(request: Request, found: Candidates, space: Workspace) -> None:
    """Write dissent and agreement of each candidate to `margin` and `class_id`."""
    ahead, dissent, agreement = space.key, space.margin, space.class_id
    for lane in range(match.NUM_CANDIDATES):
        text = request.tokens if found.source[lane] == layout.TEXT_CONTEXT else request.prediction.tokens
        ahead[lane], dissent[lane], agreement[lane] = found.token[lane], 0, -1
        for i in range(1, choose.AHEAD if found.position[lane] >= 0 else 1):
            token = text[min(found.position[lane] + i, len(text) - 1)]
            ahead[lane] = choose.ahead_of(ahead[lane], to_int(token))
    for lane in range(match.NUM_CANDIDATES):
        for i in range(match.NUM_CANDIDATES):
            if found.position[i] >= 0:
                is_other = found.token[i] != found.token[lane] and found.strength[i] >= found.strength[lane]
                dissent[lane] += int(is_other)
                agreement[lane] += int(ahead[i] == ahead[lane])
        agreement[lane] = min(agreement[lane], choose.NUM_ADHERENCES - 1)


@njit
def classes(
    request: Request, found: Candidates, alignment: Alignment, num_output: int, space: Workspace
) -> None:
    """Write the class of every candidate to `class_id`; -1 without one. num_output: with the adherence prior."""
    adherence = choose.adherence_of(alignment.num_in_sync, num_output)
    margin, class_id = margins(found, adherence, space.margin), space.class_id
    is_sampled = request.prediction.rules.limits >= choose.SAMPLES
    if is_sampled:
        votes(request, found, space)
    for lane in range(match.NUM_CANDIDATES):
        position, bucket = found.position[lane], choose.ALIGNMENT_CONTEXT
        if found.source[lane] != layout.TEXT_CONTEXT:
            bucket = choose.alignment_bucket(position - alignment.cursor, found.deficit[lane])
        by_margin, by_adherence = MARGIN_BUCKET[margin[lane] + _MOST], adherence
        if is_sampled:
            by_margin, by_adherence = margin[lane], class_id[lane]
        length = LENGTH_BUCKET[found.strength[lane]]
        packed = choose.pack_class(length, by_margin, bucket, by_adherence)
        class_id[lane] = packed if position >= 0 else -1


@njit
def worth(matched: int, table_row: int, tables: SurvivalTables, length_quarters: int) -> tuple[int, int]:
    """``(num, expected)``: drafts of a candidate and how many of them are expected to be accepted.

    How many tokens of its text remain limits neither. table_row: its class, plus `NUM_CLASSES` for each of the
    limits of its text.
    """
    K = tables.expected_accepted.shape[1] - 1
    num = K if matched >= match.MAX_MATCH else min(length_quarters * (matched + 1) // 4, K)
    num = min(num, int(tables.max_draft_len[table_row]))
    return num, int(tables.expected_accepted[table_row, num])


@njit
def choose_candidate(
    request: Request,
    found: Candidates,
    alignment: Alignment,
    tables: SurvivalTables,
    length_quarters: int,
    space: Workspace,
) -> Choice:
    """The candidate with the most expected accepted drafts, the lower lane of two; num is 0 where none has any.

    An exact prefix goes before all.
    """
    rules = request.prediction.rules
    num_output = max(request.total - request.output_start, 0) + rules.prior
    classes(request, found, alignment, num_output, space)
    is_exact = choose.is_exact_prefix(alignment, num_output)
    best, best_num, best_expected = 0, 0, 0
    for lane in range(match.NUM_CANDIDATES):
        if found.position[lane] >= 0:
            table_row = space.class_id[lane] + rules.limits * choose.NUM_CLASSES
            num, expected = worth(found.matched[lane], table_row, tables, length_quarters)
            if is_exact and lane == match.AT_CURSOR:
                num, expected = tables.expected_accepted.shape[1] - 1, choose.EXACT_PREFIX
            if expected > best_expected:
                best, best_num, best_expected = lane, num, expected
    is_hot = request.meta[layout.IS_HOT]
    block = rules.limits - 1 if rules.limits >= choose.SAMPLES else is_hot
    return Choice(
        best, to_int(found.source[best]), to_int(found.position[best]), to_int(found.matched[best]),
        to_int(space.class_id[best] + block * choose.NUM_CLASSES), best_num, best_expected,
    )  # fmt: skip

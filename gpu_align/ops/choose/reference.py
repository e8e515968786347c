"""Classes and the choice as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..host import align, choose, layout, match, njit, to_int
from ..layout import Alignment, Choice, Request, StepSettings
from ..match.reference import CandidateArrays
from .survival import SurvivalTables

#: The most that matched length and what is in common before it are worth together.
_MOST = match.MAX_MATCH + match.COMMON_WINDOW // 2
#: The bucket of each strength, and of each margin + `_MOST`: how many edges it has reached.
LENGTH_BUCKET = np.searchsorted(choose.LENGTH_EDGES, np.arange(_MOST + 1), side="right")
MARGIN_BUCKET = np.searchsorted(choose.MARGIN_EDGES, np.arange(-_MOST, _MOST + 1), side="right")


@njit
def margins(found: CandidateArrays, adherence: int) -> None:
    """Write how much stronger each candidate is than the strongest one that expects another token next.

    Candidates in a prediction that the output hardly adheres to are ignored.
    """
    reach, leader, runner_up = -1, 0, 0
    for lane in range(match.NUM_CANDIDATES):
        is_followed = found.source[lane] == layout.TEXT_CONTEXT or adherence != choose.ADHERENCE_LOST
        strength = found.strength[lane] if found.remaining[lane] > 0 and is_followed else -1
        found.margin[lane] = strength  # for now; below 0 it is not considered
        if strength > reach:
            reach, leader = strength, lane
    token = found.token[leader]
    for lane in range(match.NUM_CANDIDATES):
        if found.token[lane] != token:
            runner_up = max(runner_up, found.margin[lane])
    # Where nothing is considered, nothing is ahead of anything.
    reach = max(reach, 0)
    for lane in range(match.NUM_CANDIDATES):
        found.margin[lane] = found.strength[lane] - (runner_up if found.token[lane] == token else reach)


@njit
def score_deficit(position: int, alignment: Alignment) -> Any:
    """How much worse than the cursor the alignment finds a position in the prediction.

    In sync: `deficit_of` the distance. Diverged: by how much `score_at` is lower; outside of the window it is far.
    """
    if alignment.in_sync > 0:
        return choose.deficit_of(position - alignment.cursor)
    j = position - alignment.anchor
    if not 0 <= j <= align.WINDOW:
        return choose.CLOSE_DEFICIT + 1
    return align.score_at(alignment.row, alignment.cursor - alignment.anchor) - align.score_at(
        alignment.row, j
    )


@njit
def classes(found: CandidateArrays, alignment: Alignment, num_output: int) -> None:
    """Write the class of every candidate. num_output: with the adherence prior."""
    adherence = choose.adherence_of(alignment.num_in_sync, num_output)
    margins(found, adherence)
    for lane in range(match.NUM_CANDIDATES):
        found.class_id[lane] = -1
        if found.remaining[lane] > 0:
            bucket, position = choose.ALIGNMENT_CONTEXT, found.position[lane]
            if found.source[lane] != layout.TEXT_CONTEXT:
                deficit = score_deficit(position, alignment)
                bucket = choose.alignment_bucket(position - alignment.cursor, deficit)
            length, margin = LENGTH_BUCKET[found.strength[lane]], MARGIN_BUCKET[found.margin[lane] + _MOST]
            found.class_id[lane] = choose.pack_class(length, margin, bucket, adherence)


@njit
def worth(matched: int, row: int, tables: SurvivalTables, length_quarters: int) -> tuple[int, int]:
    """``(num, expected)``: drafts of a candidate and how many of them are expected to be accepted.

    How many tokens of its text remain limits neither. row: of the tables, its class among the limits of its text.
    """
    K = tables.expected_accepted.shape[1] - 1
    num = K if matched >= match.MAX_MATCH else min(length_quarters * (matched + 1) // 4, K)
    num = min(num, int(tables.max_draft_len[row]))
    return num, int(tables.expected_accepted[row, num])


@njit
def choose_candidate(
    request: Request,
    found: CandidateArrays,
    alignment: Alignment,
    tables: SurvivalTables,
    settings: StepSettings,
) -> Choice:
    """The candidate with the most expected accepted drafts, the lower lane of two; num is 0 where none has any.

    An exact prefix goes before all. Writes the margins and classes of the candidates.
    """
    rules = layout.unpack_rules(request.prediction.rules)
    num_output = max(request.total - request.output_start, 0) + rules.prior
    classes(found, alignment, num_output)
    best, best_num, best_expected = 0, 0, 0
    if choose.is_exact_prefix(alignment, num_output) and found.remaining[match.AT_CURSOR] > 0:
        best, best_num, best_expected = (
            match.AT_CURSOR,
            tables.expected_accepted.shape[1] - 1,
            choose.EXACT_PREFIX,
        )
    for lane in range(match.NUM_CANDIDATES):
        if found.remaining[lane] > 0 and best_expected < choose.EXACT_PREFIX:
            row = found.class_id[lane] + rules.limits * choose.NUM_CLASSES
            num, expected = worth(found.matched[lane], row, tables, settings.length_quarters)
            if expected > best_expected:
                best, best_num, best_expected = lane, num, expected
    return Choice(
        best, to_int(found.source[best]), to_int(found.position[best]), to_int(found.matched[best]),
        to_int(found.class_id[best] + request.meta[layout.IS_HOT] * choose.NUM_CLASSES), best_num, best_expected,
    )  # fmt: skip

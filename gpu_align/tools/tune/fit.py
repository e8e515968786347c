"""From counts to curves: survival of every class, smoothed from the classes that say the same with less detail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...drafter.config import DrafterConfig
from ...drafter.explain import StepView, View
from ...drafter.survival import KNOTS, make_tables
from ...ops import choose
from ...ops.choose import ALIGNMENT_CONTEXT, NUM_CLASSES, SurvivalTables, survival_units
from ...ops.files import NUM_BINS
from ...ops.host import Entry
from ...ops.layout import PREDICTION_BASE, TEXT_CONTEXT, StepState
from ...ops.match import Candidates
from ...ops.recipes.table import Recipes
from ..simulate.records import Record

Array = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

#: K of the replays: a table holds survival up to here.
NUM_DRAFT_TOKENS = 64


class CandidateReplay(StepView):
    """One slot a record, with all of its output already in the context: only the totals say what is known.

    config: which matches are candidates. There are no recipes.
    """

    def __init__(
        self,
        records: Sequence[Record],
        num_draft_tokens: int,
        config: DrafterConfig,
        max_context_len: int,
        tables: SurvivalTables | None = None,
    ) -> None:
        self.num_prompt = np.array([len(r.prompt) for r in records])
        self.num_output = np.array([len(r.output) for r in records])
        super().__init__(
            [r.prediction for r in records], self.num_prompt.tolist(), max_context_len, num_draft_tokens,
            config, Recipes.from_lists([]), tables,
        )  # fmt: skip
        self._num_draft_tokens = num_draft_tokens
        for row, record in zip(self.token_ids, records, strict=True):
            num_prompt = len(record.prompt)
            row[:num_prompt] = record.prompt
            row[num_prompt : num_prompt + len(record.output)] = record.output

    def right(self, view: View, slots: Int64, done: Int64) -> Int64:
        """[R, C]: how many tokens of each candidate, copied as they are, come next in the output; at most K."""
        most = np.minimum(self.num_output[slots] - done, self._num_draft_tokens)
        runs, totals = np.zeros(view.remaining.shape, dtype=np.int64), self.num_prompt[slots] + done
        most = np.minimum(view.remaining, most[:, None])
        _count_right(self.state, view.candidates, self.token_ids, slots, totals, most, runs)
        return runs


@Entry
def _count_right(
    state: StepState,
    found: Candidates,
    token_ids: npt.NDArray[np.int32],
    slots: Int64,
    totals: Int64,
    most: Int64,
    runs: Int64,
) -> None:
    for r in range(len(slots)):
        tokens, base = token_ids[slots[r]], state.slot_meta[slots[r], PREDICTION_BASE]
        for c in range(runs.shape[1]):
            position, length = found.position[r, c], 0
            while length < most[r, c]:
                at = position + length
                is_context = found.source[r, c] == TEXT_CONTEXT
                token = tokens[at] if is_context else state.prediction_tokens[base + at]
                if token != tokens[totals[r] + length]:
                    break
                length += 1
            runs[r, c] = length


class ReplayCounts(NamedTuple):
    """Counts of one replay of all records."""

    runs: Array  #: [C, K + 1]: candidates of class c of which just r tokens were right (K: K or more)
    #: [2, NUM_BINS]: drafts that were reached, by what the table promised of them, and how many more of them were
    #: accepted
    drafts: Array
    total: Int64  #: output tokens, steps, accepted drafts, rejected drafts


def observe(
    records: Sequence[Record],
    survival: npt.NDArray[np.int32],
    max_context_len: int,
    config: DrafterConfig,
    calibration: Sequence[float] = (0.0,) * NUM_BINS,
    progress: Callable[[int], object] | None = None,
) -> ReplayCounts:
    """Replay all records, each with at least one output token, with the drafter's own choices.

    survival: [C, K] int32 in units of 1/`SURVIVAL_ONE`: what is chosen by; not the table of `config`.
    max_context_len: T; which positions of a context are remembered depends on it. calibration: [NUM_BINS], of the
    confidences. progress: told of output tokens as they are replayed.
    """
    thresholds = config.min_survival, config.min_survival_lost
    tables = make_tables(survival, "cpu", *thresholds, calibration)
    confidence = tables.confidence.numpy()
    runs = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1))
    drafts = np.zeros((2, NUM_BINS))
    replay = CandidateReplay(records, NUM_DRAFT_TOKENS, config, max_context_len, tables)
    done = np.minimum(1, replay.num_output)
    total = np.array([replay.num_output.sum(), len(records), 0, 0])
    while (slots := np.flatnonzero(done < replay.num_output)).size:
        view = replay.look(slots, replay.num_prompt[slots] + done[slots])
        right = replay.right(view, slots, done[slots])
        seen = _distinct(view.candidates)
        np.add.at(runs, (view.class_id[seen], right[seen]), 1)
        left = replay.num_output[slots] - done[slots]
        drafted = np.minimum(view.length, left)
        ahead = np.arange(NUM_DRAFT_TOKENS)
        following = (replay.num_prompt + done)[slots, None] + ahead
        truth = np.minimum(following, replay.token_ids.shape[1] - 1)
        wrong = (view.draft != replay.token_ids[slots[:, None], truth]) | (ahead >= drafted[:, None])
        taken = np.where(wrong.any(axis=1), wrong.argmax(axis=1), NUM_DRAFT_TOKENS)
        reached = ahead < np.minimum(taken + 1, drafted)[:, None]
        right_drafts = ahead < taken[:, None]
        said = confidence[view.class_id[np.arange(len(slots)), view.lane]][reached]
        bins = np.minimum(said * NUM_BINS, NUM_BINS - 1).astype(int)
        excess = right_drafts[reached] - said.astype(float)
        drafts += [np.bincount(bins, minlength=NUM_BINS), np.bincount(bins, excess, NUM_BINS)]
        total += [0, len(slots), taken.sum(), (drafted - taken).sum()]
        after = np.minimum(done[slots] + taken + 1, replay.num_output[slots])
        if progress is not None:
            progress(int((after - done[slots]).sum()))
        done[slots] = after
    return ReplayCounts(runs, drafts, total)


def _distinct(found: Candidates) -> npt.NDArray[np.bool_]:
    """[R, C]: live candidates, each place once: one both matched and near the cursor counts as the match."""
    places = np.where(found.source == TEXT_CONTEXT, -2 - found.position, found.position)
    same = places[:, :, None] == places[:, None, :]
    earlier = np.tril(np.ones(same.shape[1:], dtype=bool), -1) & (found.position >= 0)[:, None, :]
    distinct: npt.NDArray[np.bool_] = (found.position >= 0) & ~(same & earlier).any(axis=2)
    return distinct


#: A class starts from the curve of the classes that say the same with less detail, worth this many observations.
PRIOR = 15
#: A class of a table that is known is worth as many.
KNOWN_PRIOR = 100
SHAPE = choose.NUM_LENGTHS, choose.NUM_MARGINS, choose.NUM_ALIGNMENTS, choose.NUM_ADHERENCES
#: A match in the prediction and one in the context have nothing in common but their length, and share nothing.
TEXTS = slice(0, ALIGNMENT_CONTEXT), slice(ALIGNMENT_CONTEXT, choose.NUM_ALIGNMENTS)


def relearn(runs: Array, known: Array) -> Array:
    """Survival at every k, [NUM_CLASSES, K], from a table that is known and counts of other texts.

    ::

        for each group of classes, from all down to one class:
            curve *= (right + prior * mean curve) / (sum of what the curve promises + prior * mean curve)

    prior: `KNOWN_PRIOR`. The groups: one text, with the same matched length, with the same alignment, with the
    same margin, one class. A class that is not seen keeps its own form. known: [NUM_CLASSES, K], each 0 to 1.
    """
    seen, right = seen_and_right(runs)
    curves = known.reshape(*SHAPE, -1).copy()
    for places in TEXTS:
        n, r, curve = seen[:, :, places], right[:, :, places], curves[:, :, places]
        for axes in ((0, 1, 2, 3), (1, 2, 3), (1, 3), (3,), ()):
            promised = (n * curve).sum(axes, keepdims=True)
            count = np.maximum(n.sum(axes, keepdims=True), 1)
            # Where nothing is seen both are the prior's, and nothing changes.
            prior = KNOWN_PRIOR * np.maximum(np.where(promised > 0, promised / count, 1), 1e-3)
            curve = np.clip(curve * (r.sum(axes, keepdims=True) + prior) / (promised + prior), 1e-6, 1)
        curves[:, :, places] = curve
    return falling(curves)


def seen_and_right(runs: Array) -> tuple[Array, Array]:
    """By the parts of a class: candidates, [..., 1], and how many of them were right for k tokens, [..., K]."""
    survived = np.flip(np.flip(runs, 1).cumsum(1), 1)
    return survived[:, 0].reshape(*SHAPE, 1), survived[:, 1:].reshape(*SHAPE, -1)


def falling(curves: Array) -> Array:
    """[NUM_CLASSES, K] of curves by the parts of a class: none rises along its drafts."""
    # A sure match at the cursor is never weighed below one elsewhere: what the step count of a perfect prediction
    # rests on.
    curves[-1, :, 0] = np.maximum(curves[-1, :, 0], curves[-1].max((0, 1, 2)))
    return np.minimum.accumulate(np.clip(curves, 0, 1).reshape(NUM_CLASSES, -1), axis=1)


def calibrate(drafts: Array, known: Sequence[float] = ()) -> list[float]:
    """[NUM_BINS]: what to add to a confidence, by the bin that it falls in.

    Of the drafts that are chosen fewer are accepted than of all the places that look alike. drafts: of
    `ReplayCounts`. known: another calibration, which counts as `PRIOR` drafts of each bin.
    """
    start = np.asarray(known if len(known) else np.zeros(drafts.shape[1]))
    return [round(float(p), 4) for p in (drafts[1] + PRIOR * start) / (drafts[0] + PRIOR)]


def at_knots(curves: Array) -> npt.NDArray[np.int64]:
    """[NUM_CLASSES, len(KNOTS)] in units of 1/`SURVIVAL_ONE`."""
    units = np.array([[survival_units(p) for p in row] for row in curves[:, np.array(KNOTS) - 1]])
    return np.minimum.accumulate(units, axis=1)

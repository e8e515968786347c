"""What candidates of each class come to, counted in replays of known outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_align.config import DrafterConfig
from gpu_align.ops.constants import NUM_CLASSES
from gpu_align.ops.draft.reference import IS_CONTEXT, Candidates
from gpu_align.ops.draft.tables import NUM_BINS, SurvivalTables
from gpu_align.ops.recipe_lookup import RecipeTable
from gpu_align.simulate.records import Record
from gpu_align.simulate.step_candidates import CandidateReplay

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: K of the replays: a table holds survival up to here.
NUM_DRAFT_TOKENS = 64


class Observed(NamedTuple):
    """What one replay of all records has shown.

    Attributes:
        runs: [C, K + 1]: candidates of class c of which just r tokens were right (K: K or more).
        drafts: [2, NUM_BINS]: drafts from the prediction and the context that were reached, by what the table
            promised, and how many more of them were accepted than promised.
        recipe_drafts: the same for drafts from recipes, by what the recipes promised.
        counted: [2, NUM_BINS]: drafts from recipes by what `counts` promised, and how many more were accepted.
        total: output tokens, steps, accepted drafts, rejected drafts.
    """

    runs: Array
    drafts: Array
    recipe_drafts: Array
    counted: Array
    total: npt.NDArray[np.int64]


def observe(
    records: Sequence[Record],
    survival: npt.NDArray[np.int32],
    max_context_len: int,
    config: DrafterConfig,
    calibration: Sequence[float] = (0.0,) * NUM_BINS,
    progress: Callable[[int], object] | None = None,
    recipes: RecipeTable | None = None,
    counts: RecipeTable | None = None,
) -> Observed:
    """Replay all records with the drafter's own choices.

    Args:
        records: each with at least one output token.
        survival: [C, K] int32 in units of 1/`SURVIVAL_ONE`: what the drafter chooses by.
        max_context_len: T; which positions of a context are remembered depends on it.
        config: settings; the table that it names is not read.
        calibration: [NUM_BINS], of the confidences.
        progress: told of output tokens as they are replayed.
        recipes: drafted where no candidate is likelier, for K; none if None.
        counts: its first recipes with other probabilities, for `Observed.counted`.
    """
    thresholds = config.min_survival, config.min_survival_lost
    tables = SurvivalTables.from_survival(survival, "cpu", *thresholds, calibration)
    confidence = tables.confidence.numpy()
    runs, drafts = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1)), np.zeros((2, NUM_BINS))
    recipe_drafts, counted = np.zeros((2, NUM_BINS)), np.zeros((2, NUM_BINS))
    replay = CandidateReplay(records, NUM_DRAFT_TOKENS, config, max_context_len, tables, recipes)
    done = np.minimum(1, replay.num_output)
    total = np.array([replay.num_output.sum(), len(records), 0, 0])
    while (slots := np.flatnonzero(done < replay.num_output)).size:
        view = replay.look(slots, done[slots])
        found = view.candidates
        right = replay.right(found, slots, done[slots])
        seen = _distinct(found)
        np.add.at(runs, (found.class_id[seen], right[seen]), 1)
        left = replay.num_output[slots] - done[slots]
        drafted = np.minimum(view.length, left)
        ahead = np.arange(NUM_DRAFT_TOKENS)
        truth = np.minimum(done[slots, None] + ahead, replay.token_ids.shape[1] - 1)
        wrong = (view.draft != replay.token_ids[slots[:, None], truth]) | (ahead >= drafted[:, None])
        taken = np.where(wrong.any(axis=1), wrong.argmax(axis=1), NUM_DRAFT_TOKENS)
        reached = ahead < np.minimum(taken + 1, drafted)[:, None]
        right_drafts = ahead < taken[:, None]
        chosen = view.recipe < 0
        promised = confidence[found.class_id[np.arange(len(slots)), view.lane]]
        _add_promises(drafts, promised, right_drafts, reached & chosen[:, None])
        for table, into in ((recipes, recipe_drafts), (counts, counted)):
            if table is None:
                continue
            by_recipe = table.confidence.numpy()
            those = (view.recipe >= 0) & (view.recipe < len(by_recipe))
            at = view.recipe[those]
            width = by_recipe.shape[1]
            _add_promises(into, by_recipe[at], right_drafts[those, :width], reached[those, :width])
        total += [0, len(slots), taken.sum(), (drafted - taken).sum()]
        after = np.minimum(done[slots] + taken + 1, replay.num_output[slots])
        if progress is not None:
            progress(int((after - done[slots]).sum()))
        done[slots] = after
    return Observed(runs, drafts, recipe_drafts, counted, total)


def _add_promises(
    drafts: Array, promised: npt.NDArray[Any], right: npt.NDArray[np.bool_], reached: npt.NDArray[np.bool_]
) -> None:
    """Count drafts in `drafts`, [2, NUM_BINS], by what was promised of them; all [R, K]."""
    said = promised[reached]
    bins = np.minimum(said * NUM_BINS, NUM_BINS - 1).astype(int)
    drafts += [
        np.bincount(bins, minlength=NUM_BINS),
        np.bincount(bins, right[reached] - said.astype(float), NUM_BINS),
    ]


def _distinct(found: Candidates) -> npt.NDArray[np.bool_]:
    """[R, C]: live candidates, each place once: one both matched and near the cursor counts as the match."""
    places = np.where(IS_CONTEXT, -2 - found.position, found.position)
    same = places[:, :, None] == places[:, None, :]
    earlier = np.tril(np.ones(same.shape[1:], dtype=bool), -1) & (found.remaining > 0)[:, None, :]
    distinct: npt.NDArray[np.bool_] = (found.remaining > 0) & ~(same & earlier).any(axis=2)
    return distinct

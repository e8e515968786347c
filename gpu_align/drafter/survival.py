"""The survival tables of a drafter: their files, and how they are fitted to K and cut by its thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from ..ops.choose import (
    ADHERENCE_LOST,
    ALIGNMENT_CONTEXT,
    LENGTH_EDGES,
    MARGIN_EDGES,
    NUM_CLASSES,
    SURVIVAL_ONE,
    SurvivalTables,
    survival_units,
    unpack_class,
)
from ..ops.files import NUM_BINS, Calibration, Domain, checked, content_hash, expect, read_json

#: Numbers of drafts that the file holds survival for; in between it is interpolated.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: `min_survival_lost` of earlier answers to requests like this one, where it is not smaller.
MIN_SURVIVAL_RELATED = 0.1
#: `min_survival` of the context beside a skeleton that the output follows, where it is not larger, and the least
#: that a recipe promises there: the skeleton has most of the answer.
MIN_SURVIVAL_BESIDE_SKELETON = 0.5
#: From this temperature on a draft is less likely to be accepted, a sure one above all: the logit of its
#: confidence is this much of what it is below, plus this, where that is less.
HIGH_TEMPERATURE, HIGH_SLOPE, HIGH_SHIFT = 0.85, 0.6, -0.5
SHIPPED = Path(__file__).with_name("survival.json")
#: The temperatures from which on there are tables of several samples of one prompt, and the file of their odds.
SAMPLED_FROM = (0.3, 0.6, HIGH_TEMPERATURE)
SAMPLED = Path(__file__).with_name("samples.json")
#: The number changes where a reader of the old one could not read the new one.
FORMAT = "gpu-align-survival/2"

IntArray = npt.NDArray[np.int32]


def make_tables(
    survival: IntArray,
    device: torch.device | str,
    min_survival: float,
    min_survival_lost: float,
    calibration: Sequence[float] = (0.0,) * NUM_BINS,
) -> SurvivalTables:
    """Tables of curves [NUM_CLASSES, K] int32 in units of 1/`SURVIVAL_ONE`, from 1 up and never rising.

    calibration: [NUM_BINS], added to a confidence by where from 0 to 1 it is; in between interpolated.
    """
    _, _, alignment, adherence = unpack_class(np.arange(NUM_CLASSES))
    is_context, is_followed = alignment == ALIGNMENT_CONTEXT, adherence != ADHERENCE_LOST
    plain = np.full(NUM_CLASSES, survival_units(min_survival))
    threshold = plain.copy()
    threshold[~is_context & ~is_followed] = survival_units(max(min_survival, min_survival_lost))
    related = np.minimum(threshold, survival_units(max(min_survival, MIN_SURVIVAL_RELATED)))
    # A skeleton that is followed goes before the context and recipes: its drafts count as accepted, and no draft
    # as the limit, which a recipe has to reach. Otherwise the answer is prose, or a long value.
    least = survival_units(MIN_SURVIVAL_BESIDE_SKELETON)
    beside, none = np.maximum(related, least * (is_context & is_followed)), np.zeros(NUM_CLASSES, dtype=int)
    sampled_survival, sampled = sample_curves(survival.shape[1])
    # Of each of `TextRules.limits`: survival, what it has to reach, where all drafts count as accepted, and what
    # drafting nothing is worth.
    limits = (
        (survival, threshold, none, none),
        (survival, related, none, none),
        (survival, beside, ~is_context & is_followed, (least - 1) * is_followed),
        *((curves, plain, none, none) for curves in np.split(sampled_survival, len(SAMPLED_FROM))),
    )
    every, reached, is_sure, floor = map(np.concatenate, zip(*limits, strict=True))
    confidence = survival / np.insert(survival[:, :-1], 0, SURVIVAL_ONE, axis=1)
    middle = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    confidence = np.clip(confidence + np.interp(confidence, middle, calibration), 1e-4, 1)
    below_one = np.minimum(confidence, 0.9999)
    odds = (below_one / (1 - below_one)) ** HIGH_SLOPE * np.exp(HIGH_SHIFT)
    hot = np.minimum(confidence, odds / (1 + odds))
    is_drafted = every >= reached[:, None]
    accepted = np.where(is_sure[:, None], SURVIVAL_ONE, every) * is_drafted
    expected = np.maximum(accepted.cumsum(axis=1), floor[:, None])
    arrays = (
        is_drafted.sum(axis=1).astype(np.int32),
        np.insert(expected, 0, floor, axis=1).astype(np.int32),
        np.concatenate([confidence, hot, sampled]).astype(np.float32),
    )
    return SurvivalTables(*(torch.from_numpy(array).to(device) for array in arrays))


def sample_curves(num_draft_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Survival in units of 1/`SURVIVAL_ONE` and confidence of drafts from samples, [3 * NUM_CLASSES, K] both."""
    _, model = read_json(SAMPLED)
    length, dissent, alignment, agreement = unpack_class(np.arange(NUM_CLASSES))
    odds = (
        np.array(model["length"])[1 * (alignment == ALIGNMENT_CONTEXT), length]
        + np.array(model["dissent"])[dissent]
    )
    odds += np.array(model["alignment"])[alignment] + np.array(model["agreement"])[agreement]
    depth = np.searchsorted(model["depth_edges"], np.arange(1, num_draft_tokens + 1), side="right")
    odds = (odds[:, None] + np.array(model["depth"])[:, None, depth]).reshape(-1, num_draft_tokens)
    survival = np.rint((1 / (1 + np.exp(-odds))).cumprod(axis=1) * SURVIVAL_ONE).astype(np.int64)
    slope, shift = np.array(model["confidence"]).repeat(NUM_CLASSES, axis=0).T[:, :, None]
    return np.maximum(survival, 1), np.clip(1 / (1 + np.exp(-slope * odds - shift)), 1e-4, 1)


@lru_cache(maxsize=4)
def read_survival(path: Path) -> tuple[npt.NDArray[np.float64], tuple[float, ...]]:
    """``(survival [NUM_CLASSES, len(KNOTS)] in units of 1/SURVIVAL_ONE, calibration [NUM_BINS])`` of a file."""
    table = read_table(path)
    return np.array(table["survival"], dtype=np.float64), tuple(table["calibration"])


_Curve = Annotated[
    list[float],
    Domain(
        f"{len(KNOTS)} numbers from 0 to {SURVIVAL_ONE} that never rise",
        lambda row: len(row) == len(KNOTS) and row[0] <= SURVIVAL_ONE and row[-1] >= 0
        and all(a >= b for a, b in pairwise(row)),
    ),
]  # fmt: skip
_Curves = Annotated[list[_Curve], Domain(f"{NUM_CLASSES} curves", lambda rows: len(rows) == NUM_CLASSES)]


def _exactly(values: Sequence[int]) -> Domain:
    return Domain(str(list(values)), list(values).__eq__)


@dataclass
class TableFile:
    """A table as its file has it; `gpu_align.tools.tune` writes more, which is not read."""

    format: Annotated[str, Domain(repr(FORMAT), FORMAT.__eq__)]
    knots: Annotated[list[int], _exactly(KNOTS)]
    length_edges: Annotated[list[int], _exactly(LENGTH_EDGES)]
    margin_edges: Annotated[list[int], _exactly(MARGIN_EDGES)]
    survival: _Curves
    calibration: Calibration
    sha256: str
    settings: dict[str, Any] | None = None


def read_table(path: Path) -> dict[str, Any]:
    """The whole of a table's file, checked. OSError if it cannot be read; ValueError, of one line, if it is no
    table, was changed by hand, or belongs to other classes of candidates.
    """
    try:
        _, table = read_json(path)
        told, found = checked(TableFile, table).sha256, content_hash(table, "sha256")
        expect(told == found, "sha256", found[:12], told, "; the file was changed")
    except ValueError as error:
        raise ValueError(f"{path}: expected a survival table ({error})") from None
    return table


def fit_curves(curves: npt.NDArray[np.float64], num_draft_tokens: int) -> IntArray:
    """[NUM_CLASSES, K] int32 from survival at the knots: between two knots it falls at a constant rate, behind
    the last one at the mean rate from half way there."""
    at = np.arange(1, num_draft_tokens + 1)
    logs = np.log(np.maximum(curves, 0.5))
    last, half = KNOTS[-1], KNOTS.index(KNOTS[-1] // 2)
    rate = (logs[:, -1] - logs[:, half]) / (last - KNOTS[half])
    inside = np.stack([np.interp(at, KNOTS, row) for row in logs])
    beyond = rate[:, None] * np.maximum(at - last, 0)
    fitted: IntArray = np.maximum(np.rint(np.exp(inside + beyond)), 1).astype(np.int32)
    return fitted

"""Which drafts a step verifies: those that make the most tokens a millisecond. Imports no vLLM."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .step_times import KNOTS, Floats, Ints, StepTimes

Levels = npt.NDArray[np.integer[Any]]
#: A survival of one, as levels are in units of 1/255.
ONE = 255
#: Shares of all drafts that are weighed beside the levels and the knots.
_SHARES, _KNOTS = np.linspace(0, 1, 33), KNOTS.astype(np.float64)
#: What levels say themselves.
_SAME = np.arange(ONE + 1) / ONE


class Chosen(NamedTuple):
    """slots: [B] drafts of each request. ms: of the step with them, and without: without any."""

    slots: Ints
    ms: float
    without: float


def choose(
    survival: Levels,
    requests: int,
    prefill: int,
    room: int,
    times: StepTimes,
    ratio: float,
    in_graph: bool = True,
    worth: Floats = _SAME,
) -> Chosen:
    """The `n` likeliest drafts, for the `n` that makes the most of
    ``(requests + sum of their survivals) / times.ms(requests, requests + prefill + n)``.

    survival: [B, K] levels (`wire.reports.survival_levels`) that never rise along a draft, 0: no draft.
    requests: of the step, those without drafts included. prefill: tokens of prompts in it. room: the most drafts
    of all. ratio: how much longer than without drafts the step may take. in_graph: whether steps with drafts run
    in CUDA graphs. worth: [256] the survival that each level stands for, never falling.
    """
    entries = np.bincount(survival.ravel(), minlength=ONE + 1)[::-1]  # of the levels from 255 to 0
    entries[ONE] = 0
    at_least, gained = np.zeros(ONE + 2), np.zeros(ONE + 2)
    entries.cumsum(out=at_least[1:])
    (entries * worth[::-1]).cumsum(out=gained[1:])
    most, base = min(int(at_least[-1]), room), requests + prefill
    without = times.ms_of_one(requests, base, in_graph=not prefill)
    if most <= 0 or times.waits_for(requests, base, in_graph=not prefill):
        return Chosen(np.zeros(len(survival), dtype=np.int64), without, without)
    # Between these both the gain and the time are lines, so that the best is one of them.
    count = np.concatenate([at_least, _KNOTS - base, most * _SHARES])
    count = np.minimum(np.maximum(count, 0, out=count), most, out=count)
    np.floor(count, out=count)
    ms = times.ms(requests, base + count, in_graph=in_graph and not prefill)
    ms[count == 0] = without
    rate = (requests + np.interp(count, at_least, gained)) / ms
    if ratio < math.inf:
        rate[ms > ratio * without] = 0.0
    best = int(rate.argmax())
    return Chosen(_likeliest(survival, int(count[best]), at_least[1:]), float(ms[best]), without)


def _likeliest(survival: Levels, count: int, at_least: Floats) -> Ints:
    """[B] how many of each row are among the `count` largest entries; ties go to the first rows. at_least: [256]
    how many entries are at least 255, 254, …; `count` is no more than the last of them."""
    place = int(at_least.searchsorted(count))
    level = ONE - place
    granted: Ints = np.add.reduce(survival >= level, axis=1)
    if extra := int(at_least[place]) - count:
        equal = np.add.reduce(survival == level, axis=1)
        granted -= np.minimum(np.maximum(equal.cumsum() - (int(equal.sum()) - extra), 0), equal)
    return granted

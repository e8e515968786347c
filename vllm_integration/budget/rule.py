"""Which drafts a step verifies: those that make the most tokens a millisecond. Imports no vLLM."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..wire.reports import Ints
from .step_times import KNOTS, StepTimes

Levels = npt.NDArray[np.integer[Any]]
#: A survival of one, as levels are in units of 1/255.
ONE = 255
#: Shares of all drafts that are weighed beside the levels and the knots.
_SHARES, _KNOTS = np.linspace(0, 1, 33), KNOTS.astype(np.float64)
#: Tokens a millisecond that drafts make, over those without: less is not worth an error of the curve.
WORTH = 1.02
#: Levels that stand for themselves.
_SAME = np.arange(ONE + 1, dtype=np.uint8)


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
    stands_for: Levels = _SAME,
) -> Chosen:
    """The `n` likeliest drafts, for the `n` that makes the most of
    ``(requests + sum of their survivals) / times.ms(requests, requests + prefill + n)``.

    survival: [B, K] levels (`wire.reports.survival_levels`) that never rise along a draft, 0: no draft.
    requests: of the step, those without drafts included. prefill: tokens of prompts in it. room: the most drafts
    of all. ratio: how much longer than without drafts the step may take. in_graph: whether steps with drafts run
    in CUDA graphs. stands_for: [256] what each level means, a level, never falling; 0 for 0 alone. Levels that
    mean the same are the same.
    """
    entries = np.bincount(survival.ravel(), minlength=ONE + 1)[::-1]  # of the levels from 255 to 0
    entries[ONE] = 0
    at_least, gained = np.zeros(ONE + 2), np.zeros(ONE + 2)
    entries.cumsum(out=at_least[1:])
    (entries * (stands_for[::-1] / ONE)).cumsum(out=gained[1:])
    most, base = min(int(at_least[-1]), room), requests + prefill
    without = times.ms_of_one(requests, base, in_graph=not prefill)
    if most <= 0 or times.waits_for(base, in_graph=not prefill):
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
    if rate[best] * without < WORTH * requests:
        return Chosen(np.zeros(len(survival), dtype=np.int64), without, without)
    chosen, ms_of_it = int(count[best]), float(ms[best])
    level = ONE - int(at_least[1:].searchsorted(chosen))
    least, above = stands_for.searchsorted(stands_for[level] + np.array([0, 1]))
    return Chosen(_first_of(survival, int(least), int(above), chosen), ms_of_it, without)


def _first_of(survival: Levels, least: int, above: int, count: int) -> Ints:
    """[B] how many of each row are among `count` entries: all from the level `above` on, and of those below that
    from `least` on the ones in the first rows."""
    granted: Ints = np.add.reduce(survival >= above, axis=1)
    if (left := count - int(granted.sum())) > 0:
        equal = np.add.reduce(survival >= least, axis=1) - granted
        granted += np.minimum(np.maximum(left + equal - equal.cumsum(), 0), equal)
    return granted

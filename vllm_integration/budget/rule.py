"""Which drafts a step verifies: those that make the most tokens a millisecond. Imports no vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .step_times import KNOTS, Ints, StepTimes

Levels = npt.NDArray[np.integer[Any]]
#: A survival of one, as levels are in units of 1/255.
ONE = 255
_LEVELS = np.arange(ONE, 0, -1)
#: Shares of all drafts that are weighed beside the levels and the knots.
_SHARES = np.linspace(0, 1, 33)


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
) -> Chosen:
    """The `n` likeliest drafts, for the `n` that makes the most of
    ``(requests + sum of their survivals) / times.ms(requests, requests + prefill + n)``.

    survival: [K, B] levels (`wire.reports.survival_levels`) that never rise along a draft, 0: no draft.
    requests: of the step, those without drafts included. prefill: tokens of prompts in it. room: the most drafts
    of all. ratio: how much longer than without drafts the step may take. in_graph: whether steps with drafts run
    in CUDA graphs.
    """
    entries = np.bincount(survival.ravel(order="K"), minlength=ONE + 1)[:0:-1]
    at_least, gained = np.cumsum(entries), np.cumsum(entries * _LEVELS) / ONE
    most, base = min(int(at_least[-1]), room), requests + prefill
    without = float(times.ms(requests, base, in_graph=not prefill))
    if most <= 0 or times.waits_for(requests, base, in_graph=not prefill):
        return Chosen(np.zeros(survival.shape[1], dtype=np.int64), without, without)
    # Between these both the gain and the time are lines, so that the best is one of them.
    count = np.concatenate([[0], at_least, KNOTS - base, most * _SHARES]).clip(0, most).astype(np.int64)
    gain = np.interp(count, np.concatenate([[0], at_least]), np.concatenate([[0.0], gained]))
    ms = times.ms(requests, base + count, in_graph=in_graph and not prefill)
    ms[count == 0] = without
    rate = np.where(ms <= ratio * without, (requests + gain) / ms, 0.0)
    best = int(rate.argmax())
    return Chosen(likeliest(survival.T, int(count[best])), float(ms[best]), without)


def likeliest(survival: npt.NDArray[np.integer[Any]], count: int) -> Ints:
    """[B] how many of each row are among the `count` largest entries above 0 of a [B, K] table of small numbers
    whose rows never rise; ties go to the first rows."""
    if count <= 0:
        return np.zeros(len(survival), dtype=np.int64)
    entries = np.bincount(survival.ravel(order="K"), minlength=1)
    entries[0] = 0
    at_least = np.cumsum(entries[::-1])  # entry i: how many are at least the (i + 1)th largest level
    if at_least[-1] <= count:
        return np.asarray((survival > 0).sum(axis=1))
    last = len(entries) - 1 - int(np.searchsorted(at_least, count))
    above, level = (survival > last).sum(axis=1), (survival == last).sum(axis=1)
    left = count - int(above.sum())
    granted: Ints = above + np.clip(left - (np.cumsum(level) - level), 0, level)
    return granted

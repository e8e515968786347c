"""How long a step takes on this machine, learned from the steps that it ran. Imports no vLLM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]

#: Tokens of a step at which its time is kept; between two of them it is a line.
KNOTS = np.array([1, 2, 3, *(base << i for i in range(1, 14) for base in (2, 3)), 1 << 15])
#: Steps near a knot whose median is its first value: a compile among them changes nothing.
FIRST = 3
#: Share of what a step is off (natural logarithm, at most `MOST`) that all knots follow; the least of those near.
FOLLOW, LEARN, MOST = 0.05, 0.02, 0.3
#: Beyond the last knot that is known, twice the tokens take so much longer; and steps without graphs, if none was
#: seen.
GUESS, NO_GRAPH = 0.5, 1.2
#: Tokens of a step that one of so many times as many tells about; steps without a time until none is waited for.
NEAR, PATIENCE = 1.3, 16
#: Milliseconds that no step takes.
NEVER = 600_000.0


class StepTimes:
    """``ms(requests, tokens)`` of a step, by what was observed. captured: tokens of the largest CUDA graph, or 0.

    A step in a graph and one without follow curves of their own; beyond `captured` all run without. A curve is a
    line through the knots that are known, never falling; a factor that follows each step moves both. Where nothing
    is known it is a guess on the dear side.
    """

    def __init__(self, captured: int = 0) -> None:
        self.captured = captured
        #: Natural logarithm of what a step takes longer than the knots say.
        self._drift = 0.0
        #: [2, N] natural logarithm of ms at each knot, without a graph and in one; NaN: not known.
        self._log_ms = np.full((2, len(KNOTS)), np.nan)
        self._first: dict[tuple[int, int], list[float]] = {}
        #: [2, N] steps near each.
        self._count = np.zeros((2, len(KNOTS)))
        #: Of steps without a graph and in one, tokens and ms of the knots that are known, never falling.
        self._points: list[tuple[Floats, Floats]] = [(np.zeros(0), np.zeros(0))] * 2
        #: Steps of which no time could be used since the last one of which it could.
        self.unusable = 0

    def observe(self, requests: int, tokens: int, ms: float, in_graph: bool) -> None:
        """A step took `ms` for `tokens` in all (prefill included) of `requests`; NaN: it is not known."""
        if not (requests > 0 and tokens > 0 and 0 < ms < NEVER):  # NaN is neither
            self.unusable += 1
            return
        self.unusable = 0
        kind = int(in_graph)
        log_ms, place = self._log_ms[kind], float(np.interp(tokens, KNOTS, np.arange(len(KNOTS))))
        nearest, left = round(place), int(place)
        self._count[kind, nearest] += 1
        off = math.log(ms) - self._drift
        if np.isnan(log_ms[nearest]):
            first = self._first.setdefault((kind, nearest), [])
            first.append(off)
            if len(first) == FIRST:
                log_ms[nearest] = sorted(first)[FIRST // 2]
        else:
            off = min(max(off - math.log(np.interp(tokens, *self._points[kind])), -MOST), MOST)
            self._drift += FOLLOW * off
            for knot, weight in ((left, left + 1 - place), (min(left + 1, len(KNOTS) - 1), place - left)):
                log_ms[knot] += off * weight * max(1 / max(self._count[kind, knot], 1), LEARN)
        known = np.flatnonzero(~np.isnan(log_ms))
        points = np.exp(log_ms[known])
        rising, falling = np.maximum.accumulate(points), np.minimum.accumulate(points[::-1])[::-1]
        self._points[kind] = KNOTS[known].astype(np.float64), (rising + falling) / 2

    @property
    def is_usable(self) -> bool:
        """Whether times come in; or none does."""
        return self.unusable <= PATIENCE

    def waits_for(self, requests: int, tokens: int, in_graph: bool = True) -> bool:
        """Whether steps of about so many tokens were not seen yet, though times come in."""
        if not (self._count.any() and self.is_usable):
            return False
        known, _ = self._known(in_graph and tokens <= self.captured)
        return not (len(known) and known[0] <= NEAR * tokens and tokens <= NEAR * known[-1])

    def ms(self, requests: int, tokens: npt.ArrayLike, in_graph: bool = True) -> Floats:
        """[N] milliseconds of steps of `requests` that have [N] `tokens` in all. in_graph: whether steps up to
        `captured` run in one."""
        wanted = np.asarray(tokens, dtype=np.float64)
        within = self._line(True, requests, wanted)
        if in_graph and (wanted <= self.captured).all():
            return within
        without = self._line(False, requests, wanted)
        return np.where((wanted <= self.captured) & in_graph, within, without)

    def _known(self, in_graph: bool) -> tuple[Floats, Floats]:
        """Tokens and ms of the knots of one curve; of the other where this one has none."""
        known, ms = self._points[in_graph]
        if len(known):
            return known, ms
        known, ms = self._points[not in_graph]
        return known, ms if in_graph else ms * NO_GRAPH

    def _line(self, in_graph: bool, requests: int, tokens: Floats) -> Floats:
        known, ms = self._known(in_graph)
        if not len(known):
            known, ms = np.array([float(max(requests, 1))]), np.ones(1)
        beyond, below = np.maximum(tokens / known[-1] - 1, 0), np.maximum(1 - tokens / known[0], 0)
        line = np.interp(tokens, known, ms) + GUESS * (ms[-1] * beyond - ms[0] * below)
        return np.asarray(line * math.exp(self._drift))

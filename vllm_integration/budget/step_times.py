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
#: Share by which a knot follows each later step, and the most that one may be off (natural logarithm).
FOLLOW, MOST = 0.2, 0.3
#: A knot that was near no step for so many follows the others; after more it is forgotten.
STALE, FORGOTTEN = 50, 4_000
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
    line through the knots that are known, never falling. Where nothing is known it is a guess on the dear side.
    """

    def __init__(self, captured: int = 0) -> None:
        self.captured = captured
        #: [2, N] natural logarithm of ms at each knot, without a graph and in one; NaN: not known.
        self._log_ms = np.full((2, len(KNOTS)), np.nan)
        self._first: dict[tuple[int, int], list[float]] = {}
        self._seen = np.zeros((2, len(KNOTS)))
        self._steps = 0
        #: Steps of which no time could be used since the last one of which it could.
        self.unusable = 0

    def observe(self, requests: int, tokens: int, ms: float, in_graph: bool) -> None:
        """A step took `ms` for `tokens` in all (prefill included) of `requests`; NaN: it is not known."""
        if not (requests > 0 and tokens > 0 and 0 < ms < NEVER):  # NaN is neither
            self.unusable += 1
            return
        self.unusable = 0
        self._steps += 1
        log_ms, seen, y = self._log_ms[int(in_graph)], self._seen[int(in_graph)], math.log(ms)
        place = float(np.interp(tokens, KNOTS, np.arange(len(KNOTS))))
        nearest, left = round(place), int(place)
        if self._steps - seen[nearest] > FORGOTTEN:
            log_ms[nearest] = np.nan
        seen[nearest] = self._steps
        if np.isnan(log_ms[nearest]):
            first = self._first.setdefault((int(in_graph), nearest), [])
            first.append(y)
            if len(first) == FIRST:
                log_ms[nearest] = sorted(first)[FIRST // 2]
                first.clear()
            return
        right = min(left + 1, len(KNOTS) - 1)
        share = place - left
        found = y - self._at(log_ms, left, right, share)
        change = FOLLOW * min(max(found, -MOST), MOST)
        # What no step was near to for long moves along, by the mean of those that some were: the machine changes.
        age = np.minimum((self._steps - self._seen) / STALE, 1)
        self._log_ms += change * age / max(float((1 - age).sum()), 1)
        for knot, weight in ((left, 1 - share), (right, share)):
            log_ms[knot] += change * weight * (1 - age[int(in_graph), knot])

    @staticmethod
    def _at(log_ms: Floats, left: int, right: int, share: float) -> float:
        a, b = float(log_ms[left]), float(log_ms[right])
        if math.isnan(a) or math.isnan(b):
            return b if math.isnan(a) else a
        return math.log((1 - share) * math.exp(a) + share * math.exp(b))

    @property
    def is_usable(self) -> bool:
        """Whether times come in; or none does."""
        return self.unusable <= PATIENCE

    def waits_for(self, requests: int, tokens: int, in_graph: bool = True) -> bool:
        """Whether steps of about so many tokens were not seen yet, though times come in."""
        if not (self._steps and self.is_usable):
            return False
        known = self._points(in_graph and tokens <= self.captured)[0]
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

    def _line(self, in_graph: bool, requests: int, tokens: Floats) -> Floats:
        known, ms = self._points(in_graph)
        if not len(known):
            known, ms = self._points(not in_graph)
            ms = ms if in_graph else ms * NO_GRAPH
        if not len(known):
            known, ms = np.array([float(max(requests, 1))]), np.ones(1)
        beyond, below = np.maximum(tokens / known[-1] - 1, 0), np.maximum(1 - tokens / known[0], 0)
        return np.asarray(np.interp(tokens, known, ms) + GUESS * (ms[-1] * beyond - ms[0] * below))

    def _points(self, in_graph: bool) -> tuple[Floats, Floats]:
        """Tokens and ms of the knots that are known, never falling."""
        log_ms = self._log_ms[int(in_graph)]
        known = np.flatnonzero(~np.isnan(log_ms) & (self._steps - self._seen[int(in_graph)] <= FORGOTTEN))
        tokens, ms = KNOTS[known].astype(np.float64), np.exp(log_ms[known])
        rising, falling = np.maximum.accumulate(ms), np.minimum.accumulate(ms[::-1])[::-1]
        return tokens, (rising + falling) / 2

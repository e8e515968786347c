"""How long a step takes on this machine, learned from the steps that it ran. Imports no vLLM."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import numpy.typing as npt

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
#: A step tells about those of so many times its tokens; steps without a time until none is waited for.
NEAR, PATIENCE = 1.3, 16
#: Milliseconds that no step takes, and tokens that none has.
NEVER, FAR = 600_000.0, float(1 << 30)
_KNOTS: list[float] = KNOTS.astype(np.float64).tolist()


class StepTimes:
    """Milliseconds of a step by its tokens, as observed. captured: tokens of the largest CUDA graph, or 0.

    A step in a graph and one without follow curves of their own; beyond `captured` all run without. A curve is a
    line through the knots that are known, never falling; a factor that follows each step moves both. Where nothing
    is known it is a guess on the dear side.
    """

    def __init__(self, captured: int = 0) -> None:
        self.captured = captured
        #: Natural logarithm of what a step takes longer than the knots say.
        self._drift = 0.0
        #: Of steps without a graph and in one: logarithm of ms at each knot that is known; steps near each.
        self._log_ms: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._count = [0] * len(KNOTS), [0] * len(KNOTS)
        self._first: dict[tuple[int, int], list[float]] = {}
        #: Of the same, tokens and ms of the knots that are known, and of `FAR` and no tokens; empty: of none.
        self._lines: list[tuple[Floats, Floats]] = [(np.zeros(0), np.zeros(0))] * 2
        #: Steps of which no time could be used since the last one of which it could.
        self.unusable, self._seen = 0, False

    def observe(self, tokens: int, ms: float, in_graph: bool) -> None:
        """A step took `ms` for `tokens` in all (prefill included); NaN: it is not known."""
        if not (tokens > 0 and 0 < ms < NEVER):  # NaN is neither
            self.unusable += 1
            return
        self.unusable, self._seen = 0, True
        kind = int(in_graph)
        log_ms, count = self._log_ms[kind], self._count[kind]
        left = min(bisect_right(_KNOTS, tokens), len(_KNOTS) - 1) - 1
        share = min((tokens - _KNOTS[left]) / (_KNOTS[left + 1] - _KNOTS[left]), 1.0)
        nearest = left + round(share)
        count[nearest] += 1
        off = math.log(ms) - self._drift
        if nearest in log_ms:
            off = min(max(off - math.log(np.interp(tokens, *self._lines[kind])), -MOST), MOST)
            self._drift += FOLLOW * off
            for knot, weight in ((left, 1 - share), (left + 1, share)):
                if knot in log_ms:
                    log_ms[knot] += off * weight * max(1 / max(count[knot], 1), LEARN)
        else:
            first = self._first.setdefault((kind, nearest), [])
            first.append(off)
            if len(first) == FIRST:
                log_ms[nearest] = sorted(first)[FIRST // 2]
        if log_ms:
            known = sorted(log_ms)
            points = [math.exp(log_ms[knot]) for knot in known]
            falling = [*accumulate(reversed(points), min)][::-1]
            never_falling = [(a + b) / 2 for a, b in zip(accumulate(points, max), falling, strict=True)]
            self._lines[kind] = _line([_KNOTS[knot] for knot in known], never_falling)

    @property
    def is_usable(self) -> bool:
        """Whether times come in; or none does."""
        return self.unusable <= PATIENCE

    def waits_for(self, tokens: int, in_graph: bool = True) -> bool:
        """Whether steps of about so many tokens were not seen yet, though times come in."""
        if not (self.is_usable and self._seen):
            return False
        known, _ = self._known(in_graph and tokens <= self.captured)
        return not (len(known) and known[1] <= NEAR * tokens and tokens <= NEAR * known[-2])

    def ms(self, requests: int, tokens: int, in_graph: bool = True) -> float:
        """Of a step that has so many `tokens` in all. requests: of the step, by which the guess goes where nothing
        is known. in_graph: whether steps up to `captured` run in one."""
        curve = self._curve(requests, in_graph and tokens <= self.captured)
        return float(np.interp(tokens, *curve)) * math.exp(self._drift)

    def curves(self, requests: int) -> tuple[Floats, Floats, Floats, Floats, float]:
        """Tokens and ms of a line for steps in a graph, and of one for others; by what these ms are multiplied."""
        return *self._curve(requests, True), *self._curve(requests, False), math.exp(self._drift)

    def _curve(self, requests: int, in_graph: bool) -> tuple[Floats, Floats]:
        """A line, a guess where nothing is known."""
        curve = self._known(in_graph)
        return curve if len(curve[0]) else _line([float(max(requests, 1))], [1.0])

    def _known(self, in_graph: bool) -> tuple[Floats, Floats]:
        """Tokens and ms of one curve; of the other where nothing is known of this one."""
        tokens, ms = self._lines[in_graph]
        if not len(tokens):
            tokens, ms = self._lines[not in_graph]
            ms = ms if in_graph else NO_GRAPH * ms
        return tokens, ms


def _line(tokens: list[float], ms: list[float]) -> tuple[Floats, Floats]:
    """The same, and on to no tokens and to many."""
    many = ms[-1] * (1 + GUESS * (FAR / tokens[-1] - 1))
    return np.array([0.0, *tokens, FAR]), np.array([ms[0] * (1 - GUESS), *ms, many])

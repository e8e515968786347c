"""How long a step takes on this machine, learned from the steps that it ran. Imports no vLLM."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from .compiled import Floats2, Floats3, Loop, helper

#: Tokens of a step at which its time is kept; between two of them it is a line.
KNOTS = np.array([1, 2, 3, *(base << i for i in range(1, 14) for base in (2, 3)), 1 << 15], dtype=np.float64)
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
#: Of each knot: steps near it; from `FIRST` on, natural logarithm of their ms; those of the first ones.
SEEN, LOG_MS, EARLY = range(3)
#: Of a line: its points' tokens and ms.
TOKENS, MS = range(2)


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
        #: Of steps without a graph and in one: [2, EARLY + FIRST, knots]; and [2, 2, points] a line from no tokens
        #: to `FAR`, by the other kind's where nothing is known of this one; 0 ms before that.
        self._knots = np.zeros((2, EARLY + FIRST, len(KNOTS)))
        self._lines = np.zeros((2, 2, len(KNOTS) + 2))
        #: Steps of which no time could be used since the last one of which it could.
        self.unusable, self._seen = 0, False

    def observe(self, tokens: int, ms: float, in_graph: bool) -> None:
        """A step took `ms` for `tokens` in all (prefill included); NaN: it is not known."""
        if not (tokens > 0 and 0 < ms < NEVER):  # NaN is neither
            self.unusable += 1
            return
        self.unusable, self._seen = 0, True
        self._drift = _observe(float(tokens), float(ms), int(in_graph), self._drift, self._knots, self._lines)

    @property
    def is_usable(self) -> bool:
        """Whether times come in; or none does."""
        return self.unusable <= PATIENCE

    def waits_for(self, tokens: int, in_graph: bool = True) -> bool:
        """Whether steps of about so many tokens were not seen yet, though times come in."""
        if not (self.is_usable and self._seen):
            return False
        known: list[float] = self._lines[int(in_graph and tokens <= self.captured), TOKENS].tolist()
        return not (0 < known[1] <= NEAR * tokens and tokens <= NEAR * known[bisect_left(known, FAR) - 1])

    def ms(self, requests: int, tokens: int, in_graph: bool = True) -> float:
        """Of a step that has so many `tokens` in all. requests: of the step, by which the guess goes where nothing
        is known. in_graph: whether steps up to `captured` run in one."""
        return ms_at(float(tokens), self.curves(requests)[int(in_graph and tokens <= self.captured)])

    def curves(self, requests: int) -> Floats3:
        """[2, 2, N] tokens and ms of a line for steps without a graph, and of one for those in one."""
        if self._lines[0, MS, 0]:
            return self._lines
        first = float(max(requests, 1))
        guess = [0.0, first, FAR], [1 - GUESS, 1.0, 1 + GUESS * (FAR / first - 1)]
        return np.array([guess, guess])


@helper
def ms_at(tokens: float, line: Floats2) -> float:
    """Milliseconds of a step of so many tokens, less than `FAR`, by a line of `StepTimes.curves`."""
    at = np.searchsorted(line[TOKENS], tokens, side="right") - 1
    slope = (line[MS, at + 1] - line[MS, at]) / (line[TOKENS, at + 1] - line[TOKENS, at])
    return float(slope * (tokens - line[TOKENS, at]) + line[MS, at])


@Loop
def _observe(tokens: float, ms: float, kind: int, drift: float, knots: Floats3, lines: Floats3) -> float:
    """Learn from a step, draw the `lines` anew; the drift that it leaves."""
    seen, log_ms, early = knots[kind, SEEN], knots[kind, LOG_MS], knots[kind, EARLY:]
    left = min(int(np.searchsorted(KNOTS, tokens, side="right")), len(KNOTS) - 1) - 1
    share = min((tokens - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left]), 1.0)
    nearest = left + int(share > 0.5)
    seen[nearest] += 1
    if seen[nearest] <= FIRST:
        early[int(seen[nearest]) - 1, nearest] = math.log(ms) - drift
        a, b, c = early[0, nearest], early[1, nearest], early[2, nearest]
        log_ms[nearest] = max(min(a, b), min(max(a, b), c))
    else:
        off = min(max(math.log(ms / ms_at(tokens, lines[kind])), -MOST), MOST)
        drift += FOLLOW * off
        for knot, weight in ((left, 1 - share), (left + 1, share)):
            if seen[knot] >= FIRST:
                log_ms[knot] += off * weight * max(1 / seen[knot], LEARN)
    for k in range(2):
        # Never falling: halfway between the most up to a knot and the least from it on.
        line, last, least = lines[k], 0, NEVER * NEVER
        line[MS, 0] = 0.0
        for knot in range(len(KNOTS)):
            if knots[k, SEEN, knot] >= FIRST:
                last += 1
                line[TOKENS, last] = KNOTS[knot]
                line[MS, last] = max(line[MS, last - 1], math.exp(knots[k, LOG_MS, knot] + drift))
        line[TOKENS, last + 1 :] = FAR
        at = last
        for knot in range(len(KNOTS) - 1, -1, -1):
            if knots[k, SEEN, knot] >= FIRST:
                least = min(least, math.exp(knots[k, LOG_MS, knot] + drift))
                line[MS, at] = (line[MS, at] + least) / 2
                at -= 1
        if last:
            line[MS, 0] = line[MS, 1] * (1 - GUESS)
            line[MS, last + 1 :] = line[MS, last] * (1 + GUESS * (FAR / line[TOKENS, last] - 1))
    for k in range(2):
        if lines[k, MS, 0] == 0:
            for at in range(lines.shape[2]):
                lines[k, TOKENS, at] = lines[1 - k, TOKENS, at]
                lines[k, MS, at] = lines[1 - k, MS, at] * (1.0 if k else NO_GRAPH)
    return drift

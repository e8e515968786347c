"""Which drafts a step verifies: those that make the most tokens a millisecond. Imports no vLLM."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import Bytes1, Bytes2, Floats2, Floats3, Ints1, Loop
from .step_times import KNOTS, StepTimes, ms_at

#: A survival of one, as levels are in units of 1/255.
ONE = 255
#: Shares of all drafts that are weighed beside the levels and the knots.
SHARES = 32
#: Tokens a millisecond that drafts make, over those without: less is not worth an error of the curve.
WORTH = 1.02
#: Levels that stand for themselves.
_SAME = np.arange(ONE + 1, dtype=np.uint8)


class Chosen(NamedTuple):
    """slots: [B] drafts of each request, `total` of all. ms: of the step with them, and without: without any.
    dearest: the most ms that one of n drafts costs, for any n up to all."""

    slots: Ints1
    total: int
    ms: float
    without: float
    dearest: float


def choose(
    survival: Bytes2,
    requests: int,
    prefill: int,
    room: int,
    times: StepTimes,
    ratio: float,
    in_graph: bool = True,
    stands_for: Bytes1 = _SAME,
) -> Chosen:
    """The `n` likeliest drafts, for the `n` that makes the most of
    ``(requests + sum of their survivals) / times.ms(requests, requests + prefill + n)``.

    survival: [B, K] levels (`wire.reports.survival_levels`) that never rise along a draft, 0: no draft.
    requests: of the step, those without drafts included. prefill: tokens of prompts in it. room: the most drafts
    of all. ratio: how much longer than without drafts the step may take. in_graph: whether steps with drafts run
    in CUDA graphs. stands_for: [256] what each level means, a level, never falling; 0 for 0 alone. Levels that
    mean the same are the same.
    """
    base, plain = requests + prefill, not prefill
    slots, sums = np.zeros(len(survival), dtype=np.int64), np.zeros((2, ONE + 1))
    room = 0 if times.waits_for(base, in_graph=plain) else room
    captured = times.captured if in_graph and plain else 0
    step = room, requests, base, float(ratio), plain and base <= times.captured, captured
    return Chosen(slots, *_choose(survival, stands_for, *step, times.curves(requests), sums, slots))


@Loop
def _choose(
    survival: Bytes2,
    stands_for: Bytes1,
    room: int,
    requests: int,
    base: int,
    ratio: float,
    base_in_graph: bool,
    captured: int,
    lines: Floats3,
    sums: Floats2,
    slots: Ints1,
) -> tuple[int, float, float, float]:
    """Write the `slots` that `choose` gives; the rest of `Chosen`. captured: tokens up to which a step with drafts
    runs in a graph. sums: zeros."""
    # Of the levels from 255 to 1: drafts of at least so much, and the tokens that they make.
    K, at_least, gained = survival.shape[1], sums[0], sums[1]
    for i in range(len(survival)):
        for k in range(K):
            if survival[i, k] == 0:
                break
            at_least[ONE - survival[i, k] + 1] += 1
    for j in range(1, ONE + 1):
        gained[j] = gained[j - 1] + at_least[j] * (stands_for[ONE + 1 - j] / ONE)
        at_least[j] += at_least[j - 1]
    # Between the counts that are tried both the gain and the time are lines, so that the best is one of them.
    limit, best, best_rate, best_ms, without = min(at_least[ONE], float(room)), 0.0, 0.0, 0.0, 0.0
    for j in range(ONE + 1 + len(KNOTS) + SHARES):
        if j <= ONE:
            if j > 0 and (at_least[j] == at_least[j - 1] or at_least[j - 1] >= limit):
                continue
            count = at_least[j]
        elif j <= ONE + len(KNOTS):
            count = KNOTS[j - ONE - 1] - base
        else:
            count = limit * ((j - ONE - len(KNOTS)) / SHARES)
        count = np.floor(min(max(count, 0.0), limit))
        known = j <= ONE and count == at_least[j]
        at = j if known else np.searchsorted(at_least, count, side="right") - 1
        gain = gained[at]
        if count > at_least[at]:
            slope = (gained[at + 1] - gain) / (at_least[at + 1] - at_least[at])
            gain += slope * (count - at_least[at])
        is_graph = base_in_graph if count == 0 else base + count <= captured
        ms = ms_at(base + count, lines[int(is_graph)])
        if j == 0:
            without = ms
        if (requests + gain) / ms > best_rate and ms <= ratio * without:
            best, best_rate, best_ms = count, (requests + gain) / ms, ms
    dearest, most = 0.0, float(base + survival.size)
    for j in range(len(KNOTS) + 1):
        tokens = min(KNOTS[j], most) if j < len(KNOTS) else most
        if tokens > base:
            ms = ms_at(tokens, lines[int(tokens <= captured)])
            dearest = max(dearest, (ms - without) / (tokens - base))
    if best <= 0 or best_rate * without < WORTH * requests:
        return 0, without, without, dearest
    dearest = max(dearest, (best_ms - without) / best)
    # All from the level `above` on, and of those that mean as much as the last one the ones in the first rows.
    least = ONE + 1 - np.searchsorted(at_least, best)
    above = least + 1
    while stands_for[least - 1] == stands_for[least]:
        least -= 1
    while above <= ONE and stands_for[above] == stands_for[least]:
        above += 1
    left = int(best)
    for i in range(len(survival)):
        while slots[i] < K and survival[i, slots[i]] >= above:
            slots[i] += 1
            left -= 1
    for i in range(len(survival)):
        while left > 0 and slots[i] < K and survival[i, slots[i]] >= least:
            slots[i] += 1
            left -= 1
    return int(best), best_ms, without, dearest

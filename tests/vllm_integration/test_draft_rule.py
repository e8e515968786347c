"""Which drafts a step verifies: the curve of step times, learned, and the rule that reads it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from vllm_integration.budget.rule import choose
from vllm_integration.budget.step_times import KNOTS, StepTimes


def dense(tokens: float) -> float:
    """Flat, then by arithmetic."""
    return 5.0 * math.hypot(1, tokens / 200)


def experts(tokens: float) -> float:
    """Dear from the second token on, then flat, then by arithmetic."""
    return 1.5 + 12 * (1 - (1 - 1 / 32) ** tokens) + tokens / 300


def learned(
    machine: Callable[[float], float], steps: int = 400, times: StepTimes | None = None, most: int = 2_000
) -> StepTimes:
    """After steps with 5 % of noise and, every twentieth, a pause."""
    times, rng = times or StepTimes(512), np.random.default_rng(0)
    for step in range(steps):
        tokens = int(np.exp(rng.uniform(0, math.log(most))))
        ms = machine(tokens) * rng.normal(1, 0.05) * (10 if step % 20 == 0 else 1)
        times.observe(tokens, ms, in_graph=tokens <= 512)
    return times


@pytest.mark.parametrize("machine", [dense, experts], ids=["dense", "experts"])
def test_the_curve_is_the_machine_s(machine: Callable[[float], float]) -> None:
    tokens = np.array([1, 2, 8, 20, 64, 200, 500, 1_000])
    times = learned(machine, 2_000)
    found = [times.ms(1, t) for t in tokens.tolist()]
    assert found == pytest.approx([machine(t) for t in tokens], rel=0.12)
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("machine", [dense, experts], ids=["dense", "experts"])
def test_steps_that_no_longer_come_are_as_known_as_before(machine: Callable[[float], float]) -> None:
    """Such as those without drafts, when all others are of 900 to 1,500 tokens."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for step in range(1_000):
        tokens = 256 if step < 20 else int(rng.uniform(900, 1_500))
        times.observe(tokens, machine(tokens) * rng.normal(1, 0.05), in_graph=False)
    assert times.ms(256, 256) == pytest.approx(machine(256), rel=0.08)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_another_machine_is_known_after_200_steps(factor: float) -> None:
    """Also where no step goes any more."""
    times = learned(dense, 1_000)
    learned(lambda tokens: factor * dense(tokens), 200, times, most=100)
    for tokens in (1, 8, 64, 400):
        assert times.ms(1, tokens) == pytest.approx(factor * dense(tokens), rel=0.25)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf, 1e12])
def test_what_is_no_time_is_left_out(ms: float) -> None:
    times = learned(dense)
    before = [times.ms(1, tokens) for tokens in (1, 64, 1_000)]
    for _ in range(100):
        times.observe(64, ms, in_graph=True)
    assert [times.ms(1, tokens) for tokens in (1, 64, 1_000)] == before
    assert times.unusable == 100


def best_by_trial(
    levels: np.ndarray, requests: int, prefill: int, room: int, times: StepTimes, ratio: float
) -> float:
    """The most expected tokens a millisecond of any number of the likeliest drafts."""
    flat, base = np.sort(levels.ravel())[::-1] / 255, requests + prefill
    without = times.ms(requests, base, in_graph=not prefill)
    found = [requests / without]
    for n in range(1, min(room, np.count_nonzero(flat)) + 1):
        ms = times.ms(requests, base + n, in_graph=not prefill)
        if ms <= ratio * without:
            found.append((requests + flat[:n].sum()) / ms)
    return max(found)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("seed", range(20))
def test_the_rule_chooses_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    B, K = int(rng.integers(1, 20)), int(rng.choice([1, 8, 32]))
    levels = -np.sort(-rng.integers(0, 256, (B, K)), axis=1).astype(np.uint8)
    requests, prefill = B + int(rng.integers(0, 4)), int(rng.choice([0, 100]))
    room, ratio = int(rng.choice([0, 5, 1_000])), float(rng.choice([1.0, 1.5, 100.0]))
    times = learned([dense, experts][seed % 2], 1_000)
    for prompt in (150, 400) * 3:
        times.observe(prompt, 30.0, in_graph=False)
    choice = choose(levels, requests, prefill, room, times, ratio)
    count = int(choice.slots.sum())
    assert count <= room
    assert choice.ms <= ratio * choice.without + 1e-9
    gained = sum(levels[i, :n].sum() for i, n in enumerate(choice.slots)) / 255
    best = best_by_trial(levels, requests, prefill, room, times, ratio)
    assert (requests + gained) / choice.ms >= 0.98 * best
    base, most = requests + prefill, requests + prefill + levels.size
    dear = [
        (times.ms(requests, int(tokens), in_graph=not prefill) - choice.without) / (tokens - base)
        for tokens in (*KNOTS, most, base + count)
        if base < tokens <= most
    ]
    assert choice.dearest == pytest.approx(max(0, *dear))


@pytest.mark.usefixtures("loops")
def test_the_likeliest_drafts_are_counted() -> None:
    """With drafts that cost nothing, as many as there is room for; ties go to the first."""
    rows = np.array([[200, 200, 1], [255, 200, 0], [0, 0, 0]], dtype=np.uint8)
    times = StepTimes()
    for _ in range(60):
        times.observe(3, 5.0, in_graph=False)
        times.observe(8, 5.0, in_graph=False)
    for room, expected in ((0, [0, 0, 0]), (1, [0, 1, 0]), (2, [1, 1, 0]), (4, [2, 2, 0]), (9, [3, 2, 0])):
        assert choose(rows, 3, 0, room, times, math.inf).slots.tolist() == expected
    same = np.minimum(np.arange(256), 150).astype(np.uint8)
    for room, expected in ((1, [1, 0, 0]), (2, [2, 0, 0]), (3, [2, 1, 0]), (4, [2, 2, 0]), (5, [3, 2, 0])):
        assert choose(rows, 3, 0, room, times, math.inf, stands_for=same).slots.tolist() == expected


def test_what_gains_next_to_nothing_is_left_out() -> None:
    """Drafts that are nearly free, and hardly ever right: the curve may be off by as much."""
    times = StepTimes()
    for tokens in (8, 16, 24) * 40:
        times.observe(tokens, 5.0 + 0.0001 * tokens, in_graph=False)
    for level, slots in ((1, 0), (9, 8)):
        levels = np.full((8, 1), level, dtype=np.uint8)
        assert int(choose(levels, 8, 0, 64, times, math.inf).slots.sum()) == slots


def test_knots_rise() -> None:
    assert (np.diff(KNOTS) > 0).all()

"""Batches that decode under a rule: full ones, closed ones, and requests that come and go. A rule says how many
drafts of each request a step verifies; the plugin's own is run as its schedulers run it, and learns step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.serving.machines import DENSE, SETUPS, Roofline, Times
from benchmarks.serving.traces import ONE, Ints, K, Trace, load_trace
from vllm_integration.budget.compiled import compile_loops
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, StepTime, survival_levels

BATCHES = (1, 16, 64, 256, 1024)
#: Microseconds that a step of the drafter takes.
DRAFTER_US = 15.0
#: Noise of the step times that the plugin sees; how many are something else's, and by what factors.
NOISE, OUTLIERS, FACTORS = 0.05, 0.02, (3.0, 30.0)
#: Steps in which a rule that learns gets to know the requests of a batch; steps of a simulation.
WARM_UP, MIN_STEPS, MAX_STEPS = 300, 120, 5_000

#: Before a step of B requests: [B] drafts proposed, [B, K] the drafter's estimates in units of 1/`ONE`, 0 beyond
#: them, and [B] the number of each request, below 0 for one without a prediction → [B] draft slots,
#: ``0 <= slots <= K``. Each costs a verified token, whether or not it holds a draft.
Rule = Callable[[Ints, npt.NDArray[np.uint16], Ints], Ints]


class Plugin:
    """The plugin's own policy, `DraftBudget` with its defaults, run as its schedulers run it.

    late: steps since what is known when the next step is planned. 0: synchronous scheduling. 1 or 2: asynchronous
    scheduling, where a step is planned while the one before it runs; 2 if its drafts' copies are not there by the
    time when its tokens are. What a step accepted, and its time, is known with its tokens: one step late in either
    case. It learns step times as it goes.
    """

    def __init__(self, late: int, captured: int = 0) -> None:
        compile_loops()
        self.late, self._captured = late, captured or 1 << 20
        self._requests = DraftedRequests(False, K)
        self._budget = DraftBudget(self._requests, K, captured=self._captured)
        self._told: deque[StepDrafts] = deque()
        self._ids: list[str] = []
        self._live: dict[int, Any] = {}
        self._ended: deque[tuple[Any, list[str], Ints, Ints, StepTime]] = deque()

    def __call__(self, length: Ints, survival: npt.NDArray[np.uint16], number: Ints) -> Ints:
        numbers = number.tolist()
        if numbers != [*self._live]:
            # As much of vLLM's requests as the policy looks at; they never come near their last tokens.
            params = [
                SimpleNamespace(extra_args=args, max_tokens=1 << 30) for args in ({wire.KEY: True}, None)
            ]
            self._live = {
                n: self._live.get(n)
                or SimpleNamespace(request_id=str(n), sampling_params=params[n < 0], output_token_ids=())
                for n in numbers
            }
            self._ids = [request.request_id for request in self._live.values()]
            self._requests.keep_only(dict.fromkeys(self._ids))
            for request in self._live.values():
                self._requests.add(request)
        ids = self._ids
        levels = survival_levels(survival / ONE, length)
        unknown = np.zeros_like(length)
        self._told.append(StepDrafts(ids, self.late, unknown, length, unknown, levels))
        told = [self._told.popleft()] if len(self._told) > self.late else []
        self._requests.take(DraftReport(told))
        if len(self._ended) > min(self.late, 1):
            granted, before, slots, accepted, time = self._ended.popleft()
            done = np.stack([rows := self._requests.rows_of(before), rows, slots, accepted + 1])
            self._budget.settle(done, granted)
            self._budget.observe([time])
        given = self._budget.grant([*self._live.values()], exact=not self.late, batch_size=len(ids))
        return np.array(given, dtype=np.int64)

    def settle(self, slots: Ints, accepted: Ints, ms: float) -> None:
        """[B] each: what the step of the last grant verified, and what of it is output; and how long it took."""
        tokens = len(slots) + int(slots.sum())
        time = StepTime(ms, tokens, tokens <= self._captured)
        self._ended.append((self._budget.granted, self._ids, slots, accepted, time))


#: Name → a new rule, and what it is, in the table.
RULES: dict[str, tuple[Callable[[int], Rule], str]] = {
    "lengths": (lambda _: lambda length, *_: length, "every draft"),
    "plugin": (lambda captured: Plugin(0, captured), "default, synchronous"),
    "plugin, late by 1": (lambda captured: Plugin(1, captured), "default, asynchronous"),
}
#: The rule of the table in docs/worth-it.md, as vLLM schedules by default.
SHOWN_RULE = "plugin, late by 1"
#: Tokens verified, tokens produced and milliseconds, one entry a step.
Steps = tuple[Ints, Ints, Times]
#: Predictions: the old version of the file, another file, and such that the model agrees with no draft: the worst.
MIXES = ("edit", "unrelated", "rejected")
#: Edits in every second place, and no prediction in the others.
HALF = "half"


def step_of(
    rule: Rule, trace: Trace, row: Ints, end: Ints, number: Ints, cost: Roofline, rng: np.random.Generator,
    drafter_ms: float = 0.0,
) -> tuple[Ints, Ints, float]:  # fmt: skip
    """One step of requests at these rows: what it verifies of each and what is new, [B] both, and milliseconds. A
    rule that learns (it has a `settle`) sees times with noise, and some are far off."""
    length = trace.length[row] * (number >= 0)
    granted = rule(length, trace.survival[row], number)
    if granted.min() < 0 or granted.max() > K:
        raise ValueError(f"rule: expected 0 to {K} slots, found {granted}")
    accepted = np.minimum(granted, np.minimum(length, trace.matched[row]))
    ms = float(cost.ms(len(row), len(row) + granted.sum())) + drafter_ms
    getattr(rule, "settle", lambda *_: None)(granted, accepted, ms * seen_as(rng))
    return granted, np.minimum(accepted + 1, end - row), ms


def simulate(trace: Trace, rule: Rule, batch: int, cost: Roofline, every: int = 1) -> Steps:
    """Let `batch` requests decode side by side under `rule`, from places that are spread evenly over the trace,
    until as many tokens are produced as it has rows. After a record's last row the next one begins, another
    request.

    A rule that learns first gets `WARM_UP` steps that are not counted. Then every request is back at its first
    place: the requests of a running batch are not new, and the rule knows them. Only the order of the places is
    random, and depends on `batch` alone. every: which places have a prediction.
    """
    num_rows = len(trace.length)
    end = np.repeat(trace.start[1:], np.diff(trace.start))
    rng = np.random.default_rng(batch)
    row = ((np.arange(batch) + rng.random(batch)) * num_rows / batch).astype(np.int64)[rng.permutation(batch)]
    request = np.where(np.arange(batch) % every, -1 - np.arange(batch), np.arange(batch))
    first = row
    warm_up = WARM_UP if hasattr(rule, "settle") else 0
    verified: list[int] = []
    produced: list[int] = []
    times: list[float] = []
    while warm_up or len(verified) < MIN_STEPS or (sum(produced) < num_rows and len(verified) < MAX_STEPS):
        granted, new, ms = step_of(rule, trace, row, end[row], request, cost, rng, DRAFTER_US / 1e3)
        request = request + np.where(request < 0, -batch, batch) * (row + new == end[row])
        row = (row + new) % num_rows
        if warm_up:
            warm_up -= 1
            row = row if warm_up else first
            continue
        verified.append(batch + int(granted.sum()))
        produced.append(int(new.sum()))
        times.append(ms)
    return np.array(verified), np.array(produced), np.array(times)


def seen_as(rng: np.random.Generator) -> float:
    """By what factor a step's time is off where it is measured."""
    factor = rng.normal(1, NOISE)
    return float(factor * rng.uniform(*FACTORS) if rng.random() < OUTLIERS else factor)


def speedup(steps: Steps, cost: Roofline, batch: int) -> float:
    """Throughput over that of the same batch without drafts and without a drafter."""
    _, produced, times = steps
    return float(produced.mean() / times.mean() * cost.ms(batch, batch) / batch)


def speedups(name: str, mix: str) -> dict[str, Any]:
    """One rule under one mix: ``{"worst": [batch], "shown": {setup: [batch]}}``, the least speed-up over the
    setups (of rules that are not shown: the first alone), and one by one. A batch that does not fit in memory
    counts like any other: a shorter context would make it fit. Of `HALF` the requests without a prediction are
    ``"others"``.
    """
    every = 2 if mix == HALF else 1
    trace = load_trace(MIXES[0] if mix == HALF else mix)
    rows, others = {}, {}
    for cost in SETUPS if name == SHOWN_RULE else SETUPS[:1]:
        runs = [(simulate(trace, RULES[name][0](cost.captured), b, cost, every=every), b) for b in BATCHES]
        rows[cost.name] = [round(speedup(steps, cost, batch), 3) for steps, batch in runs]
        # The others get a token in each step.
        others[cost.name] = [round(float(cost.ms(b, b) / steps[2].mean()), 3) for steps, b in runs]
    worst = np.min(list(rows.values()), axis=0).tolist()
    found = {"worst": worst, "shown": rows}
    return found | ({"others": others} if mix == HALF else {})


#: Where requests come and go: batches without drafts, tokens of an answer at most, milliseconds simulated.
OPEN_BATCHES, OPEN_TOKENS, OPEN_MS = (16, 64, 256), 512, 60_000.0


def come_and_go(rule: Any, trace: Trace, arrives: Times, number: Ints, row: Ints, end: Ints) -> Iterator[Any]:
    """Serve requests that arrive at these milliseconds, each from a row of the trace to another one, on the shown
    setup. Of each decode step: when it ends, milliseconds, requests, tokens it made; [2] those of edits and of
    others, whose number is below 0."""
    row, now, rng = row.copy(), 0.0, np.random.default_rng(len(row))
    while (row < end).any():
        on = np.flatnonzero((arrives <= now) & (row < end))
        if not len(on):
            now = float(arrives[row < end].min())
            continue
        _, new, ms = step_of(rule, trace, row[on], end[on], number[on], DENSE, rng)
        is_other = number[on] < 0
        row[on] += new
        now += ms
        yield now, ms, np.bincount(is_other, minlength=2), np.bincount(is_other, new, minlength=2)


def rules_of_two() -> dict[str, Any]:
    """None, and the plugin's default."""
    return {"none": lambda length, *_: 0 * length, "plugin": RULES[SHOWN_RULE][0](0)}


def arrivals(batch: int) -> dict[str, list[float]]:
    """Requests that arrive at random, every second one an edit, as fast as keeps `batch` of them without drafts.

    Returns, without and with the plugin, the requests at a time, and the milliseconds a token of edits and others.
    The first quarter is not counted.
    """
    trace, rng = load_trace(MIXES[0]), np.random.default_rng(batch)
    size = np.minimum(np.diff(trace.start), OPEN_TOKENS)
    every_ms = size.mean() * float(DENSE.ms(batch, batch)) / batch
    count = int(1.1 * OPEN_MS / every_ms)
    arrives, record = np.cumsum(rng.exponential(every_ms, count)), rng.integers(len(size), size=count)
    first = trace.start[record] + rng.integers(np.diff(trace.start)[record] - size[record] + 1)
    number = np.arange(count)
    number[1::2] *= -1
    found: dict[str, list[float]] = {}
    for name, rule in rules_of_two().items():
        steps = come_and_go(rule, trace, arrives, number, first, first + size[record])
        counted = [step for step in takewhile(lambda step: step[0] < OPEN_MS, steps) if step[0] > OPEN_MS / 4]
        held, ms = sum(step[1] * step[2] for step in counted), sum(step[1] for step in counted)
        tokens = sum(step[3] for step in counted)
        found[name] = [round(float(x), 2) for x in (held.sum() / ms, *(held / tokens))]
    return found


#: Batches that begin together and end with their last request, tokens of each, and what they gain at least.
CLOSED_BATCHES, CLOSED_TOKENS, CLOSED_LEAST = (16, 64, 256), 256, 1.0


def closed(batch: int) -> dict[str, float]:
    """Throughput over that without drafts of `batch` requests which begin together and write as many tokens each:
    edits, and an edit in every second place. The server has served such a batch before."""
    trace, rng = load_trace(MIXES[0]), np.random.default_rng(batch)
    fits = np.flatnonzero(np.diff(trace.start) >= CLOSED_TOKENS)
    record = rng.choice(fits, batch)
    first = trace.start[record] + rng.integers(np.diff(trace.start)[record] - CLOSED_TOKENS + 1)
    found: dict[str, float] = {}
    for mix, every in ((MIXES[0], 1), (HALF, 2)):
        until = {}
        for name, rule in rules_of_two().items():
            for place in (np.arange(batch), np.arange(batch, 2 * batch)):
                number = np.where(place % every, -1 - place, place)
                steps = come_and_go(rule, trace, np.zeros(batch), number, first, first + CLOSED_TOKENS)
                until[name] = [ended for ended, *_ in steps]
        found[mix] = round(until["none"][-1] / until["plugin"][-1], 3)
    return found

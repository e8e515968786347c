"""Which requests get draft slots, and how many: the policy, against its docstring in plain Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.vllm_integration.fakes import report_of, request_of
from vllm_integration.scheduler import draft_budget as rule
from vllm_integration.scheduler.draft_budget import FEW, DraftBudget, DraftedRequests
from vllm_integration.wire import request as wire

K = 16


class Oracle:
    """The docstring of `DraftBudget`, a request at a time. levels: request → the last report about it, in units of
    1/255; made: the number of that report."""

    def __init__(self, K: int, max_slots: int, free_tokens: int, sure: float, learns: bool) -> None:
        self.K, self.max_slots, self.free_tokens, self.learns = K, max_slots, free_tokens, learns
        self.sure = sure
        self.captured, self.plain_alone = 0, False
        self.levels: dict[str, list[int]] = {}
        self.made: dict[str, int] = {}
        self.credit: dict[str, float] = {}
        self.reports = 0

    def take(self, drafts: dict[str, list[int]], age: int) -> None:
        self.reports += 1
        self.levels |= drafts
        self.made |= dict.fromkeys(drafts, self.reports - age)

    def promised(self, levels: list[int], slots: int) -> float:
        return max(sum(levels[:slots]) / 255, rule.LEAST * slots)

    def likeliest(self, rows: dict[str, list[int]], count: int) -> dict[str, int]:
        """Ties are served in batch order."""
        places = [
            (-level, i, k) for i, row in enumerate(rows.values()) for k, level in enumerate(row) if level
        ]
        chosen = [i for _, i, _ in sorted(places)[: max(0, count)]]
        return {name: chosen.count(i) for i, name in enumerate(rows)}

    def grant(self, requests: list[Any], exact: bool, size: int) -> dict[str, int]:
        rows, sure = {}, {}
        for request in requests:
            name = request.request_id
            row = [255] * self.K
            if request.sampling_params.extra_args is None:
                row = []
            elif name in self.levels:
                fresh = exact and self.made[name] == self.reports
                row = self.levels[name] + [1] * (0 if fresh else FEW)
            row = row[
                : max(0, min(self.K, request.sampling_params.max_tokens - len(request.output_token_ids) - 1))
            ]
            sure[name] = row[: len(self.levels.get(name, ()))]
            if self.learns and request.sampling_params.extra_args:
                share = rule.REFILL_OF_FREE * max(0, self.free_tokens - size) / size
                credit = self.credit.get(name, rule.START) + min(rule.REFILL + share, 1)
                self.credit[name] = credit
                covers = range(self.K, -1, -1)
                row_of_k = row + [0] * self.K
                most = next(n for n in covers if self.promised(row_of_k, n) <= credit + 1e-6)
                if credit < self.K:
                    sure[name] = sure[name][:most]
                if credit < rule.START:
                    row = row[:most]
                if credit < 1:
                    row, sure[name] = [], []
            rows[name] = row
        slots = self.likeliest(rows, self.free_tokens - size)
        levels = [level for row in sure.values() for level in row]
        free = self.free_tokens
        for level in range(255, 0, -1):
            over = (size + sum(each >= level for each in levels) - free) / max(3 * free, 3)
            if level / 255 < self.sure * (1 + min(max(over, 0), 1)) / 2 - 1e-9:
                break
            slots = {name: max(count, sum(s >= level for s in sure[name])) for name, count in slots.items()}
        most, tokens = self.max_slots, size + sum(slots.values())
        if size <= self.captured < tokens <= 17 * self.captured / 16:
            most = min(most, self.captured - size)
        if sum(slots.values()) > most:
            slots = self.likeliest({name: rows[name][:count] for name, count in slots.items()}, most)
        rest = sum(self.promised(rows[name], count) for name, count in slots.items())
        if self.learns and self.plain_alone and rest < 0.2 * size - 1e-6:
            slots = dict.fromkeys(slots, 0)
        for name, count in slots.items():
            if self.learns and name in self.credit:
                paid = self.promised(rows[name], count) if name in self.levels else 0.0
                self.credit[name] = min(max(self.credit[name] - paid, 0), 2 * self.K)
        return slots

    def settle(self, name: str, accepted: int) -> None:
        if name in self.credit:
            self.credit[name] = min(self.credit[name] + rule.EARNED * accepted, 2 * self.K)


def drafts_of(rng: random.Random, names: list[str], K: int) -> dict[str, list[int]]:
    """Levels that never rise; many of them equal."""
    drafts = {}
    for name in rng.sample(names, rng.randrange(len(names) + 1)):
        least = rng.choice([1, 1, 200, 255])
        levels = (rng.randint(least, 255) for _ in range(rng.choice([0, 1, K // 2, K])))
        drafts[name] = sorted(levels, reverse=True)
    return drafts


@pytest.mark.parametrize("seed", range(60))
def test_slots_and_credits_are_those_of_the_docstring(seed: int) -> None:
    """Requests come and go, reports are late or missing, outputs near their ends; plain requests stay plain."""
    rng = random.Random(seed)
    K = rng.choice([1, 4, 16, 256])
    sure = rng.choice([0, 0.5, 0.92, 1])
    max_slots, free = rng.choice([7, K + 1, 1000]), rng.choice([0, 8, 3 * K, 100_000])
    oracle = Oracle(K, max_slots, free, sure, learns=rng.random() < 0.7)
    oracle.captured = rng.choice([0, 7, 32, 64, 512])
    requests = DraftedRequests(False, K)
    requests.plain_graphs_alone = oracle.plain_alone = rng.random() < 0.3
    given = {"captured": oracle.captured, "free_tokens": free, "sure": sure, "learns": oracle.learns}
    budget = DraftBudget(requests, K, max_slots, **given)
    running = [request_of(str(i), predicted=i % 5 > 0, max_tokens=10**6) for i in range(8)]
    for step in range(30):
        if rng.random() < 0.2:  # one leaves, another one comes
            gone = running.pop(rng.randrange(len(running))).request_id
            requests.keep_only({request.request_id: request for request in running})
            for known in (oracle.levels, oracle.made, oracle.credit):
                known.pop(gone, None)
            running.append(request_of(f"new{step}", max_tokens=rng.choice([1, 50, 300, 10**6])))
        names = [request.request_id for request in running]
        for request in running:
            requests.add(request)
        drafts, age = drafts_of(rng, names, K), rng.choice([0, 0, 1])
        survivals = {name: tuple((level + 0.5) / 255 for level in row) for name, row in drafts.items()}
        requests.take(report_of(survivals, K=K, age=age))
        plain = {request.request_id for request in running if not request.sampling_params.extra_args}
        oracle.take({name: row for name, row in drafts.items() if name not in plain}, age)
        batch = rng.sample(running, rng.randrange(1, len(running) + 1))
        exact, size = rng.random() < 0.7, len(batch) + rng.choice([0, 0, 3])
        slots = budget.grant(batch, exact=exact, batch_size=size)
        assert dict(zip([r.request_id for r in batch], slots, strict=True)) == oracle.grant(
            batch, exact, size
        )
        accepted = [rng.choice([0, count // 2, count]) for count in slots]
        rows = requests.rows_of([request.request_id for request in batch])
        budget.settle(rows, np.array(slots), np.array(accepted) + 1)
        for request, count in zip(batch, accepted, strict=True):
            oracle.settle(request.request_id, count)
            request.output_token_ids = range(len(request.output_token_ids) + count + 1)
        if oracle.learns:
            held = requests.table["credit"][requests.rows_of(list(oracle.credit))]
            assert held == pytest.approx(list(oracle.credit.values()), abs=1e-3)


@pytest.mark.parametrize(
    ("everybody", "params", "slots"), [(False, True, [K, 0]), (True, True, [K, K]), (False, False, [0, 0])]
)
def test_without_a_prediction_no_slots(everybody: bool, params: bool, slots: list[int]) -> None:
    """A pooling request has no parameters."""
    running = [request_of("a"), request_of("b", predicted=False)]
    for request in running if not params else []:
        request.sampling_params = None
    requests = DraftedRequests(everybody, K)
    for request in running:
        requests.add(request)
    assert len(requests) == sum(count > 0 for count in slots)
    off = SimpleNamespace(extra_args={wire.KEY: wire.Prediction(token_ids=b"", drafts=False)})
    requests.add(SimpleNamespace(request_id="off", sampling_params=off))
    assert requests.rows_of(["off"]).tolist() == [0]
    budget = DraftBudget(requests, K, 1000)
    assert budget.grant(running, exact=True) == slots
    assert budget.grant([], exact=True) == []


def test_a_request_that_is_resumed_may_have_less_to_write_than_before() -> None:
    """vLLM's streaming input: the next turn of the same request brings its own `max_tokens`."""
    requests, request = DraftedRequests(False, K), request_of("a", max_tokens=10_000)
    request.resumable = True
    budget = DraftBudget(requests, K, 1000)
    requests.add(request)
    assert budget.grant([request], exact=True) == [K]
    request.sampling_params.max_tokens = 4
    assert budget.grant([request], exact=True) == [3]


SURE = [0.999**k for k in range(1, K + 1)]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("survival", [SURE, [0.6, 0.3, 0.1], [0.02] * K], ids=["sure", "likely", "hardly"])
@pytest.mark.parametrize("size", [1, 64, 200])
def test_a_request_whose_drafts_are_all_rejected_soon_gets_no_more(
    size: int, survival: list[float], late: int
) -> None:
    """An adversary that fools the drafter at every step: all of its slots are counted. late: 1 in asynchronous
    scheduling. Then all are accepted, and it comes back as fast as it earns."""
    requests, steps = DraftedRequests(False, K), 150
    budget = DraftBudget(requests, K, 100_000)
    running = [request_of(str(i), max_tokens=10**9) for i in range(size)]
    for request in running:
        requests.add(request)
    rows = requests.rows_of([request.request_id for request in running])
    under_way = [np.zeros(size, dtype=np.int64)] * late

    def step(accepts: bool) -> int:
        requests.take(report_of({request.request_id: survival for request in running}, age=late))
        under_way.append(np.array(budget.grant(running, exact=not late)))
        slots = under_way.pop(0)
        budget.settle(rows, slots, slots * accepts + 1)
        return int(under_way[-1].sum() if late else slots.sum())

    slots = [step(False) for _ in range(steps)]
    free = max(0, 128 - size)
    refill = min(rule.REFILL + rule.REFILL_OF_FREE * free / size, 1)
    # A new request's first drafts may pass its credit where there is room; in the worst case a slot costs LEAST.
    assert sum(slots) <= size * (min(K, free) * (1 + late) + (rule.START + refill * steps) / rule.LEAST)
    # And in a batch that leaves nothing free, the first four tokens are nearly all.
    if not free:
        assert sum(slots) <= size * (rule.START + refill * steps) / 0.9
        assert sum(slots[20:]) <= size * (refill * steps + 1)
    if survival is SURE:
        assert any(step(True) for _ in range(int(2 / rule.REFILL)))
        assert [step(True) for _ in range(12)][-1] == K * size

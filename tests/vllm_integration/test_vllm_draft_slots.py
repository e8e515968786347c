"""Which requests get draft slots, and how many: what the budget adds to the rule (test_draft_rule.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.vllm_integration.fakes import report_of, request_of
from vllm_integration.budget.step_times import StepTimes
from vllm_integration.scheduler import draft_budget as rule
from vllm_integration.scheduler.draft_budget import (
    Calibration,
    DraftBudget,
    DraftedRequests,
    Granted,
    room_for_drafts,
)
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import StepTime

K = 16
SURE = [0.999**k for k in range(1, K + 1)]


def budget_of(*running: Any, everybody: bool = False, ms_a_token: float = 0.01, **given: Any) -> DraftBudget:
    """One that has seen a machine whose steps take 5 ms and so much for each token."""
    requests = DraftedRequests(everybody, K)
    for request in running:
        requests.add(request)
    budget = DraftBudget(requests, K, captured=512, **given)
    for tokens in (1, 2, 3, 4, 8, 16, 32, 64, 128, 512, 4_000) * 4:
        for in_graph in {tokens <= 512, False}:
            budget.observe([StepTime(5 + ms_a_token * tokens, tokens, in_graph)])
    return budget


@pytest.mark.parametrize(
    ("everybody", "params", "drafted"), [(False, True, [1, 0]), (True, True, [1, 1]), (False, False, [0, 0])]
)
def test_without_a_prediction_no_slots(everybody: bool, params: bool, drafted: list[int]) -> None:
    """A pooling request has no parameters."""
    running = [request_of("a"), request_of("b", predicted=False)]
    for request in running if not params else []:
        request.sampling_params = None
    budget = budget_of(*running, everybody=everybody)
    requests = budget._requests
    assert len(requests) == sum(drafted)
    off = SimpleNamespace(extra_args={wire.KEY: wire.Prediction(token_ids=b"", drafts=False)})
    requests.add(SimpleNamespace(request_id="off", sampling_params=off))
    assert requests.rows_of(["off"]).tolist() == [0]
    assert [min(count, 1) for count in budget.grant(running, exact=True)] == drafted
    assert budget.grant([], exact=True) == []


def test_rows_are_those_of_now() -> None:
    """The same list is looked up once while no request comes or goes."""
    requests, ids = DraftedRequests(True, K), ["a", "b"]
    requests.add(request_of("a"))
    first, none = requests.rows_of(ids).tolist()
    assert first > 0 == none
    requests.add(request_of("b"))
    assert requests.rows_of(ids) is requests.rows_of(list(ids))
    assert 0 not in requests.rows_of(ids)
    assert requests.keep_only({"b": None}) == [first]
    assert requests.rows_of(ids)[0] == 0 < requests.rows_of(ids)[1]
    ids.reverse()
    assert requests.rows_of(ids)[0] > 0 == requests.rows_of(ids)[1]


def test_a_request_that_is_resumed_may_have_less_to_write_than_before() -> None:
    """vLLM's streaming input: the next turn of the same request brings its own `max_tokens`."""
    request = request_of("a", max_tokens=10_000)
    request.resumable = True
    budget = budget_of(request)
    assert budget.grant([request], exact=True) == [K]
    request.sampling_params.max_tokens = 4
    assert budget.grant([request], exact=True) == [3]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("max_tokens", [1, 2, 5, K, K + 1, K + 2, 100])
def test_no_slots_for_what_cannot_become_output(max_tokens: int) -> None:
    request = request_of("a", max_tokens=max_tokens)
    budget = budget_of(request)
    for written in range(min(max_tokens, 60)):
        request.output_token_ids = range(written)
        budget._requests.take(report_of({"a": SURE}, K=K))
        budget._requests.credit[:] = 30
        (slots,) = budget.grant([request], exact=True)
        assert slots == min(K, max_tokens - written - 1)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("age", [0, 1])
def test_drafts_may_have_grown_since_an_older_report(exact: bool, age: int) -> None:
    request = request_of("a", max_tokens=10**6)
    budget = budget_of(request)
    budget._requests.take(report_of({"a": SURE[:4]}, K=K, age=age))
    (slots,) = budget.grant([request], exact=exact)
    assert slots == 4 if exact and not age else slots > 4


def test_the_step_is_no_longer_for_those_without_drafts_than_the_setting_says() -> None:
    """0.5 ms a token: a request alone has all its sure drafts, two beside twenty plain ones have few."""
    edits = [request_of(name, max_tokens=10**6) for name in "ab"]
    plain = [request_of(str(i), predicted=False) for i in range(20)]
    report = report_of(dict.fromkeys("ab", SURE), K=K)
    for others, ratio, most in (([], 1.2, 2 * K), (plain, 1.2, 6), (plain, 1.0, 0), (plain, 9.0, 2 * K)):
        budget = budget_of(*edits, *others, ms_a_token=0.5, max_slowdown=ratio)
        budget._requests.take(report)
        assert sum(budget.grant(edits + others, exact=True)) == most


def test_prompts_bound_drafts() -> None:
    """As many as leave each prompt 1.25 times its steps at most; and a step 1.25 times as long at most."""
    for free, prompts, room in ((28, [100], 8), (52, [100], 2), (100, [100], 0), (100, [], 100), (0, [5], 0),
                                (2_000, [50], 1_950), (28, [100] * 10, 4), (64, [10**6], 12)):  # fmt: skip
        assert room_for_drafts(free, prompts) == room, (free, prompts)
    edits = [request_of(str(i), max_tokens=10**6) for i in range(20)]
    budget = budget_of(*edits, ms_a_token=0.5)
    budget._requests.take(report_of(dict.fromkeys(map(str, range(20)), SURE), K=K))
    prefill = 100
    slots = sum(budget.grant(edits, exact=True, prefill=prefill, room=1_000))
    assert 0 < slots <= 1.3 * 0.25 * (5 + 0.5 * 120) / 0.5


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("survival", [SURE, [0.6, 0.3, 0.1], [0.02] * K], ids=["sure", "likely", "hardly"])
@pytest.mark.parametrize("size", [1, 64])
def test_a_request_whose_drafts_are_all_rejected_soon_gets_no_more(
    size: int, survival: list[float], late: int
) -> None:
    """An adversary that fools the drafter at every step: 0.1 ms a token. Then all are accepted: it comes back."""
    running = [request_of(str(i), max_tokens=10**9) for i in range(size)]
    budget = budget_of(*running, ms_a_token=0.1)
    requests, steps = budget._requests, 300
    rows = requests.rows_of([request.request_id for request in running])
    under_way: list[Any] = []
    spent = 0.0

    def step(accepts: bool) -> int:
        requests.take(report_of({request.request_id: survival for request in running}, K=K, age=late))
        slots = np.array(budget.grant(running, exact=not late))
        under_way.append((slots, budget.granted))
        if len(under_way) > late:
            before, granted = under_way.pop(0)
            budget.settle(np.stack([rows, rows, before, before * accepts + 1]), granted)
        return int(slots.sum())

    for _ in range(steps):
        spent += 0.1 * step(False)
    plain = 5 + 0.1 * size
    assert spent <= plain * (
        rule.START + rule.REFILL * steps / size**0.5 + 0.1 * K * size / plain * (1 + late)
    )
    if survival is SURE:
        assert any(step(True) for _ in range(6_000))
        assert [step(True) for _ in range(400)][-1] == K * size


def test_a_first_step_that_was_too_dear_locks_nobody_out() -> None:
    """The cost of a draft is known from the second step on. In the first one each request has all its drafts."""
    running = [request_of(str(i), max_tokens=10**9) for i in range(4)]
    budget = budget_of(*running, ms_a_token=2.0)
    rows, waited = budget._requests.rows_of([str(i) for i in range(4)]), 0
    for step in range(400):
        budget._requests.take(report_of({str(i): SURE for i in range(4)}, K=K))
        slots = np.array(budget.grant(running, exact=True))
        if step and slots.all():
            break
        budget.settle(np.stack([rows, rows, slots, np.ones(4, dtype=int)]), budget.granted)
        waited = step
    assert 0 < waited < 200


@pytest.mark.parametrize(
    ("accepts", "least", "most"), [(1, rule.START, rule.START), (0, 0, 0.5 * rule.START)]
)
def test_a_new_request_begins_by_what_the_server_accepted(accepts: int, least: float, most: float) -> None:
    request = request_of("a", max_tokens=10**9)
    budget = budget_of(request)
    requests = budget._requests
    for _ in range(40):
        requests.take(report_of({"a": SURE}, K=K))
        requests.credit[:] = 30
        slots = np.array(budget.grant([request], exact=True))
        row = requests.rows_of(["a"])
        budget.settle(np.stack([row, row, slots, slots * accepts + 1]), budget.granted)
    requests.add(request_of("new"))
    assert least <= requests.credit[requests.rows_of(["new"])[0]] <= most


#: Tokens of a step and its ms: a model of 135M parameters on two cores; the same where some are nearly free, which
#: must not buy others; and experts on a GPU.
DEAR = {
    "cpu": ([1, 17, 33], [62.0, 162.0, 208.0]),
    "first ones free": ([1, 4, 17, 33], [62.0, 62.5, 162.0, 208.0]),
    "experts": ([1, 4, 17, 33], [5.0, 8.0, 14.0, 18.0]),
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("machine", DEAR)
def test_a_server_that_rejects_all_drafts_loses_three_per_cent(machine: str) -> None:
    """Where drafts are dear and answers are short, one after the other; then good ones have theirs at once."""

    def time_of(name: str, tokens: int, accepts: bool) -> float:
        requests.add(request := request_of(name, max_tokens=10**6))
        spent, made = 0.0, 1
        while made < tokens:
            requests.take(report_of({name: [0.93**k for k in range(1, K + 1)]}, K=K))
            slots = np.array(budget.grant([request], exact=True))
            made += 1 + accepts * int(slots[0])
            spent += (ms := float(np.interp(1 + slots[0], *DEAR[machine])))
            budget.observe([StepTime(ms, 1 + int(slots[0]), False)])
            row = requests.rows_of([name])
            budget.settle(np.stack([row, row, slots, slots * accepts + 1]), budget.granted)
        requests.keep_only({})
        return spent / ((tokens - 1) * DEAR[machine][1][0])

    requests = DraftedRequests(False, K)
    budget = DraftBudget(requests, K)
    lengths = [85, 143, 256, 64, 43, 55, 49, 50, 55, 55, 256, 15, 69, 77, 40, 68, 27]
    lost = sum(time_of(f"bad {i}", tokens, False) * tokens for i, tokens in enumerate(lengths)) / sum(lengths)
    assert 1 < lost < 1.03
    assert max(time_of(f"good {i}", 60, True) for i in range(3)) < 0.45


@pytest.mark.usefixtures("loops")
def test_drafts_that_seem_to_be_free_are_paid_for() -> None:
    """Of 64 requests, where 96 tokens take as long as 64, and no step has 64 that could say otherwise."""
    running = [request_of(str(i), max_tokens=10**9) for i in range(64)]
    budget = budget_of(*running)
    budget.times = StepTimes()
    for tokens, ms in ((64, 20.0), (96, 20.0), (128, 22.0), (2048, 200.0)):
        for _ in range(3):
            budget.times.observe(tokens, ms, False)
    rows, verified, rng = budget._requests.rows_of(running), [], np.random.default_rng(0)
    for _ in range(400):
        drafts = {request.request_id: rng.uniform(0.02, 0.98) ** np.arange(1, K + 1) for request in running}
        budget._requests.take(report_of(drafts, K=K))
        slots = np.array(budget.grant(running, exact=True))
        budget.settle(np.stack([rows, rows, slots, np.ones_like(slots)]), budget.granted)
        verified.append(int(slots.sum()))
    assert verified[0] >= 32
    assert sum(verified[-100:]) < 100 * 16


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("size", [64, 1_000])
def test_survivals_are_corrected_by_what_is_accepted(size: int) -> None:
    """A server that accepts half of what is promised."""
    rng, calibration = np.random.default_rng(0), Calibration()
    table = np.zeros((size, rule.SLOTS + 1), dtype=np.int64)
    for _ in range(500):
        levels = rng.integers(1, 256, (size, 1)).astype(np.uint8)
        accepted = (rng.random(size) < levels[:, 0] / 510).astype(int)
        rows, ones = np.arange(size), np.ones(size, dtype=int)
        calibration.learn(Granted(rows, ones, levels), np.stack([rows, rows, ones, accepted + 1]), table)
    assert int(calibration.levels[200]) == pytest.approx(105, abs=20)
    assert calibration.levels[0] == 0
    assert (np.diff(calibration.levels.astype(int)) >= 0).all()


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("ms", [None, 0.0, float("nan"), 1e12, 5.0])
def test_a_machine_that_lies_about_its_times_drafts_on(ms: float | None, in_graph: bool) -> None:
    """No times, such as are none, and all the same; also where graphs are captured and no step runs in one."""
    running = [request_of(str(i), max_tokens=10**6) for i in range(4)]
    requests = DraftedRequests(False, K)
    for request in running:
        requests.add(request)
    budget, slots = DraftBudget(requests, K, captured=512), []
    for _ in range(60):
        requests.take(report_of({request.request_id: SURE for request in running}, K=K))
        granted = np.array(budget.grant(running, exact=True))
        slots.append(int(granted.sum()))
        rows = requests.rows_of([str(i) for i in range(4)])
        budget.settle(np.stack([rows, rows, granted, granted + 1]), budget.granted)
        if ms is not None:
            budget.observe([StepTime(ms, 4 + slots[-1], in_graph)])
    assert slots[-1] > 0

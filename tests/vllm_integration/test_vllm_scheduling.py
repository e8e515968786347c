"""How the schedulers cut placeholders to draft slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm_integration.fakes import config, report_of, request_of
from vllm_integration.config.settings import Settings
from vllm_integration.scheduler import schedulers
from vllm_integration.wire import reports
from vllm_integration.wire.reports import DraftReport

K = 16


def scheduler_of(name: str, *running: Any, **settings: Any) -> Any:
    """One of our schedulers with nothing of vLLM's in it but the requests that run."""
    scheduler = object.__new__(getattr(schedulers, name))
    scheduler.vllm_config, scheduler.running = config(K=K), list(running)
    scheduler.requests = {request.request_id: request for request in running}
    scheduler.num_spec_tokens = K
    scheduler._begin(Settings(**settings))
    for request in running:
        scheduler.drafted_requests.add(request)
    return scheduler


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (512, 128, 0.92, True, 1024)),
        ({"sure": 0.5, "fill_tokens": 0}, (512, 0, 0.5, True, 1024)),
        ({"sure": 0, "max_draft_tokens": 7}, (512, 128, 0, False, 7)),
    ],
    ids=str,
)
def test_the_schedulers_go_by_the_settings(settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    budget = scheduler_of("PredictedOutputsScheduler", **settings).draft_budget
    found = budget._captured, budget._free_tokens, budget._sure, budget.learns, budget._max_slots
    assert found == expected


def running(req_id: str, placeholders: list[int], **more: Any) -> Any:
    request = request_of(req_id, **more)
    request.spec_token_ids = placeholders
    return request


@pytest.mark.parametrize("fill", [6, 7])
def test_synchronous_scheduling_cuts_when_vllm_has_brought_the_drafts(
    fill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [running(name, []) for name in "ab"]
    requests += [running("plain", [], predicted=False), running("prefill", [])]
    scheduler = scheduler_of("PredictedOutputsScheduler", *requests, fill_tokens=fill)
    scheduler.drafted_requests.take(report_of({"a": (0.99, 0.91, 0.3), "b": (0.95, 0.4)}))

    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        for request in self.running[:3]:
            request.spec_token_ids = list(range(K))

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", update_draft_token_ids)
    scheduler.update_draft_token_ids(None)
    # Four requests, one of them still in its prompt, leave 2 or 3 tokens: 0.91 is sure, 0.4 has no room.
    assert [request.spec_token_ids for request in requests] == [[0, 1], [0], [], []]


def test_asynchronous_scheduling_cuts_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that arrives between vLLM's placeholders and the next step counts for that step."""
    shared = [-1] * K
    requests = [running("a", shared), running("b", shared), running("plain", shared, predicted=False)]
    scheduler = scheduler_of("PredictedOutputsAsyncScheduler", *requests, fill_tokens=0)
    scheduler.drafted_requests.take(report_of({"a": (0.99, 0.98), "b": (0.99,)}))
    scheduler.drafted_requests.take(report_of({"a": (0.99,), "b": (0.99, 0.95, 0.91)}))
    planned: list[Any] = []

    def schedule(self: Any, throttle_prefills: bool = False) -> str:
        planned.append(([len(request.spec_token_ids) for request in self.running], throttle_prefills))
        return "output"

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert scheduler.schedule(throttle_prefills=True) == "output"
    assert planned == [([1, 2, 0], True)]
    assert shared == [-1] * K, "vLLM shares one list between requests"


@pytest.mark.parametrize(
    ("name", "pads"),
    [
        ("PredictedOutputsV1Scheduler", 0),
        ("PredictedOutputsScheduler", K),
        ("PredictedOutputsAsyncScheduler", K),
    ],
)
def test_no_drafts_beside_a_request_that_the_samplers_of_drafts_do_not_answer(
    name: str, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logprob_token_ids`. And vLLM's padding, which V1 would verify as drafts."""
    planned: list[Any] = []

    def schedule(self: Any) -> None:
        planned.append((self.num_spec_tokens, [len(request.spec_token_ids) for request in self.running]))

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(
        Scheduler, "add_request", lambda self, new: self.requests.update({new.request_id: new})
    )
    drafted = running("a", [-1] * K, max_tokens=500)
    scheduler = scheduler_of(name, drafted)
    scheduler.schedule()
    pooling, scored = running("pooling", []), running("scored", [])
    pooling.sampling_params, scored.sampling_params.logprob_token_ids = None, [3, 4]
    for request in (pooling, scored):
        scheduler.add_request(request)
    scheduler.schedule()
    drafted.spec_token_ids = [-1] * K
    del scheduler.requests["scored"]
    scheduler.schedule()
    assert planned == [(pads, [K]), (0, [0]), (pads, [K])]
    assert scheduler.num_spec_tokens == K


@pytest.mark.parametrize("name", ["PredictedOutputsScheduler", "PredictedOutputsAsyncScheduler"])
def test_no_slots_while_the_worker_drafts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda *_: None)
    monkeypatch.setattr(Scheduler, "schedule", lambda *_: None)
    request = running("a", [-1] * K)
    scheduler = scheduler_of(name, request)
    plan = scheduler.schedule if "Async" in name else lambda: scheduler.update_draft_token_ids(None)
    plan()
    assert len(request.spec_token_ids) == K
    for off in ({"drafting": "an error"}, {"draft reports": "an error"}):
        scheduler._worker_faults = off
        scheduler._take(DraftReport(faults=off), None)
        plan()
        assert request.spec_token_ids == []
    scheduler._worker_faults, request.spec_token_ids = {"step log": "an error"}, [-1] * K
    scheduler._take(DraftReport(), None)
    plan()
    assert len(request.spec_token_ids) == K


def test_a_scheduler_that_cannot_be_set_up_schedules_as_vllm_without_drafts(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    nothing = SimpleNamespace(speculative_config=None)
    monkeypatch.setattr(Scheduler, "__init__", lambda self: setattr(self, "vllm_config", nothing))
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: "outputs")
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda *_: None)
    scheduler = schedulers.PredictedOutputsScheduler()  # without a configuration of drafts
    scheduler.running, scheduler.requests = [running("a", [-1] * K)], {}
    assert scheduler.update_from_output(SimpleNamespace(), SimpleNamespace()) == "outputs"
    scheduler.update_draft_token_ids(None)
    assert scheduler.running[0].spec_token_ids == []
    (line,) = plugin_log
    assert line.startswith("gpu_align schedules no drafts any more: AttributeError at ")


def test_the_scheduler_learns_from_its_steps_while_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {})
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda *_: None)

    def step(scheduler: Any, accepted: int) -> int:
        """The slots after a step that verified those there are, and accepted so many."""
        (request,) = scheduler.running
        slots = request.spec_token_ids
        plan = SimpleNamespace(
            scheduled_spec_decode_tokens={"a": slots} if slots else {}, num_invalid_spec_tokens=None
        )
        tokens = [[5] * (min(len(slots), accepted) + 1)]
        output = SimpleNamespace(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=tokens)
        reports.attach(output, report_of({"a": [0.999**k for k in range(1, K + 1)]}))
        scheduler.update_from_output(plan, output)
        request.spec_token_ids = [-1] * K
        scheduler.update_draft_token_ids(None)
        return len(request.spec_token_ids)

    follows, refuses = (
        scheduler_of("PredictedOutputsScheduler", running("a", []), fill_tokens=0) for _ in "ab"
    )
    for scheduler in (follows, refuses):
        scheduler.running[0].num_tokens = 10
    assert [step(follows, K) for _ in range(6)][-1] == K
    assert [step(refuses, 0) for _ in range(6)][1:] == [0] * 5
    monkeypatch.setattr(refuses.ledger, "begin", lambda *_: 1 / 0)
    assert step(refuses, 0) == K
    assert len(plugin_log) == 1

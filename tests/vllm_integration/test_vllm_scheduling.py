"""How the schedulers cut placeholders to draft slots."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm_integration.fakes import config, report_of, request_of
from vllm_integration.budget.compiled import Loop
from vllm_integration.budget.step_times import PATIENCE
from vllm_integration.config.settings import Settings
from vllm_integration.scheduler import schedulers
from vllm_integration.seams.guard import faults
from vllm_integration.wire import reports
from vllm_integration.wire.reports import DraftReport, StepTime

K = 16


def scheduler_of(name: str, *running: Any, **settings: Any) -> Any:
    """One of our schedulers with nothing of vLLM's in it but the requests that run."""
    scheduler = object.__new__(getattr(schedulers, name))
    scheduler.vllm_config, scheduler.running = config(K=K), list(running)
    scheduler.requests = {request.request_id: request for request in running}
    scheduler.num_spec_tokens = K
    scheduler.waiting, scheduler.max_num_running_reqs = [], 64
    scheduler.max_num_scheduled_tokens = 2048
    scheduler._begin(Settings(**settings))
    for request in running:
        scheduler.drafted_requests.add(request)
    return scheduler


def test_the_schedulers_go_by_the_settings() -> None:
    budget = scheduler_of("PredictedOutputsScheduler", max_slowdown=1.5).draft_budget
    assert (budget._max_slowdown, budget.times.captured) == (1.5, 512)


def test_times_that_are_none_are_told_until_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_of("PredictedOutputsScheduler")

    def take(ms: float) -> None:
        scheduler._take(DraftReport(times=[StepTime(ms, 1, True)]), None)

    for _ in range(PATIENCE):
        take(0.0)
    assert not scheduler.times.is_off
    assert "step times" not in faults()
    take(0.0)
    take(-1.0)
    assert faults()["step times"] == "17 in a row are no times, the last of 0.0 ms"
    assert caplog.messages == [f"gpu_align uses no step times for now: {faults()['step times']}"]
    take(5.0)
    assert "step times" not in faults()
    assert caplog.messages[1:] == ["gpu_align: step times works again"]


def test_what_cannot_be_compiled_stays_plain_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Loop, "compile", lambda self: 1 / 0)
    scheduler = scheduler_of("PredictedOutputsScheduler", request := running("a", [-1] * K))
    for thread in threading.enumerate():
        if thread.name.startswith("gpu_align"):
            thread.join()
    assert caplog.messages[-1].startswith(
        "gpu_align schedules in plain Python, which is slow: ZeroDivisionError"
    )
    scheduler.drafted_requests.take(SURE)
    assert scheduler._cut_to_slots()
    assert len(request.spec_token_ids) == K


def test_a_process_that_ends_waits_for_no_more_than_one_loop(tmp_path: Path) -> None:
    program = """
from threading import Thread
from vllm_integration.budget import compiled
from vllm_integration.scheduler import verification_ledger

def run():
    compiled.compile_loops()
    print(sum(loop._run is not loop.plain for loop in compiled.LOOPS), len(compiled.LOOPS))

Thread(target=run).start()
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    compiled, loops = map(int, ended.stdout.split())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert compiled <= 1 < loops


PLANNED = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()))


SURE = report_of({"a": [0.999**k for k in range(1, K + 1)]})


def running(req_id: str, placeholders: list[int], **more: Any) -> Any:
    request = request_of(req_id, **more)
    request.spec_token_ids, request.is_prefill_chunk = placeholders, False
    return request


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("PredictedOutputsV1Scheduler", True),
        ("PredictedOutputsScheduler", True),
        ("PredictedOutputsAsyncScheduler", False),
    ],
)
def test_drafts_are_cut_at_the_last_moment(name: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that arrives between vLLM's drafts and the next step counts for that step; and what prompts need is
    left to them, those that run and those that wait. V1's drafts are tokens."""
    shared = list(range(K)) if "V1" in name else [-1] * K
    requests = [running("a", shared), running("b", shared), running("plain", [], predicted=False)]
    scheduler = scheduler_of(name, *requests)
    scheduler.drafted_requests.take(report_of({"a": (0.99, 0.98), "b": (0.99,)}))
    scheduler.drafted_requests.take(report_of({"a": (0.99,), "b": (0.99, 0.95, 0.91)}))
    planned: list[Any] = []

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        planned.append([request.spec_token_ids for request in self.running])
        return PLANNED

    monkeypatch.setattr(Scheduler, "schedule", schedule)

    def cut() -> list[int]:
        scheduler.drafted_requests.credit[:] = 30
        for request in requests[:2]:
            request.spec_token_ids = shared
        assert scheduler.schedule(throttle_prefills=True) is PLANNED
        return [len(tokens) for tokens in planned[-1]]

    free = cut()
    assert free == [1, 3, 0] if exact else (free[0] >= 1 and free[1] >= 3)
    assert planned[-1][0] == shared[: free[0]]
    assert shared in (list(range(K)), [-1] * K), "vLLM shares one list between requests"
    prompt = SimpleNamespace(
        num_tokens=500, num_computed_tokens=400, is_prefill_chunk=True, spec_token_ids=[]
    )
    scheduler.max_num_scheduled_tokens = 103
    scheduler.waiting = [prompt]
    assert cut() == [0, 0, 0]
    assert [sum(cut()) > 0 for _ in range(8)] == [True, True, True, False] * 2, (
        "no token is what it waits for"
    )
    scheduler.waiting = []
    scheduler.running.append(prompt)
    assert sum(cut()) == 0


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

    def schedule(self: Any) -> Any:
        planned.append((self.num_spec_tokens, [len(request.spec_token_ids) for request in self.running]))
        return PLANNED

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(
        Scheduler, "add_request", lambda self, new: self.requests.update({new.request_id: new})
    )
    drafted = running("a", [-1] * K, max_tokens=500)
    scheduler = scheduler_of(name, drafted)
    scheduler.drafted_requests.take(SURE)
    scheduler.schedule()
    pooling, scored = running("pooling", []), running("scored", [])
    pooling.sampling_params, scored.sampling_params.logprob_token_ids = None, [3, 4]
    for request in (pooling, scored):
        scheduler.add_request(request)
    scheduler.schedule()
    drafted.spec_token_ids = [-1] * K
    scheduler.drafted_requests.credit[:] = 30
    del scheduler.requests["scored"]
    scheduler.schedule()
    assert planned == [(pads, [K]), (0, [0]), (pads, [K])]
    assert scheduler.num_spec_tokens == K


@pytest.mark.parametrize("name", ["PredictedOutputsScheduler", "PredictedOutputsAsyncScheduler"])
def test_no_slots_while_the_worker_drafts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda *_: PLANNED)
    request = running("a", [-1] * K)
    scheduler = scheduler_of(name, request)
    scheduler.drafted_requests.take(SURE)
    plan = scheduler.schedule
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
    monkeypatch.setattr(Scheduler, "schedule", lambda *_: PLANNED)
    scheduler = schedulers.PredictedOutputsScheduler()  # without a configuration of drafts
    scheduler.running, scheduler.requests = [running("a", [-1] * K)], {}
    scheduler.num_spec_tokens = K
    assert scheduler.update_from_output(SimpleNamespace(), SimpleNamespace()) == "outputs"
    scheduler.schedule()
    assert scheduler.running[0].spec_token_ids == []
    (line,) = plugin_log
    assert line.startswith("gpu_align schedules no drafts any more: AttributeError at ")


def test_the_scheduler_learns_from_its_steps_while_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {})
    monkeypatch.setattr(Scheduler, "schedule", lambda *_: PLANNED)

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
        scheduler.schedule()
        return len(request.spec_token_ids)

    follows, refuses = (scheduler_of("PredictedOutputsScheduler", running("a", [])) for _ in "ab")
    for scheduler in (follows, refuses):
        scheduler.running[0].num_tokens = 10
    assert [step(follows, K) for _ in range(6)][-1] == K
    assert [step(refuses, 0) for _ in range(6)][1:] == [0] * 5
    monkeypatch.setattr(refuses.ledger, "begin", lambda *_: 1 / 0)
    assert step(refuses, 0) == K
    assert len(plugin_log) == 1

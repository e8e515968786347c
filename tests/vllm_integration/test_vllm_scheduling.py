"""How drafts are told to the scheduler, and how the schedulers cut placeholders to draft slots."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_fakes import proposed, request_of

from vllm_integration.scheduler.draft_budget import DraftSlots
from vllm_integration.worker import draft_reporter as draft_counts
from vllm_integration.worker.draft_reporter import DraftCounts, Proposed, survival_levels

K = 16


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (128, 0.9, 0.92, 1024)),
        ({"GPU_ALIGN_SURE": "0.5", "GPU_ALIGN_FILL_TOKENS": "0"}, (0, 0.5, 0.5, 1024)),
        ({"GPU_ALIGN_SURE": "0", "GPU_ALIGN_MAX_DRAFT_TOKENS": "7"}, (128, 0.0, 0.0, 7)),
    ],
)
def test_the_schedulers_go_by_the_settings(
    environment: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduling = pytest.importorskip("vllm_integration.scheduler.schedulers")
    made: list[tuple[Any, ...]] = []

    def make(k: int, budget: int, everybody: bool, *, fill: int, sure: float, sure_late: float) -> None:
        made.append((k, everybody, fill, sure, sure_late, budget))

    for name in ("SURE", "FILL_TOKENS", "MAX_DRAFT_TOKENS"):
        monkeypatch.delenv(f"GPU_ALIGN_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(scheduling, "DraftSlots", make)
    scheduling.slots_of(
        SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
        )
    )
    assert made == [(K, False, *expected)]


def scheduler_of(name: str, *running: Any, fill: int = 128) -> Any:
    """One of our schedulers with nothing of vLLM's in it but the requests that run."""
    scheduler = object.__new__(getattr(pytest.importorskip("vllm_integration.scheduler.schedulers"), name))
    scheduler.draft_slots, scheduler.running = DraftSlots(K, 1000, False, fill=fill), list(running)
    return scheduler


def running(req_id: str, placeholders: list[int], **more: Any) -> Any:
    request = request_of(req_id, **more)
    request.spec_token_ids = placeholders
    return request


@pytest.mark.parametrize("fill", [6, 7])
def test_synchronous_scheduling_cuts_when_vllm_has_brought_the_drafts(
    fill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = pytest.importorskip("vllm.v1.core.sched.scheduler")
    requests = [running(name, []) for name in "ab"]
    requests += [running("plain", [], predicted=False), running("prefill", [])]
    scheduler = scheduler_of("PredictedOutputsScheduler", *requests, fill=fill)
    scheduler.draft_slots.report([("a", proposed(0.99, 0.91, 0.3)), ("b", proposed(0.95, 0.4))])

    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        for request in self.running[:3]:
            request.spec_token_ids = list(range(K))

    monkeypatch.setattr(sync.Scheduler, "update_draft_token_ids", update_draft_token_ids)
    scheduler.update_draft_token_ids(None)
    # Four requests, one of them still in its prompt, leave 2 or 3 tokens: 0.91 is sure, 0.4 has no room.
    assert [request.spec_token_ids for request in requests] == [[0, 1], [0], [], []]


def test_asynchronous_scheduling_cuts_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that arrives between vLLM's placeholders and the next step counts for that step."""
    sync = pytest.importorskip("vllm.v1.core.sched.scheduler")
    shared = [-1] * K
    requests = [running("a", shared), running("b", shared), running("plain", shared, predicted=False)]
    scheduler = scheduler_of("PredictedOutputsAsyncScheduler", *requests, fill=0)
    scheduler.draft_slots.report([("a", proposed(0.99, 0.98)), ("b", proposed(0.99))])
    scheduler.draft_slots.report([("a", proposed(0.99)), ("b", proposed(0.99, 0.95, 0.91))])
    planned: list[Any] = []

    def schedule(self: Any, throttle_prefills: bool = False) -> str:
        planned.append(([len(request.spec_token_ids) for request in self.running], throttle_prefills))
        return "output"

    monkeypatch.setattr(sync.Scheduler, "schedule", schedule)
    assert scheduler.schedule(throttle_prefills=True) == "output"
    assert planned == [([1, 2, 0], True)]
    assert shared == [-1] * K, "vLLM shares one list between requests"


def drafts_of(lengths: list[int], confidence: float, source: int = 1) -> Any:
    length = torch.tensor(lengths, dtype=torch.int32)
    valid = torch.arange(K) < length[:, None]
    sources = torch.where(length > 0, source, 0).to(torch.int8)
    return SimpleNamespace(length=length, confidence=valid * confidence, source=sources)


def step(counts: DraftCounts, lengths: list[int], confidence: float, **more: Any) -> Any:
    """One engine step: the drafts that its output tells of. Request i is in row i and has 10 + i tokens."""
    output = SimpleNamespace()
    counts.forget()
    rows = np.arange(len(lengths))
    req_ids = [f"r{i}" for i in rows]
    total_len = torch.arange(10, 14, dtype=torch.int32)
    counts.remember(req_ids, rows, drafts_of(lengths, confidence), total_len, **more)
    counts.attach(output, counts.start())
    return draft_counts.received(output)


def test_lengths_and_survival_arrive() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    assert list(step(counts, [2, 0, 3], 0.5).proposed) == [
        ("r0", Proposed(2, 0, 1, 10, bytes([127, 63]))),
        ("r1", Proposed(0, 0, 0, 11, b"")),
        ("r2", Proposed(3, 0, 1, 12, bytes([127, 63, 31]))),
    ]


def test_survival_is_rounded_down_and_every_draft_counts() -> None:
    """A draft of no confidence is a draft; garbage behind a row's length is left out."""
    survival = np.array([[1.0, 0.9999, 0.5, 0.003], [0.8, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert survival_levels(survival, [4, 2, 0]) == [bytes([255, 254, 127, 1]), bytes([204, 1]), b""]
    assert survival_levels(survival.astype(np.float32), [4, 2, 0])[1] == bytes([204, 1])
    assert survival_levels(np.zeros((0, 4)), []) == []


def test_late_copies_are_never_waited_for_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: set[int] = set()
    monkeypatch.setattr(draft_counts._InFlight, "arrived", lambda self: self.step in arrived)
    counts = DraftCounts(4, K, torch.device("cpu"), batches_in_flight=1)
    assert [list(step(counts, [length], 1.0).proposed) for length in range(1, 7)] == [[]] * 6
    arrived.update(range(1, 10))
    # Four buffers: the copies of steps 5 and 6 were not started, and step 7 takes the oldest one's.
    reported = step(counts, [9], 1.0).proposed
    assert [(proposed.length, proposed.age) for _, proposed in reported] == [(2, 5), (3, 4), (4, 3), (9, 0)]
    assert [proposed for _, proposed in step(counts, [7], 1.0).proposed] == [
        Proposed(7, 0, 1, 10, bytes([255] * 7))
    ]


def test_an_output_tells_nothing_of_later_steps() -> None:
    """Another thread may take it to the scheduler when the engine has gone on."""
    counts = DraftCounts(4, K, torch.device("cpu"))
    outputs = []
    for length in (3, 5):
        counts.forget()
        counts.remember(["r"], np.array([0]), drafts_of([length], 1.0), torch.tensor([7 + length]))
        outputs.append((SimpleNamespace(), counts.start()))
    for output, started in outputs:
        counts.attach(output, started)
    told = [draft_counts.received(output).proposed for output, _ in outputs]
    assert [[proposed.length for _, proposed in one] for one in told] == [[3], [5]]


def test_slots_that_the_device_trimmed_are_told_with_the_step_itself() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    ends = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    assert step(counts, [2, 6, 3], 0.5, query_ends=ends).trimmed == {"r0": 0, "r1": 2, "r2": 0}


def test_a_step_without_drafts_reports_nothing() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    step(counts, [3], 1.0)
    output = SimpleNamespace()
    counts.forget()
    counts.attach(output, counts.start())
    assert draft_counts.received(output) == draft_counts.Report()
    assert not vars(output)
    counts.attach(None, counts.start())


def test_they_travel_between_processes_with_vllms_own_output() -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    counts = DraftCounts(4, K, torch.device("cpu"))
    counts.forget()
    counts.remember(["a"], np.array([2]), drafts_of([2], 0.5), torch.arange(4))
    output = outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    counts.attach(output, counts.start(), {"b": "cut"})
    there = draft_counts.received(pickle.loads(pickle.dumps(output)))
    assert [(req_id, p.length, p.position) for req_id, p in there.proposed] == [("a", 2, 2)]
    assert there.refused == {"b": "cut"}
    empty = outputs.ModelRunnerOutput(req_ids=[], req_id_to_index={})
    assert draft_counts.received(empty) == draft_counts.Report()


def test_where_vllm_still_waits_for_the_device_the_report_is_added_after_that() -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    calls = []

    class Pending(outputs.AsyncModelRunnerOutput):  # type: ignore[misc,name-defined]
        def get_output(self) -> str:
            calls.append("waited")
            return "output"

    leaving = draft_counts.when_it_leaves(Pending(), lambda output: calls.append(f"told {output}"))
    assert isinstance(leaving, outputs.AsyncModelRunnerOutput)
    assert calls == []
    assert leaving.get_output() == "output"
    assert calls == ["waited", "told output"]
    assert draft_counts.when_it_leaves("plain", calls.append) == "plain"
    assert calls[2:] == ["plain"]

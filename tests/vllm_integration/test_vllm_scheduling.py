"""Which requests get draft slots, how many, and how draft lengths find their way there."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_integration import draft_counts, wire
from vllm_integration.draft_counts import DraftCounts, Proposed
from vllm_integration.draft_slots import FEW, PATIENCE, DraftSlots

K = 16


def request_of(req_id: str, *, predicted: bool = True, max_tokens: int = 100, written: int = 0) -> Any:
    params = SimpleNamespace(extra_args={wire.KEY: [1, 2]} if predicted else None)
    return SimpleNamespace(
        request_id=req_id, sampling_params=params, max_tokens=max_tokens, num_output_tokens=written
    )


def slots_of(budget: int = 1000, *, everybody: bool = False) -> DraftSlots:
    return DraftSlots(K, budget, everybody)


def test_without_a_prediction_no_slots() -> None:
    requests = [request_of("a"), request_of("b", predicted=False)]
    assert slots_of().grant(requests, exact=True) == {"a": K, "b": 0}
    assert slots_of(everybody=True).grant(requests, exact=True) == {"a": K, "b": K}


def test_params_of_a_pooling_request_are_none() -> None:
    request = request_of("a")
    request.sampling_params = None
    assert slots_of().grant([request], exact=True) == {"a": 0}


@pytest.mark.parametrize(
    ("length", "exact", "late"), [(0, 0, FEW), (1, 1, 2 + FEW), (5, 5, 10 + FEW), (K, K, K)]
)
def test_a_report_about_this_step_is_exact_an_older_one_leaves_room(
    length: int, exact: int, late: int
) -> None:
    slots = slots_of()
    slots.report([("a", Proposed(length, length * 0.5, 0))])
    assert slots.grant([request_of("a")], exact=True) == {"a": exact}
    assert slots.grant([request_of("a")], exact=False) == {"a": late}
    slots.report([("a", Proposed(length, length * 0.5, 1))])
    assert slots.grant([request_of("a")], exact=True) == {"a": late}


def test_slots_end_after_a_few_empty_reports_and_return_with_the_first_other() -> None:
    slots, granted = slots_of(), []
    for length in (*[0] * (PATIENCE + 2), 3):
        slots.report([("a", Proposed(length, 0.0, 2))])
        granted.append(slots.grant([request_of("a")], exact=False)["a"])
    assert granted == [FEW] * PATIENCE + [0, 0] + [6 + FEW]


@pytest.mark.parametrize(
    ("written", "slots"), [(0, K), (82, K), (83, K), (84, 15), (98, 1), (99, 0), (120, 0)]
)
def test_never_more_than_can_become_output(written: int, slots: int) -> None:
    assert slots_of().grant([request_of("a", written=written)], exact=True) == {"a": slots}


def test_the_budget_goes_to_the_most_confident() -> None:
    slots = slots_of(budget=20)
    slots.report(
        [("low", Proposed(10, 1.0, 0)), ("high", Proposed(10, 9.0, 0)), ("mid", Proposed(10, 5.0, 0))]
    )
    requests = [request_of(name) for name in ("low", "high", "mid", "new")]
    assert slots.grant(requests, exact=True) == {"low": 0, "high": 4, "mid": 0, "new": K}
    assert slots.grant(requests[:3], exact=True) == {"low": 0, "high": 10, "mid": 10}
    assert slots.grant(requests[:1], exact=True) == {"low": 10}


def test_ties_are_served_in_batch_order_and_the_budget_is_never_passed() -> None:
    requests = [request_of(str(i)) for i in range(10)]
    for budget in (1, 15, 16, 17, 100, 159, 160, 1000):
        granted = slots_of(budget).grant(requests, exact=True)
        assert list(granted) == [str(i) for i in range(10)]
        assert sum(granted.values()) == min(budget, 160)
        assert list(granted.values()) == sorted(granted.values(), reverse=True)


def test_a_request_that_is_gone_is_forgotten() -> None:
    slots = slots_of()
    slots.report([("a", Proposed(0, 0.0, 0)), ("b", Proposed(2, 1.0, 0))])
    slots.keep_only({"b": object()})
    assert slots.grant([request_of("a"), request_of("b")], exact=True) == {"a": K, "b": 2}


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


def test_lengths_and_expected_acceptances_arrive() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    assert list(step(counts, [2, 0, 3], 0.5).proposed) == [
        ("r0", Proposed(2, pytest.approx(0.75), 0, 1, 10)),
        ("r1", Proposed(0, 0.0, 0, 0, 11)),
        ("r2", Proposed(3, pytest.approx(0.875), 0, 1, 12)),
    ]


def test_late_copies_are_never_waited_for_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: set[int] = set()
    monkeypatch.setattr(draft_counts._InFlight, "arrived", lambda self: self.step in arrived)
    counts = DraftCounts(4, K, torch.device("cpu"), batches_in_flight=1)
    assert [list(step(counts, [length], 1.0).proposed) for length in range(1, 7)] == [[]] * 6
    arrived.update(range(1, 10))
    # Four buffers: the copies of steps 5 and 6 were not started, and step 7 takes the oldest one's.
    reported = step(counts, [9], 1.0).proposed
    assert [(proposed.length, proposed.age) for _, proposed in reported] == [(2, 5), (3, 4), (4, 3), (9, 0)]
    assert [proposed for _, proposed in step(counts, [7], 1.0).proposed] == [Proposed(7, 7.0, 0, 1, 10)]


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

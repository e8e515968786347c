"""Which requests get draft slots, how many, and how draft lengths find their way there."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

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


def step(counts: DraftCounts, lengths: list[int], confidence: float) -> Any:
    """One engine step: what its output carries."""
    output = SimpleNamespace(model_runner_output=SimpleNamespace())
    counts.forget()
    valid = torch.arange(K) < torch.tensor(lengths)[:, None]
    counts.remember(
        [f"r{i}" for i in range(len(lengths))], torch.tensor(lengths, dtype=torch.int32), valid * confidence
    )
    counts.publish(output)
    return draft_counts.received(output.model_runner_output)


def test_lengths_and_expected_acceptances_arrive() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    received = step(counts, [2, 0, 3], 0.5)
    assert received == {
        "r0": Proposed(2, pytest.approx(0.75), 0),
        "r1": Proposed(0, 0.0, 0),
        "r2": Proposed(3, pytest.approx(0.875), 0),
    }


def test_late_copies_are_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: set[int] = set()
    monkeypatch.setattr(draft_counts._InFlight, "arrived", lambda self: self.step in arrived)
    counts = DraftCounts(4, K, torch.device("cpu"))
    assert [dict(step(counts, [length], 1.0)) for length in range(1, 7)] == [{}] * 6
    arrived.update(range(1, 10))
    # Four buffers: the copies of steps 5 and 6 were not started. The newest that arrived counts.
    assert step(counts, [9], 1.0) == {"r0": Proposed(4, 4.0, 3)}
    assert step(counts, [7], 1.0) == {"r0": Proposed(7, 7.0, 0)}


def test_a_step_without_drafts_reports_nothing() -> None:
    counts = DraftCounts(4, K, torch.device("cpu"))
    step(counts, [3], 1.0)
    output = SimpleNamespace()
    counts.forget()
    counts.publish(output)
    assert draft_counts.received(output) == {}
    counts.publish(None)


def test_they_travel_between_processes_with_vllms_own_output() -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    counts = DraftCounts(4, K, torch.device("cpu"))
    counts.forget()
    counts.remember(["a"], torch.tensor([2], dtype=torch.int32), torch.full((1, K), 0.5))
    output = outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    counts.publish(output)
    there = draft_counts.received(pickle.loads(pickle.dumps(output)))
    assert there["a"].length == 2
    assert draft_counts.received(outputs.ModelRunnerOutput(req_ids=[], req_id_to_index={})) == {}

"""Which requests get draft slots, and how many: the policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_fakes import report_of, request_of

from vllm_integration.scheduler.draft_budget import FEW, DraftBudget, DraftedRequests

K = 16


class Budget:
    """A draft budget, and the requests that it is for. Without credits: test_vllm_credit.py is about these."""

    def __init__(self, max_slots: int = 1000, *, everybody: bool = False, **settings: Any) -> None:
        self.requests = DraftedRequests(everybody, K)
        self.budget = DraftBudget(self.requests, K, max_slots, learns=False, **settings)

    def report(self, drafts: dict[str, tuple[float, ...]], age: int = 0) -> None:
        self.requests.rows_of(list(drafts), [request_of(name) for name in drafts])
        self.requests.take(report_of(drafts, age=age))

    def grant(self, requests: list[Any], **step: Any) -> dict[str, int]:
        slots = self.budget.grant(requests, **step)
        return {request.request_id: n for request, n in zip(requests, slots, strict=True)}


def test_without_a_prediction_no_slots() -> None:
    requests = [request_of("a"), request_of("b", predicted=False)]
    assert Budget().grant(requests, exact=True) == {"a": K, "b": 0}
    assert Budget(everybody=True).grant(requests, exact=True) == {"a": K, "b": K}
    assert Budget().grant([], exact=True) == {}


def test_params_of_a_pooling_request_are_none() -> None:
    request = request_of("a")
    request.sampling_params = None
    assert Budget().grant([request], exact=True) == {"a": 0}


def test_a_step_is_filled_with_the_likeliest_and_sure_drafts_come_on_top() -> None:
    reports = {"a": (0.95, 0.91, 0.4), "b": (0.8, 0.5, 0.1), "c": ()}
    requests = [request_of(name) for name in "abc"]
    for fill, expected in (
        (0, [2, 0, 0]),
        (3, [2, 0, 0]),
        (5, [2, 0, 0]),
        (6, [2, 1, 0]),
        (7, [2, 2, 0]),
        (8, [3, 2, 0]),
        (9, [3, 3, 0]),
        (128, [3, 3, 0]),
    ):
        slots = Budget(free_tokens=fill, always_verify=0.9)
        slots.report(reports)
        assert list(slots.grant(requests, exact=True).values()) == expected, fill
    # Others of the step take room, too.
    slots = Budget(free_tokens=8, always_verify=0.9)
    slots.report(reports)
    assert list(slots.grant(requests, exact=True, batch_size=5).values()) == [2, 1, 0]
    assert list(slots.grant(requests, exact=True, batch_size=500).values()) == [2, 0, 0]


@pytest.mark.parametrize(("sure", "expected"), [(0, 4), (0.002, 4), (0.5, 2), (0.51, 1), (1, 1)])
def test_the_least_survival_of_a_sure_draft(sure: float, expected: int) -> None:
    slots = Budget(free_tokens=0, always_verify=sure, always_verify_late=sure)
    for age in (0, 1):
        slots.report({"a": (1.0, 0.502, 0.2, 0.0001)}, age)
        assert slots.grant([request_of("a")], exact=True) == {"a": expected}


def test_an_older_report_has_to_be_surer_and_leaves_room_where_there_is_some() -> None:
    draft = (0.95, 0.91, 0.4)
    for exact, age, fill, expected in (
        (True, 0, 0, 2),  # 0.9 is sure
        (True, 1, 0, 1),  # 0.92
        (False, 0, 0, 1),
        (False, 0, 3, 2),
        (False, 0, 128, 3 + FEW),
        (True, 2, 128, 3 + FEW),
        (True, 0, 128, 3),
    ):
        slots = Budget(free_tokens=fill)
        slots.report({"a": draft}, age)
        assert slots.grant([request_of("a")], exact=exact) == {"a": expected}, (exact, age, fill)


def test_a_report_that_another_step_has_followed_is_not_about_the_step_to_come() -> None:
    slots = Budget(free_tokens=0)
    slots.report({"a": (0.95, 0.91)})
    assert slots.grant([request_of("a")], exact=True) == {"a": 2}
    slots.report({})
    assert slots.grant([request_of("a")], exact=True) == {"a": 1}


def test_requests_before_their_first_report_fill_the_step_and_no_more() -> None:
    requests = [request_of(str(i)) for i in range(1024)]
    assert sum(Budget(100_000).grant(requests, exact=True).values()) == 0
    granted = Budget(100_000).grant(requests[:64], exact=True)
    assert list(granted.values()) == [K] * 4 + [0] * 60
    assert list(Budget(100_000).grant(requests[:2], exact=False).values()) == [K, K]
    # They come before drafts that are known, but take nothing from sure ones.
    slots = Budget(free_tokens=2 + K)
    slots.report({"0": (0.99, 0.98, 0.5)})
    assert slots.grant(requests[:2], exact=True) == {"0": 2, "1": K}


@pytest.mark.parametrize(
    ("written", "slots"), [(0, K), (82, K), (83, K), (84, 15), (98, 1), (99, 0), (120, 0)]
)
def test_never_more_than_can_become_output(written: int, slots: int) -> None:
    request = request_of("a", written=written)
    assert Budget().grant([request], exact=True) == {"a": slots}
    for share in (0.9, 0):
        sure = Budget(free_tokens=0, always_verify=share, always_verify_late=share)
        sure.report({"a": (0.99,) * K})
        assert sure.grant([request], exact=True) == {"a": slots}
        assert sure.grant([request], exact=False) == {"a": slots}


def test_the_budget_goes_to_the_likeliest() -> None:
    slots = Budget(20)
    slots.report({"low": (0.2,) * 10, "high": (0.99,) * 10, "mid": (0.5,) * 10})
    requests = [request_of(name) for name in ("low", "high", "mid", "new")]
    assert slots.grant(requests, exact=True) == {"low": 0, "high": 4, "mid": 0, "new": K}
    assert slots.grant(requests[:3], exact=True) == {"low": 0, "high": 10, "mid": 10}
    assert slots.grant(requests[:1], exact=True) == {"low": 10}


class Writing:
    """A request that notes how often somebody looks how long its output is."""

    def __init__(self, max_tokens: int, **more: Any) -> None:
        vars(self).update(vars(request_of("a", max_tokens=max_tokens)))
        vars(self).update(more, written=self.__dict__.pop("num_output_tokens"), looks=0)

    @property
    def num_output_tokens(self) -> int:
        self.looks += 1
        return int(self.written)


@pytest.mark.parametrize("tokens", [1, 3, K + 1])
@pytest.mark.parametrize("max_tokens", [1, K + 1, 500, 501])
def test_the_last_drafts_are_those_that_can_become_output(tokens: int, max_tokens: int) -> None:
    """Though nobody looks at a request's output while its end is far away."""
    slots, request = Budget(), Writing(max_tokens)
    steps = far = 0
    while request.written < max_tokens:
        slots.report({"a": (0.99,) * K})
        granted = slots.grant([request], exact=True)
        assert granted == {"a": min(K, max_tokens - request.written - 1)}
        far += max_tokens - request.written > 200
        request.written += tokens
        steps += 1
    assert request.looks <= steps - far + 5


def test_a_request_that_is_resumed_may_have_less_to_write_than_before() -> None:
    """vLLM's streaming input: the next turn of the same request brings its own `max_tokens`."""
    slots, request = Budget(), Writing(10_000, resumable=True)
    slots.report({"a": (0.99,) * K})
    assert slots.grant([request], exact=True) == {"a": K}
    request.max_tokens = 4
    assert slots.grant([request], exact=True) == {"a": 3}


def test_ties_are_served_in_batch_order_and_the_budget_is_never_passed() -> None:
    requests = [request_of(str(i)) for i in range(10)]
    for budget in (1, 15, 16, 17, 100, 159, 160, 1000):
        granted = Budget(budget, free_tokens=1000).grant(requests, exact=True)
        assert list(granted) == [str(i) for i in range(10)]
        assert sum(granted.values()) == min(budget, 160)
        assert list(granted.values()) == sorted(granted.values(), reverse=True)


def falling(levels: list[int]) -> tuple[float, ...]:
    """Survivals that are reported as these levels, in order."""
    return tuple((level + 0.5) / 255 for level in sorted(levels, reverse=True))


@given(st.permutations(range(1, 61)), st.integers(0, 70), st.integers(0, 70), st.permutations(range(6)))
def test_the_order_of_the_batch_does_not_matter_without_ties(
    levels: list[int], fill: int, budget: int, order: list[int]
) -> None:
    """All levels of all requests differ, so that there is one right answer."""
    reports = [(str(i), levels[10 * i : 10 * i + 10]) for i in range(6)]
    answers = []
    for batch in (reports, [reports[i] for i in order]):
        slots = Budget(budget, free_tokens=fill, always_verify=50 / 255)
        slots.report({name: falling(levels) for name, levels in batch})
        answers.append(slots.grant([request_of(name) for name, _ in batch], exact=True))
    assert answers[0] == answers[1]
    # … and it is the likeliest ones of all: written out.
    ranked = sorted(levels, reverse=True)
    kept = set(ranked[: min(budget, max(11, max(0, fill - 6)))])
    assert answers[0] == {name: sum(byte in kept for byte in draft) for name, draft in reports}


def test_a_request_that_is_gone_is_forgotten() -> None:
    slots = Budget()
    slots.report({"a": (), "b": (0.5, 0.25)})
    assert slots.grant([request_of("a"), request_of("b")], exact=True) == {"a": 0, "b": 2}
    slots.requests.keep_only({"b": object()})
    assert slots.grant([request_of("a"), request_of("b")], exact=True) == {"a": K, "b": 2}


def test_the_requests_of_a_step_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is in time names them by the very list that the step's output has."""
    slots, requests = Budget(), [request_of("a"), request_of("b")]
    report = report_of({"a": (0.5,), "b": (0.5, 0.25)})
    req_ids = report.drafts[0].req_ids
    rows = slots.requests.rows_of(req_ids, requests)
    with monkeypatch.context() as patch:
        patch.setattr(slots.requests, "rows_of", lambda *_: pytest.fail("looked up again"))
        slots.requests.take(report, req_ids, rows)
    slots.requests.take(
        report_of({"b": (0.5,), "a": ()}), req_ids, rows
    )  # of other requests, or in another order
    assert slots.grant(requests, exact=True) == {"a": 0, "b": 1}

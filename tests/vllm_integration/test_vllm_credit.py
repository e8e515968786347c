"""What was accepted of a request corrects what it gets: the rule, the budget and the schedulers that run it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_fakes import report_of as report_for
from vllm_fakes import request_of

from vllm_integration.config.settings import Settings
from vllm_integration.scheduler import draft_budget as rule
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests
from vllm_integration.seams.install import Guard
from vllm_integration.wire.reports import survival_levels

K = 32
report_of = partial(report_for, K=K)


def promise(survival: list[float], slots: int) -> float:
    """As the docstring has it."""
    return max(sum(survival[:slots]), rule.LEAST * slots)


@given(
    st.lists(st.lists(st.integers(1, 255), min_size=1, max_size=K), min_size=1, max_size=5),
    st.floats(0, 2 * K),
)
def test_promises_and_what_a_credit_covers(drafts: list[list[int]], credit: float) -> None:
    levels = np.zeros((K, len(drafts)), dtype=np.uint8)
    for b, draft in enumerate(drafts):
        levels[: len(draft), b] = sorted(draft, reverse=True)
    has = np.float32(credit)
    covered = rule.covered(levels, np.full(len(drafts), has, dtype=np.float32))
    for b in range(len(drafts)):
        survival = [level / 255 for level in levels[:, b].tolist()]
        for slots in (0, 1, len(drafts[b]), K):
            found = rule.promised(levels[:, b : b + 1], np.array([slots]))
            assert found[0] == pytest.approx(promise(survival, slots), rel=1e-5, abs=1e-5)
        count = int(covered[b])
        assert promise(survival, count) <= has + 1e-3
        # The next one is not covered, if there is one.
        assert count == K or promise(survival, count + 1) > has - 1e-3


def test_a_step_gives_back_a_share_of_what_is_free() -> None:
    none = np.zeros(2, dtype=np.float32)
    assert rule.refilled(none, -100, 300).tolist() == pytest.approx([rule.REFILL] * 2)
    assert rule.refilled(none, 64, 64)[0] == pytest.approx(rule.REFILL + rule.REFILL_OF_FREE)
    assert rule.refilled(none, 127, 1)[0] == 1


class Batch:
    """Requests that draft and verify side by side. late: 1 in asynchronous scheduling."""

    def __init__(self, size: int, late: int = 0, free_tokens: int = 128, **more: Any) -> None:
        self.requests = DraftedRequests(False, K)
        self.budget = DraftBudget(self.requests, K, 100_000, free_tokens=free_tokens, **more)
        self.late = late
        self.running = [request_of(str(i), max_tokens=10**9) for i in range(size)]
        self.rows = self.requests.rows_of([r.request_id for r in self.running], self.running)
        self.under_way: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def step(self, survival: list[float], accepted: int) -> list[int]:
        """Slots of a step in which every request has a draft of these survivals, `accepted` of them right."""
        if len(self.under_way) > self.late:
            slots, right = self.under_way.pop(0)
            self.budget.settle(self.rows, slots, right + 1)
        drafts = {request.request_id: tuple(survival) for request in self.running}
        self.requests.take(report_of(drafts, age=self.late))
        slots = np.array(self.budget.grant(self.running, exact=not self.late))
        self.under_way.append((slots, np.minimum(slots, accepted)))
        return [int(n) for n in slots]

    def credit(self) -> list[float]:
        return [float(n) for n in self.requests.table["credit"][self.rows]]


SURE = [0.999**k for k in range(1, K + 1)]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("survival", [SURE, [0.6, 0.3, 0.1], [0.02] * K], ids=["sure", "likely", "hardly"])
@pytest.mark.parametrize("size", [1, 64, 200])
def test_a_request_whose_drafts_are_all_rejected_soon_gets_no_more(
    size: int, survival: list[float], late: int
) -> None:
    """An adversary that fools the drafter at every step: all of its slots are counted."""
    batch, steps = Batch(size, late), 150
    slots = [sum(batch.step(survival, accepted=0)) for _ in range(steps)]
    free = max(0, 128 - size)
    refill = min(rule.REFILL + rule.REFILL_OF_FREE * free / size, 1)
    # A new request's first drafts may pass its credit where there is room; in the worst case a slot costs LEAST.
    assert sum(slots) <= size * (min(K, free) * (1 + late) + (rule.START + refill * steps) / rule.LEAST)
    # And in a batch that leaves nothing free, the first four tokens are nearly all.
    if not free:
        assert sum(slots) <= size * (rule.START + refill * steps) / 0.9
        assert sum(slots[20:]) <= size * (refill * steps + 1)


def test_an_adversary_who_first_earns_loses_it_once() -> None:
    batch = Batch(130)
    for _ in range(20):
        batch.step(SURE, accepted=K)
    # Nearly the most; what the drafts of the last step promised is back when they are accepted.
    assert min(batch.credit()) >= K
    rejected = [sum(batch.step(SURE, accepted=0)) for _ in range(100)]
    assert sum(rejected) <= 130 * (2 * K + 1) / 0.9
    assert sum(rejected[10:]) <= 130
    # It is given a try now and then, and comes back as fast as it earns.
    tries = 0
    while sum(batch.step(SURE, accepted=K)) == 0:
        tries += 1
        assert tries <= 2 / rule.REFILL
    for _ in range(8):
        slots = batch.step(SURE, accepted=K)
    assert min(slots) == K


@pytest.mark.parametrize("late", [0, 1])
def test_drafts_that_are_accepted_are_never_held_back_for_long(late: int) -> None:
    batch = Batch(256, late)
    slots = [min(batch.step(SURE, accepted=K)) for _ in range(12)]
    assert slots[0] == 4
    assert slots[6:] == [K] * 6, slots
    # Where there is room a draft is whole from the first step on.
    assert [Batch(2, late).step(SURE, accepted=K) for _ in range(3)] == [[K, K]] * 3


def test_confidences_that_are_right_cost_nothing() -> None:
    """Drafts that are accepted as often as they promise, in a batch without free slots and in one with many."""
    rng = np.random.default_rng(0)
    survival = [0.97**k for k in range(1, K + 1)]
    for size, free in ((20, 0), (4, 128)):
        learns, plain = Batch(size, free_tokens=free), Batch(size, free_tokens=free, learns=False)
        total = np.zeros(2, dtype=np.int64)
        for _ in range(100):
            right = int(np.append(rng.random(K) > 0.97, True).argmax())
            total += [sum(learns.step(survival, right)), sum(plain.step(survival, right))]
        assert total[0] >= 0.98 * total[1]


def test_what_nobody_promised_costs_nothing() -> None:
    """Before the first report all slots are filled as far as there is room."""
    batch = Batch(2)
    for _ in range(3):
        assert batch.budget.grant(batch.running, exact=False) == [K, K]
        assert batch.credit() == pytest.approx([rule.START] * 2, abs=3)
        assert min(batch.credit()) >= rule.START


def test_requests_do_not_pay_for_each_other_and_a_new_one_begins_anew() -> None:
    batch = Batch(2, free_tokens=0)
    for _ in range(5):
        batch.requests.take(report_of({"0": tuple(SURE), "1": tuple(SURE)}))
        slots = np.array(batch.budget.grant(batch.running, exact=True))
        batch.budget.settle(batch.rows, slots, np.array([1, slots[1] + 1]))
    assert slots.tolist() == [0, K]
    batch.requests.keep_only({"1": object()})
    assert batch.requests.rows_of(["new"], [request_of("new")]).tolist() == [batch.rows[0]]
    assert batch.credit()[0] == rule.START


def test_a_plain_request_in_the_same_step_stays_plain() -> None:
    requests = DraftedRequests(False, K)
    budget = DraftBudget(requests, K, 100)
    running = [request_of("plain", predicted=False), request_of("a")]
    rows = requests.rows_of(["plain", "a"], running)
    for _ in range(3):
        requests.take(report_of({"a": (0.99,)}))
        assert budget.grant(running, exact=True) == [0, 1]
        budget.settle(rows, np.array([0, 1]), np.array([1, 2]))


def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A synchronous scheduler with one request, and no more of vLLM than its two calls."""
    sync = pytest.importorskip("vllm.v1.core.sched.scheduler")
    module = pytest.importorskip("vllm_integration.scheduler.schedulers")
    made = object.__new__(module.PredictedOutputsScheduler)
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
    )
    request = request_of("a")
    request.num_tokens, request.spec_token_ids = 10, []
    made.running, made.requests, made.guard, made._scored = (
        [request],
        {"a": request},
        Guard("any more"),
        set(),
    )
    made._use(Settings(fill_tokens=0, max_draft_tokens=1000))
    monkeypatch.setattr(sync.Scheduler, "update_from_output", lambda *_: {})

    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        for each in self.running:
            each.spec_token_ids = [-1] * K

    monkeypatch.setattr(sync.Scheduler, "update_draft_token_ids", update_draft_token_ids)
    return made


def engine_step(scheduler: Any, accepted: int) -> int:
    """The slots after a step that verified those there are, and accepted so many."""
    from vllm_integration.wire import reports

    (request,) = scheduler.running
    slots = len(request.spec_token_ids)
    plan = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [-1] * slots} if slots else {}, num_invalid_spec_tokens=None
    )
    tokens = [[5] * (min(slots, accepted) + 1)]
    output = SimpleNamespace(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=tokens)
    reports.attach(output, report_of({"a": tuple(SURE)}))
    scheduler.update_from_output(plan, output)
    scheduler.update_draft_token_ids(None)
    return len(request.spec_token_ids)


def test_the_scheduler_learns_from_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    follows, refuses = scheduler(monkeypatch), scheduler(monkeypatch)
    assert [engine_step(follows, K) for _ in range(6)][-1] == K
    assert [engine_step(refuses, 0) for _ in range(6)][1:] == [0] * 5


def test_where_nothing_is_counted_any_more_nothing_is_corrected(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    refuses = scheduler(monkeypatch)
    engine_step(refuses, 0)
    monkeypatch.setattr(refuses.ledger, "begin", lambda *_: 1 / 0)
    assert engine_step(refuses, 0) == K
    assert len(plugin_log) == 1


def test_levels_of_the_longest_draft_fit() -> None:
    """256 drafts of the highest level, which is where 16 bits end."""
    levels = survival_levels(np.ones((1, 256)), np.array([256])).T.copy()
    assert rule.promised(levels, np.array([256])).tolist() == [256]
    assert rule.covered(levels, np.array([255.5, 512], dtype=np.float32)[:1]).tolist() == [255]
    assert rule.covered(levels, np.array([512], dtype=np.float32)).tolist() == [256]

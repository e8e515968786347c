"""What `step_time` times: each interval has steps of the kind that its case names, each of them a next step."""

from __future__ import annotations

import pytest

from benchmarks.alignment.device_time import Clock, record
from benchmarks.gpu.step_time import CASES, Case, StepBatch
from gpu_align.ops.align import GLOBAL_EVERY
from gpu_align.ops.layout import IN_SYNC, SEEN

NUM_TEXT = 1024


def lengths(
    batch: StepBatch, num_intervals: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[tuple[int, int]]]:
    """``(tokens seen before, tokens now)`` of the first request in each step of each interval."""
    seen = batch.drafter._state.align_state[0]
    steps: list[tuple[int, int]] = []
    propose = batch.propose
    monkeypatch.setattr(
        batch, "propose", lambda: (steps.append((int(seen[SEEN]), int(batch.total_len[0]))), propose())[1]
    )
    work = record(batch.works()[0], "cpu")
    found = []
    for _ in range(num_intervals):
        batch.before()
        steps.clear()
        work()
        batch.after()
        found.append(list(steps))
        batch.check()
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_step_is_the_next_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = StepBatch(case, 2, NUM_TEXT, "cpu")
    # As many as take the requests back to the beginning, twice.
    num_intervals = 2 * (NUM_TEXT // 2 // (case.steps * case.step_tokens + case.skip) + 1)
    for steps in lengths(batch, min(num_intervals, 150), monkeypatch):
        assert len(steps) == case.steps
        for seen, total in steps:
            assert seen == (-1 if case.restart else total - case.step_tokens)
        if case.text == "lost":
            is_far = [total % GLOBAL_EVERY == 0 for _, total in steps]
            assert set(is_far) == {"far" in case.name}
    in_sync = batch.drafter._state.align_state[:, IN_SYNC].tolist()
    assert in_sync == [int(case.text in ("aligned", "prompt"))] * 2


def test_wrong_drafts_are_not_timed() -> None:
    batch = StepBatch(CASES[0], 1, NUM_TEXT, "cpu")
    batch.draft.token_ids[0, 0] += 1
    with pytest.raises(AssertionError, match="token_ids"):
        batch.check()


def test_an_interval_on_an_idle_gpu_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock("cpu"), []
    answers = iter([None, 1.0, 7.0, 3.0, 8.0, None, 9.0, 5.0] + [9.0, 5.0] * 9)
    monkeypatch.setattr(clock, "interval", lambda work: next(answers))
    times, floors = clock.compare(lambda: None, lambda: None, lambda: calls.append(1), 2, warm_up=1)
    assert (times, floors) == ([9.0, 9.0], [5.0, 5.0])
    assert len(calls) == 5
    monkeypatch.setattr(clock, "interval", lambda work: None)
    with pytest.raises(RuntimeError, match="enqueues too slowly"):
        clock.compare(lambda: None, lambda: None, lambda: None, 2)

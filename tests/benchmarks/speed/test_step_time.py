"""What `step_time` times: each interval has steps of the kind that its case names, each of them a next step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.speed import step_time
from benchmarks.speed.device_time import Clock, per_step, record
from benchmarks.speed.lcs_time import DRY_CASES, LcsCase, LcsTimer
from benchmarks.speed.result_file import SkipError
from benchmarks.speed.step_time import CASES, Case, StepBatch
from gpu_align.ops.constants import GLOBAL_EVERY, IN_SYNC, SEEN

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


def test_a_long_own_match_is_long() -> None:
    case = next(case for case in CASES if case.text == "repeats")
    batch = StepBatch(case, 1, NUM_TEXT, "cpu")
    period = NUM_TEXT // 8
    tail = batch.token_ids[0, batch.written - 64 : batch.written]
    assert torch.equal(tail, batch.token_ids[0, batch.written - 64 - period : batch.written - period])
    assert batch.draft.source.tolist() == [2]


def test_a_floor_leaves_the_requests_alone() -> None:
    batch = StepBatch(CASES[0], 1, NUM_TEXT, "cpu")
    record(batch.works()[1], "cpu")()
    assert int(batch.total_len[0]) == batch.written
    batch.check()


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


def test_the_gpu_is_busy_when_the_start_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the device: the order of the calls, and what a start event that was reached costs."""
    calls: list[str] = []
    reached = [False]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            return reached[0]

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 0.01

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("spin"))
    clock = Clock("cuda")
    assert clock.interval(lambda: calls.append("work")) == 10
    assert calls == ["synchronize", "spin", "record", "work", "record", "wait"]
    reached[0], cycles = True, clock.spin_cycles
    assert clock.interval(lambda: None) is None
    assert (clock.num_late, clock.spin_cycles) == (1, 2 * cycles)


def test_the_floor_is_subtracted() -> None:
    found = per_step([50.0, 52.0, 54.0], [10.0, 12.0, 14.0], 4)
    assert found == {"us": 10.0, "iqr_us": 2.0, "floor_us": 12.0}


def test_rows_come_in_order_of_value() -> None:
    names = [size.name for size in step_time.sizes(dry_run=False)]
    assert len(names) == len(set(names)) == len(CASES) * 4
    assert names[0] == "aligned, 1 new token, batch 1"
    assert names.index("lost, 1 new token, far resync, batch 1024") < names.index(
        "aligned, 17 new tokens, batch 1"
    )


def test_a_large_lcs_is_left_out() -> None:
    timer = LcsTimer("cpu")
    row = timer.measure(DRY_CASES[0])
    assert row["us"] > 0
    timer.rate = 1e9
    with pytest.raises(SkipError, match="the limit is 8 s"):
        timer.measure(LcsCase(1, 65_536))


@pytest.mark.vllm
def test_vllm_drafts_on_the_same_tensors() -> None:
    pytest.importorskip("vllm")
    what = "'vLLM V1 n-gram, torch operations', 2, 256, 1, 'cpu'"
    code = f"from benchmarks.speed.ngram_time import measure; print(measure({what}))"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "'us'" in done.stdout, done.stderr[-2000:]

"""How a step's drafts reach the scheduler: what is reported when; and what runs after what on CUDA, whose streams
here only note it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu_align.engine import Event, Stream, Streams
from vllm_integration.wire import reports
from vllm_integration.wire.reports import DraftReport, survival_levels
from vllm_integration.worker import draft_reporter
from vllm_integration.worker.draft_reporter import DraftReporter, StepCopies

K = 16


class Device(Streams):
    """A CUDA device, and what is copied on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        zeros, copy = torch.zeros, StepCopies.copy
        monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)

        def noted(copies: StepCopies, size: int, **tensors: torch.Tensor) -> None:
            for name in tensors:
                self.run(f"{name} {copies.step}")
            copy(copies, size, **tensors)

        monkeypatch.setattr(StepCopies, "copy", noted)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def copy_step(
    reporter: DraftReporter, lengths: list[int], confidence: float, device: Device | None = None, **more: Any
) -> None:
    """An engine's step, which writes its own tensors, runs the drafter, and copies. Request i is in row i and has
    10 + i tokens."""
    if device:
        device.run(f"engine {reporter.step + 1}")
    reporter.begin_step()
    if device:
        device.run(f"drafter {reporter.step}")
    rows = np.arange(len(lengths))
    length = torch.tensor(lengths, dtype=torch.int32)
    valid = torch.arange(K) < length[:, None]
    draft = SimpleNamespace(length=length, confidence=valid * confidence, source=(length > 0).to(torch.int8))
    total_len = torch.arange(10, 14, dtype=torch.int32)
    reporter.copy([f"r{i}" for i in rows], rows, draft, total_len, **more)


def step(reporter: DraftReporter, lengths: list[int], confidence: float, **more: Any) -> DraftReport:
    """Run one step and return the draft report of its output."""
    output = SimpleNamespace()
    copy_step(reporter, lengths, confidence, **more)
    draft_reporter.when_it_leaves(output, lambda left: reports.attach(left, reporter.report(reporter.step)))
    return reports.take(output) or DraftReport()


def test_lengths_and_survival_arrive() -> None:
    (drafts,) = step(DraftReporter(4, K, torch.device("cpu")), [2, 0, 3], 0.5).drafts
    assert (drafts.req_ids, drafts.age) == (["r0", "r1", "r2"], 0)
    assert drafts.position.tolist() == [10, 11, 12]
    assert drafts.length.tolist() == [2, 0, 3]
    assert drafts.source.tolist() == [1, 0, 1]
    assert drafts.survival[:, :4].tolist() == [[127, 63, 0, 0], [0, 0, 0, 0], [127, 63, 31, 0]]


def test_survival_is_rounded_down_and_every_draft_reporter() -> None:
    """A draft of no confidence is a draft; garbage behind a row's length is left out."""
    survival = np.array([[1.0, 0.9999, 0.5, 0.003], [0.8, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    length = np.array([4, 2, 0])
    expected = [[255, 254, 127, 1], [204, 1, 0, 0], [0, 0, 0, 0]]
    assert survival_levels(survival, length).tolist() == expected
    assert survival_levels(survival.astype(np.float32), length).tolist() == expected
    assert survival_levels(np.zeros((0, 4)), length[:0]).shape == (0, 4)


def test_late_copies_are_never_waited_for_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: set[int] = set()
    monkeypatch.setattr(StepCopies, "arrived", lambda self, wait: self.step in arrived)
    reporter = DraftReporter(4, K, torch.device("cpu"), batches_in_flight=1)
    assert [list(step(reporter, [length], 1.0).drafts) for length in range(1, 7)] == [[]] * 6
    arrived.update(range(1, 10))
    # Four buffers: the copies of steps 5 and 6 were not started, and step 7 takes the oldest one's.
    reported = step(reporter, [9], 1.0).drafts
    assert [(d.length.tolist(), d.age) for d in reported] == [([2], 5), ([3], 4), ([4], 3), ([9], 0)]
    (last,) = step(reporter, [7], 1.0).drafts
    assert (last.length.tolist(), last.age, last.survival[0].tolist()) == ([7], 0, [255] * 7 + [0] * 9)


def test_slots_that_the_device_trimmed_are_told_with_the_step_itself() -> None:
    reporter = DraftReporter(4, K, torch.device("cpu"))
    ends = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    assert step(reporter, [2, 6, 3], 0.5, query_ends=ends).trimmed == {"r0": 0, "r1": 2, "r2": 0}


def test_a_step_without_drafts_reports_nothing() -> None:
    reporter = DraftReporter(4, K, torch.device("cpu"))
    reporter.plain_graphs_alone = True
    step(reporter, [3], 1.0)
    output = SimpleNamespace()
    reporter.begin_step()
    draft_reporter.when_it_leaves(output, lambda left: reports.attach(left, reporter.report(reporter.step)))
    assert reports.take(output) is None
    assert not vars(output)
    reports.attach(None, reporter.report(reporter.step))


OURS, ENGINES = ("length", "source", "confidence"), ("total_len", "query_ends")
ENDS = torch.tensor([0, 1], dtype=torch.int32)


def test_the_engine_goes_on_without_the_copies_and_overwrites_nothing_that_they_read(device: Device) -> None:
    reporter = DraftReporter(4, K, torch.device("cuda"))
    for _ in range(3):
        copy_step(reporter, [1], 1.0, device, query_ends=ENDS)
    for number in range(1, 4):
        for name in OURS:
            assert f"drafter {number}" in device.before[f"{name} {number}"]
        for name in ENGINES:
            assert f"engine {number}" in device.before[f"{name} {number}"]
    for number in range(1, 3):
        assert {f"{name} {number}" for name in ENGINES} <= device.before[f"engine {number + 1}"]
        assert not {f"{name} {number}" for name in OURS} & device.before[f"engine {number + 1}"]
        assert {f"{name} {number}" for name in OURS} <= device.before[f"drafter {number + 1}"]
    assert device.current is device.engine


@pytest.mark.parametrize("ends", [{}, {"query_ends": ENDS}], ids=["", "trims"])
def test_the_host_reads_what_all_copies_of_a_step_have_written(device: Device, ends: dict[str, Any]) -> None:
    reporter = DraftReporter(4, K, torch.device("cuda"))
    copy_step(reporter, [1], 1.0, device, **ends)
    (copies,) = reporter.in_flight
    assert {f"{name} 1" for name in (*OURS, "total_len", *ends)} <= copies.event.before

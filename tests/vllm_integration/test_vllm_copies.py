"""The copies of a step's drafts on CUDA: what runs after what, on streams that only note it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.gpu_align.engine import Event, Stream, Streams
from vllm_integration.worker.draft_reporter import DraftReporter, StepCopies

K = 16


class Device(Streams):
    """A CUDA device, and an engine's steps on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.names: dict[int, str] = {}
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        copy = StepCopies.copy

        def noted(step: StepCopies, size: int, **tensors: torch.Tensor | None) -> None:
            for tensor in tensors.values():
                if tensor is not None:
                    self.run(self.names[id(tensor)])
            copy(step, size, **tensors)

        monkeypatch.setattr(StepCopies, "copy", noted)

    def step(self, reporter: DraftReporter, number: int, *, drafts: bool = True, trims: bool = False) -> None:
        """An engine's step: it writes its own tensors and runs the drafter. Its things are named by its number."""
        tensors = {
            "length": torch.tensor([number]),
            "source": torch.ones(1),
            "confidence": torch.ones((1, K)),
            "total_len": torch.tensor([10 * number]),
            "query_ends": torch.tensor([0, number]),
        }
        self.names |= {id(tensor): f"{name} {number}" for name, tensor in tensors.items()}
        self.run(f"engine {number}")
        reporter.begin_step()
        if drafts:
            self.run(f"drafter {number}")
            total_len, query_ends = tensors.pop("total_len"), tensors.pop("query_ends")
            draft = SimpleNamespace(**tensors)
            reporter.copy(["r"], np.array([0]), draft, total_len, query_ends if trims else None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def reporter_of(device: Device) -> DraftReporter:
    return DraftReporter(1, K, torch.device("cuda"))


OURS, ENGINES = ("length", "source", "confidence"), ("total_len", "query_ends")


def test_the_engine_goes_on_without_the_copies_and_overwrites_nothing_that_they_read(device: Device) -> None:
    reporter = reporter_of(device)
    for number in range(1, 4):
        device.step(reporter, number, trims=True)
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


@pytest.mark.parametrize("trims", [False, True])
def test_the_host_reads_what_all_copies_of_a_step_have_written(device: Device, trims: bool) -> None:
    reporter = reporter_of(device)
    device.step(reporter, 1, trims=trims)
    (copies,) = reporter.in_flight
    assert {f"{name} 1" for name in (*OURS, *(ENGINES if trims else ENGINES[:1]))} <= copies.event.before

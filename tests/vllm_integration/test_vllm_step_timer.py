"""The time of each step: which steps have one, and that nothing waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_integration.seams import guard
from vllm_integration.wire.reports import StepTime
from vllm_integration.worker import step_timer
from vllm_integration.worker.step_timer import MOST, SELDOM, StepTimer


class Device:
    """A CUDA device that has got as far as `now`; its events are noted in the order in which it comes to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded, self.now, self.events = 0, 0, 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))


class Event:
    def __init__(self, device: Device) -> None:
        device.events += 1
        self.device, self.at = device, 10**9

    def record(self) -> None:
        self.device.recorded += 1
        self.at = self.device.recorded

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: Event) -> float:
        return 5.0 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(guard, "_faults", {})
    monkeypatch.setattr(step_timer, "install", lambda group: "")
    return Device(monkeypatch)


def plan_of(*tokens: int) -> Any:
    """A step of requests that have so many tokens in it."""
    return SimpleNamespace(total_num_scheduled_tokens=sum(tokens))


def runner_of(in_graph: bool, tokens: int, requests: int) -> Any:
    """A V2 runner that has run such a step."""
    return SimpleNamespace(step_timing=SimpleNamespace(_batch=(in_graph, tokens, requests)))


V1 = SimpleNamespace()


def test_a_time_comes_once_its_step_has_ended_and_no_sooner(device: Device) -> None:
    timer = StepTimer("cuda")
    timer.begin(plan_of(1, 4, 2))
    timer.end(runner_of(True, 6, 3))  # the device has trimmed a draft
    timer.begin(plan_of(30, 1))
    timer.end(runner_of(False, 31, 2))
    assert not timer.take()
    device.now = 2
    assert timer.take() == [StepTime(5.0, 6, True)]
    assert not timer.take()
    device.now = 4
    assert timer.take() == [StepTime(5.0, 31, False)]
    assert device.events == 2 * MOST


def test_the_clock_of_the_host_times_steps_of_v1(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 10.25))
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(clock))
    timer = StepTimer("cpu")
    timer.begin(plan_of(3, 5))
    timer.end(V1)
    assert timer.take() == [StepTime(250.0, 8, False)]
    assert device.events == 0


@pytest.mark.parametrize(
    ("calls", "tokens"),
    [
        ("be", [1]),
        ("e", []),
        ("bbe", [2]),
        ("bebe", [1, 2]),
        ("beeb", [1]),
        ("bibe", [3]),  # an empty batch, then a step without requests, then a step
        ("bie", []),
        ("be" * (MOST + 3), [*range(4, MOST + 4)]),
        ("b" * 3 * MOST + "e", [3 * MOST]),
    ],
)
def test_which_steps_have_a_time(calls: str, tokens: list[int], device: Device) -> None:
    """b: a step begins, i: one without drafted requests, e: the last one has sampled. Step n has n tokens; the
    device is done with each at once, and no output takes the times along until the end."""
    timer, step, device.now = StepTimer("cuda"), 0, 10**6
    for call in calls:
        step += call in "bi"
        if call == "e":
            timer.end(V1)
        else:
            timer.begin(plan_of(*[1] * step), idle=call == "i")
    assert [time.tokens for time in timer.take()] == tokens
    assert device.events == 2 * MOST
    assert guard.faults() == {}


def test_a_device_that_is_far_behind_is_not_waited_for(device: Device) -> None:
    timer = StepTimer("cuda")
    for _ in range(2 * MOST):
        timer.begin(plan_of(1))
        timer.end(V1)
    assert device.recorded == 2 * MOST
    assert not timer.take()
    device.now = device.recorded
    assert len(timer.take()) == MOST


def test_few_steps_are_timed_where_nobody_is_drafted_for(device: Device) -> None:
    timer, device.now = StepTimer("cuda"), 10**6
    times = 0
    for _ in range(4 * SELDOM):
        timer.begin(plan_of(1), idle=True)
        timer.end(V1)
        times += len(timer.take())
    assert times == 4


@pytest.mark.parametrize("method", ["record", "query", "elapsed_time"])
def test_a_timer_that_raises_ends_the_timing_alone(
    method: str, device: Device, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    monkeypatch.setattr(Event, method, lambda *_: [].index(1))
    timer, device.now = StepTimer("cuda"), 10**6
    for _ in range(3):
        timer.begin(plan_of(1))
        timer.end(V1)
        assert not timer.take()
    assert list(guard.faults()) == ["step times"]
    (line,) = [line for line in plugin_log if "step times" in line]
    assert line.startswith("gpu_align measures no step times any more: ValueError at ")


@pytest.mark.parametrize(
    ("given", "stages", "missing", "reason"),
    [
        ("cuda", 2, "", "pipeline stages see a part of each step"),
        ("cpu", 4, "", "pipeline stages see a part of each step"),
        ("xpu", 1, "", "no events on xpu"),
        ("cuda", 1, "a name", "a name"),
    ],
)
def test_where_no_step_can_be_timed_the_reason_is_told(
    given: str,
    stages: int,
    missing: str,
    reason: str,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
) -> None:
    monkeypatch.delenv("_GPU_ALIGN_TOLD", raising=False)
    monkeypatch.setattr(step_timer, "install", lambda group: missing)
    for _ in range(2):
        timer = StepTimer(given, stages)
        timer.begin(plan_of(1))
        timer.end(V1)
        assert not timer.take()
    assert guard.faults() == {"step times": reason}
    assert plugin_log == ([] if missing else [f"gpu_align measures no step times: {reason}"])

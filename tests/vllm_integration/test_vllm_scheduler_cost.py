"""How much the interpreter does for each request in a step of the scheduler's additions: no clock is read."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import vllm_integration.scheduler as scheduler
from vllm_integration.wire import steps as wire_steps

scheduler_cost = pytest.importorskip("benchmarks.speed.scheduler_cost")


def instructions(batch: int, steps: int) -> int:
    """Bytecode instructions of `scheduler` and `wire.steps` that the interpreter runs in the benchmark's steps."""
    measured = (*scheduler.__path__, wire_steps.__file__)
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "call" and not frame.f_code.co_filename.startswith(measured):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        scheduler_cost.measure(batch, 4, steps - scheduler_cost.WARM_UP)
    finally:
        sys.settrace(before)
    return count


def test_a_request_costs_few_instructions() -> None:
    """All else is work on columns of a batch. For a request it is left to read its id and its tokens from vLLM's
    objects, and to set its message on vLLM's output. (Loops over numbers and objects took 144.)"""
    per_step = [instructions(batch, 12) - instructions(batch, 11) for batch in (40, 80)]
    assert (per_step[1] - per_step[0]) / 40 < 60

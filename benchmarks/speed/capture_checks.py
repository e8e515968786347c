"""Checks of a step on a GPU that need no pytest: drafts, no wait, no allocation, a graph with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import gpu_align
from benchmarks.speed.device_time import record
from benchmarks.speed.step_time import CASES, Case, StepBatch

Check = Callable[[], dict[str, Any]]


def checks(device: str, dry_run: bool) -> Iterator[tuple[str, Check]]:
    """Name and check of each row: every case of `step_cases`, then what a step must not do."""
    batch, num_text = (1, 256) if dry_run else (5, 1000)
    cases = [replace(CASES[1], steps=2), CASES[3]] if dry_run else CASES
    for case in cases:
        make = partial(_make, case, batch, num_text, device)
        yield f"graph and eager step: {case.name}", partial(same_bits, make)
    make = partial(_make, cases[0], batch, num_text, device)
    yield "no wait: sync debug mode", partial(no_wait, make)
    yield "no allocation", partial(no_allocation, make)


def _make(case: Case, batch: int, num_text: int, device: str) -> StepBatch:
    """On the CPU the kernel runs under Triton's interpreter."""
    return StepBatch(case, batch, num_text, device, backend="auto" if device == "cuda" else "triton")


def same_bits(make: Callable[[], StepBatch]) -> dict[str, Any]:
    """After each of 3 replays a recorded step has the drafts of an eager one, and both those of the reference."""
    recorded, eager = make(), make()
    recorded.check()
    replay = record(recorded.works()[0], recorded.device)
    intervals = 3 if recorded.device == "cuda" else 1
    for _ in range(intervals):
        for batch in (recorded, eager):
            batch.before()
        replay()
        for work in eager.works()[0]:
            work()
        for batch in (recorded, eager):
            batch.after()
        for name in gpu_align.Draft._fields:
            found, want = (getattr(batch.draft, name) for batch in (recorded, eager))
            assert torch.equal(found, want), f"{name}: the graph gave something else than the eager step"
        recorded.check()
    return {"replays": intervals, "steps": intervals * recorded.case.steps}


def no_wait(make: Callable[[], StepBatch]) -> dict[str, Any]:
    """PyTorch raises where an eager step waits for the device."""
    batch = make()
    if batch.device != "cuda":
        batch.step()
        return {"remark": "on a GPU only"}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {}


def no_allocation(make: Callable[[], StepBatch]) -> dict[str, Any]:
    """The allocator is not asked for anything during an eager step."""
    batch = make()
    if batch.device != "cuda":
        batch.step()
        return {"remark": "on a GPU only"}

    def allocations() -> int:
        return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))

    before = allocations()
    for _ in range(3):
        batch.step()
    assert allocations() == before, f"{allocations() - before} allocations in 3 steps"
    return {"allocations": 0}

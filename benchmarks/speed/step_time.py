"""Time of one drafting step: ``python -m benchmarks.speed.step_time [--json OUT.json]``.

On a GPU: device time of a step in a CUDA graph, in which each step is a genuine next step (`step_cases`), without
the host's launch (`device_time`), for the situations of `step_cases.CASES`. A row has

    us, iqr_us     a step whose data is in the L2 cache: median, and interquartile range
    floor_us       the interval of the same graph without its steps, which was subtracted
    cold_us        a step after the L2 cache was overwritten, as a model's forward pass does; cold_iqr_us
    host_us        an eager call as the host sees it

Without a GPU: the reference on the CPU, small sizes only; it shows that the command works and times nothing.
Correctness first: a batch whose drafts differ from the reference, before or after the replays, is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed import result_file
from benchmarks.speed.device_time import Clock, per_step, record
from benchmarks.speed.step_cases import CASES, Case, StepBatch, flush

BATCHES, NUM_TEXT, REPEATS = (1, 64, 256, 1024), 32_768, 40
DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS = (1, 2), 1024, 2


class Size(NamedTuple):
    """What one row measures."""

    case: Case
    batch: int
    num_text: int
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, batch {self.batch}"


def sizes(dry_run: bool) -> Iterator[Size]:
    """Every row, the most valuable ones first."""
    batches, num_text, repeats = (
        (DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS) if dry_run else (BATCHES, NUM_TEXT, REPEATS)
    )
    for first in (True, False):
        for batch in batches:
            for case in CASES:
                if case.first == first:
                    yield Size(case, batch, num_text, repeats)


def time_steps(batch: StepBatch, repeats: int, between: Callable[[], object] | None = None) -> dict[str, Any]:
    """What `per_step` says of this batch; its drafts after the last interval are checked.

    Raises:
        AssertionError: they are not the reference's.
    """
    work, floor = (record(calls, batch.device) for calls in batch.works(between))

    def interval() -> None:
        work()
        batch.after()

    times, floors = Clock(batch.device).compare(interval, floor, batch.before, repeats)
    batch.check()
    return per_step(times, floors, batch.case.steps)


def time_host(batch: StepBatch, repeats: int) -> float:
    """Host microseconds of an eager call, the device left to run behind: the median."""
    times = []
    for _ in range(repeats):
        batch.before()
        start = time.perf_counter_ns()
        batch.step()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return round(statistics.median(times), 1)


def measure(size: Size, device: str) -> dict[str, Any]:
    """One row.

    Raises:
        AssertionError: drafts are not the reference's.
    """
    case = size.case
    batch = StepBatch(case, size.batch, size.num_text, device)
    batch.check()
    row: dict[str, Any] = {
        "batch": size.batch, "prediction_len": size.num_text, "case": case.name,
        "new_tokens": case.step_tokens, "steps": case.steps, "intervals": size.repeats, "device": device,
    }  # fmt: skip
    row |= time_steps(batch, size.repeats)
    between = flush(device)
    if between is not None:
        cold = time_steps(batch, size.repeats, between)
        row |= {"cold_us": cold["us"], "cold_iqr_us": cold["iqr_us"]}
    return row | {"host_us": time_host(batch, min(size.repeats, 20))}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cold = f"{row['cold_us']:9.2f}" if "cold_us" in row else f"{'-':>9}"
    return (
        f"{row['batch']:6} {row['case']:40} {row['us']:9.2f} {row['iqr_us']:8.2f} {row['floor_us']:9.2f} {cold} "
        f"{row['host_us']:9.1f}"
    )


HEAD = f"{'batch':>6} {'case':40} {'µs':>9} {'± IQR':>8} {'floor µs':>9} {'cold µs':>9} {'host µs':>9}"


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # typer may not be installed here
    parser.add_argument("--json", type=Path, help="write the numbers here as well, row by row")
    json_path = parser.parse_args().json
    gpu = torch.cuda.is_available()
    if not gpu:
        print("SKIPPED: GPU times (no GPU). The reference on the CPU, host microseconds:")
    rows: list[dict[str, Any]] = []
    wrong = 0
    print(HEAD)
    for size in sizes(dry_run=not gpu):
        try:
            rows.append(measure(size, "cuda" if gpu else "cpu"))
            print(line(rows[-1]), flush=True)
        except AssertionError as error:
            wrong += 1
            rows.append({"batch": size.batch, "case": size.case.name, "wrong": str(error)})
            print(f"{size.name} WRONG: {error}", flush=True)
        if json_path is not None:
            result_file.write_json(json_path, {"machine": result_file.machine_header(), "rows": rows})
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())

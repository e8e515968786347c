"""The stages of `gpu_check` that are no pytest runs: ``python -m benchmarks.speed.gpu_stages STAGE FILE``.

A stage is a list of rows, and each row has its own time limit. A row is written as ``started`` before it
begins. One that exceeds its limit is written as ``out of time`` by a second thread, which then ends the
process with `RESTART`; so does a row that leaves the device in an error state. `gpu_check` starts the stage
again, and the rows that the file holds already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed import result_file
from benchmarks.speed.result_file import (
    FAILED,
    MEASURED,
    OUT_OF_TIME,
    PASSED,
    REFUSED,
    RESTART,
    SKIPPED,
    STARTED,
    RefusedError,
    ResultFile,
    SkipError,
)


class Row(NamedTuple):
    """One measurement or check. `run` returns the row's fields; `verdict` is what it gets then."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]
    verdict: str = MEASURED


def capture_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.speed import capture_checks

    for name, check in capture_checks.checks(device, dry_run):
        yield Row(name, 40, check, PASSED)


def steps_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.speed import step_time

    for size in step_time.sizes(dry_run):
        yield Row(size.name, 60, partial(step_time.measure, size, device))


def lcs_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.speed import lcs_time

    timer = lcs_time.LcsTimer(device)
    for case in lcs_time.DRY_CASES if dry_run else lcs_time.CASES:
        yield Row(case.name, 30, partial(timer.measure, case))


def ngram_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.speed import ngram_time

    for name, run in ngram_time.rows(device, dry_run):
        yield Row(name, 60, run)


def sanitizer_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.speed import sanitizer

    for tool in sanitizer.TOOLS:
        yield Row(tool, sanitizer.SECONDS + 5, partial(sanitizer.check, tool, dry_run), PASSED)


def picture_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    def run() -> dict[str, Any]:
        from benchmarks.speed import plot
        from benchmarks.speed.compare import read_timings

        bench = out / "bench.json"
        if not bench.exists():
            raise SkipError("no benchmark was run")
        try:
            plot.draw(*read_timings(bench), out / "bench.png")
        except ModuleNotFoundError as error:
            raise SkipError(f"not installed: {error.name}") from error
        return {"path": str(out / "bench.png")}

    yield Row("bench.png", 30, run, PASSED)


STAGES = {
    "capture": capture_rows, "steps": steps_rows, "lcs": lcs_rows, "ngram": ngram_rows,
    "sanitizer": sanitizer_rows, "picture": picture_rows,
}  # fmt: skip


def run_rows(result: ResultFile, rows: Iterator[Row], deadline: float) -> int:
    """Run the rows that `result` does not hold yet. Returns the exit code: 1 if any row has failed."""
    for row in rows:
        if result.has(row.name):
            continue
        left = deadline - time.monotonic()
        if left < 1:
            result.row(row.name, OUT_OF_TIME, reason="no time left")
            continue
        limit = min(row.seconds, left)
        result.row(row.name, STARTED)
        watchdog = threading.Timer(limit, _give_up, (result, row.name, limit))
        watchdog.daemon = True
        watchdog.start()
        begin = time.monotonic()
        verdict, fields = _run_row(row)
        watchdog.cancel()
        seconds = round(time.monotonic() - begin, 2)
        result.row(row.name, verdict, **fields, seconds=seconds)
        print(f"    {verdict:12} {row.name} ({seconds} s) {_brief(fields)}", flush=True)
        if verdict == FAILED and not _device_works():
            os._exit(RESTART)
    return int(any(row["verdict"] == FAILED for row in result.rows))


def _run_row(row: Row) -> tuple[str, dict[str, Any]]:
    try:
        return row.verdict, row.run()
    except SkipError as error:
        return SKIPPED, {"reason": str(error)}
    except RefusedError as error:
        return REFUSED, {"reason": str(error)}
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            return SKIPPED, {"reason": f"out of device memory: {str(error)[:200]}"}
        return FAILED, {
            "reason": f"{type(error).__name__}: {error}"[:2000],
            "trace": traceback.format_exc()[-3000:],
        }


def _give_up(result: ResultFile, name: str, limit: float) -> None:
    result.row(name, OUT_OF_TIME, reason=f"more than {limit:.0f} s")
    print(f"    {OUT_OF_TIME:12} {name}: more than {limit:.0f} s", flush=True)
    os._exit(RESTART)


def _device_works() -> bool:
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _brief(fields: dict[str, Any]) -> str:
    names = "us", "iqr_us", "floor_us", "cold_us", "tcups", "reason"
    return " ".join(f"{name}={fields[name]}" for name in names if name in fields)[:200]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.gpu_stages")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("file", type=Path, help="the result file; its rows are not repeated")
    parser.add_argument("--seconds", type=float, default=600, help="time for all rows")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; times mean nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    header = json.loads(os.environ.get("GPU_CHECK_HEADER") or "{}") or result_file.machine_header()
    result = ResultFile(options.file, options.stage, header, options.dry_run)
    device = "cpu" if options.dry_run else "cuda"
    rows = STAGES[options.stage](device, options.dry_run, options.file.parent)
    code = run_rows(result, rows, deadline)
    result.set(status="done")
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""All checks and timings of a machine with a GPU, within 25 minutes: ``benchmarks/gpu/gpu_check.sh [STAGE …]``.

docs/developer/compiled-kernels.md has the stages. Each is a process of its own with a time limit, and all together
have one, which is that of a stage that is run alone. It writes ``OUT_DIR/<stage>.json`` after every row
(`result_file`), so that whatever happens to it leaves what it had. A stage that is no pytest run is a list of
rows. A row is written as ``started`` before it begins. One that exceeds its limit is written as ``out of time``
by a second thread, which then ends the process with `RESTART`; so does a row that leaves the device in an error
state. The stage is started again, without the rows that its file holds. ``OUT_DIR/gpu_check.json`` holds all
stages. At the end one table, and a list of what was not done and why.

Exit code 1: a check failed or was out of time. What was skipped or refused by a tool is named and is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import result_file
from benchmarks.gpu.result_file import (
    FAILED,
    KILLED,
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
)  # fmt: skip
from benchmarks.tables import write_json

#: Worker processes for the tests.
NUM_WORKERS = 8


class Row(NamedTuple):
    """One measurement or check. `run` returns the row's fields; `verdict` is what it gets then."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]
    verdict: str = MEASURED


Rows = Callable[[str, bool, Path], Iterator[Row]]


def rows_of(module: str, seconds: float, verdict: str = MEASURED, function: str = "rows") -> Rows:
    """Those of a module of this folder: a name, and what runs it."""

    def rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
        found = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        return (Row(name, seconds, run, verdict) for name, run in found(device, dry_run))

    return rows


def compile_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    import torch

    from benchmarks.compiled import machine_code

    target = os.environ.get("GPU_CHECK_TARGET", "sm_90")
    if torch.cuda.is_available():
        target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for name in ["index"] if dry_run else machine_code.CASES:
        yield Row(f"{target}: {name}", 240, partial(machine_code.compile_cases, target, name), PASSED)


def cases_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.compiled import machine_code

    for name, cases in machine_code.CASES.items():
        for i in range(1 if dry_run else len(cases)):
            seconds = 0 if dry_run else 15 if name == "step" else 3
            run = partial(machine_code.run_natively, name, i, seconds)
            yield Row(f"{name} {i}", 60, partial(beside_traffic, device, run), PASSED)
    yield Row("a second GPU", 30, second_gpu, PASSED)


def beside_traffic(device: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run`, while products of matrices follow each other on another stream."""
    import torch

    if device == "cpu":
        return run()
    is_done = threading.Event()

    def work() -> None:
        stream, matrix = torch.cuda.Stream(), torch.ones(2048, 2048, device=device)
        with torch.cuda.stream(stream):
            while not is_done.wait(0.001):
                matrix @ matrix

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return run()
    finally:
        is_done.set()
        thread.join()


def second_gpu() -> dict[str, Any]:
    """Steps on a GPU that is not the current one."""
    import torch

    from benchmarks.alignment.workload import Steps, make_texts

    if torch.cuda.device_count() < 2:
        raise SkipError("one GPU or none")
    steps = Steps(make_texts(5, 1000, "mixed"), "cuda:1")
    for _ in range(3):
        steps.advance()
        steps.check()
    return {"steps": 3}


def serve_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    from benchmarks.gpu import serve_check

    for mode in serve_check.MODES:
        yield Row(mode, 180, partial(serve_check.check, mode, out, device, 175))


def picture_rows(device: str, dry_run: bool, out: Path) -> Iterator[Row]:
    def run() -> dict[str, Any]:
        from benchmarks.alignment import plot

        suite = result_file.read(out / "suite.json")
        if not plot.panels(suite.get("rows", ())):
            raise SkipError("no benchmark was run")
        try:
            plot.draw(suite, out / "bench.png")
        except ModuleNotFoundError as error:
            raise SkipError(f"not installed: {error.name}") from error
        return {"path": str(out / "bench.png")}

    yield Row("bench.png", 30, run, PASSED)


class Stage(NamedTuple):
    """One stage. tests: what pytest gets; else rows: what there is to do. needs: packages it has to have.

    on_cpu: it needs no GPU, and compiles where Triton is not to interpret.
    """

    name: str
    seconds: float
    rows: Rows | None = None
    tests: tuple[str, ...] = ()
    dry_tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    on_cpu: bool = False


STAGES = (
    Stage("compile", 300, compile_rows, needs=("triton",), on_cpu=True),
    Stage(
        "kernels", 160,
        tests=("tests/gpu_align/ops", "tests/gpu_align/test_capture.py", "tests/gpu_align/test_drafter.py",
               "tests/gpu_align/test_drafter_input.py", "tests/gpu_align/test_drafter_predictions.py",
               "tests/gpu_align/test_arena.py", "tests/gpu_align/test_step_traffic.py",
               "tests/gpu_align/test_preparation.py", "tests/vllm_integration/test_vllm_speculator.py"),
        dry_tests=("tests/gpu_align/test_capture.py", "tests/gpu_align/ops/test_mirror.py",
                   "tests/gpu_align/test_arena.py", "-k", "capture or replay or signature or example"),
        needs=("pytest",),
    ),
    Stage(
        "warm_up", 90, tests=("tests/gpu_align/test_warm_up.py",),  # where nothing was compiled before
        dry_tests=("tests/gpu_align/test_warm_up.py", "-k", "changes_no_slot"), needs=("pytest",),
    ),
    Stage("cases", 180, cases_rows),
    Stage("capture", 60, rows_of("step_time", 40, PASSED, "capture_checks")),
    Stage("steps", 120, rows_of("step_time", 60)),
    Stage("lcs", 60, rows_of("lcs_time", 30)),
    Stage("ngram", 60, rows_of("ngram_time", 60)),
    Stage("sanitizer", 300, rows_of("sanitizer", 65, PASSED)),
    Stage("serve", 480, serve_rows, needs=("vllm",)),
    Stage(
        "suite", 120, tests=("benchmarks/alignment", "--benchmark-only"),
        dry_tests=("benchmarks/alignment", "--benchmark-only", "-k", "1-1024 or 1-17"),
        needs=("pytest", "pytest_benchmark"),
    ),
    Stage("picture", 30, picture_rows, needs=("matplotlib",)),
)  # fmt: skip


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def command_of(stage: Stage, out: Path, seconds: float, dry_run: bool) -> list[str]:
    """What runs a stage."""
    if not stage.tests:
        path = out / f"{stage.name}.json"
        command = [sys.executable, "-m", "benchmarks.gpu.gpu_check", stage.name, "--rows", str(path)]
        return [*command, "--budget", f"{seconds:.0f}", *["--dry-run"] * dry_run]
    # Plugins by name: an installed one that cannot be imported must not stop the others.
    names = ["benchmarks.gpu.rows_plugin"]
    workers: list[str] = []
    if stage.name == "suite":
        names.append("pytest_benchmark.plugin")
    elif is_installed("xdist") and not dry_run:
        names.append("xdist.plugin")
        # In the tests' own order a file takes as long as the slowest worker.
        workers = ["-n", str(NUM_WORKERS), "--dist", "worksteal"]
    if is_installed("_hypothesis_pytestplugin"):
        names.append("_hypothesis_pytestplugin")
    plugins = [word for name in names for word in ("-p", name)]
    tests = stage.dry_tests if dry_run else stage.tests
    quiet = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"]
    return [sys.executable, "-m", "pytest", *quiet, *plugins, *workers, *tests]


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


def run_stage(stage: Stage, path: Path, seconds: float, dry_run: bool) -> int:
    """Run a stage that is no pytest run, in this process."""
    deadline = time.monotonic() + seconds
    result = ResultFile(path, stage.name, result_file.machine_header(), dry_run)
    assert stage.rows is not None
    code = run_rows(result, stage.rows("cpu" if dry_run else "cuda", dry_run, path.parent), deadline)
    result.set(status="done")
    return code


ROOT = result_file.ROOT
#: Exit code of pytest: no test was selected.
NO_TESTS = 5
MAX_RESTARTS = 8
#: Seconds for everything.
BUDGET = 1500.0


class Check:
    """One run of some stages."""

    def __init__(self, out: Path, budget: float, dry_run: bool) -> None:
        self.out, self.dry_run = out, dry_run
        self.deadline = time.monotonic() + budget
        self.header = self._ask_header()
        self.child: subprocess.Popen[bytes] | None = None
        self.results: dict[str, dict[str, Any]] = {}

    def _ask_header(self) -> dict[str, Any]:
        """In a process of its own: importing torch may fail, and a GPU that hangs may not answer."""
        command = [sys.executable, "-m", "benchmarks.gpu.result_file"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
            header: dict[str, Any] = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            why = done.stderr[-500:] if isinstance(error, json.JSONDecodeError) else "no answer in 90 s"
            return {"gpu": "none", "error": why}
        return header

    def run(self, stage: Stage) -> None:
        """Run a stage to its end or its limit, and settle its file."""
        path = self.out / f"{stage.name}.json"
        path.unlink(missing_ok=True)
        result = ResultFile(path, stage.name, self.header, self.dry_run)
        begin = time.monotonic()
        why_not = self._why_not(stage)
        if why_not:
            result.set(status=why_not[0], reason=why_not[1])
        else:
            print(f"==> {stage.name}", flush=True)
            code, is_late = self._run_child(stage, path)
            self._settle(stage, path, code, is_late)
        found = result_file.read(path) | {"seconds": round(time.monotonic() - begin, 1)}
        write_json(path, found)
        self.results[stage.name] = found
        everything = {"header": self.header, "dry_run": self.dry_run, "stages": self.results}
        write_json(self.out / "gpu_check.json", everything)

    def _why_not(self, stage: Stage) -> tuple[str, str] | None:
        if "error" in self.header:
            return SKIPPED, f"torch cannot be used: {self.header['error']}"
        missing = [name for name in stage.needs if not is_installed(name)]
        if missing:
            return SKIPPED, f"not installed: {', '.join(missing)}"
        if self.header["gpu"] == "none" and not (self.dry_run or stage.on_cpu):
            return SKIPPED, "no GPU; --dry-run tries the stages without one"
        if self.deadline - time.monotonic() < 5:
            return OUT_OF_TIME, "no time left"
        return None

    def _run_child(self, stage: Stage, path: Path) -> tuple[int, bool]:
        """``(exit code of the last process, whether the limit ended it)``."""
        end = min(time.monotonic() + stage.seconds, self.deadline)
        environment = {
            # Whoever runs this in a test run's worker: the suite's own test run is none of its workers.
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "GPU_CHECK_FILE": str(path), "GPU_CHECK_STAGE": stage.name,
            "GPU_CHECK_HEADER": json.dumps(self.header), "GPU_CHECK_DRY_RUN": "1" if self.dry_run else "0",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if stage.on_cpu:
            environment.pop("TRITON_INTERPRET", None)
        elif self.dry_run:
            environment["TRITON_INTERPRET"] = "1"
        code = 0
        for _ in range(MAX_RESTARTS + 1):
            left = end - time.monotonic()
            if left < 1:
                return code, True
            command = command_of(stage, self.out, left - 1, self.dry_run)
            # A process group of its own, so that `stop_child` ends whatever the stage has started.
            self.child = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=os.setpgrp)
            try:
                code = self.child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                return code, True
            finally:
                self.stop_child()
            crashed = code < 0 and code != -signal.SIGKILL
            if stage.tests or not (code == RESTART or crashed):
                break
            # What the process was at when it crashed has failed; the next one does the rest.
            self._finish_started(path, FAILED, f"the process ended with exit code {code}")
        return code, False

    def stop_child(self) -> None:
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def _finish_started(self, path: Path, verdict: str, reason: str) -> None:
        found = result_file.read(path)
        for row in found.get("rows", []):
            if row["verdict"] == STARTED:
                row |= {"verdict": verdict, "reason": reason}
        write_json(path, found)

    def _settle(self, stage: Stage, path: Path, code: int, is_late: bool) -> None:
        """Write the stage's status, and a verdict for what was under way when its process ended."""
        if is_late:
            reason = f"stopped after {stage.seconds:.0f} s, or when all time was used"
            verdict, status = OUT_OF_TIME, OUT_OF_TIME
        elif code == RESTART:
            reason, verdict, status = f"began {MAX_RESTARTS + 1} times", OUT_OF_TIME, OUT_OF_TIME
        elif code == -signal.SIGKILL:
            reason, verdict, status = "killed from outside", KILLED, KILLED
        else:
            reason, verdict, status = f"exit code {code}", FAILED if code else SKIPPED, "done"
        self._finish_started(path, verdict, reason)
        found = result_file.read(path)
        failed = any(row["verdict"] in (FAILED, OUT_OF_TIME) for row in found.get("rows", []))
        if status == "done" and code not in (0, NO_TESTS) and not self._only_missing(found, code):
            failed = True
        found["status"] = FAILED if failed else status
        if status != "done" or (failed and code):
            found["reason"] = reason
        write_json(path, found)

    def _only_missing(self, found: dict[str, Any], code: int) -> bool:
        """Whether pytest's exit code comes from files that need a package which is not installed."""
        reasons = [str(row.get("reason", "")) for row in found.get("rows", []) if row["verdict"] == SKIPPED]
        return code in (1, 2) and any(reason.startswith("not installed") for reason in reasons)

    def report(self) -> None:
        """One table, then what was not done."""
        print()
        note = "   (dry run: no GPU times)" if self.dry_run else ""
        print(f"{'stage':12} {'status':12} {'s':>6}  rows{note}")
        not_done = []
        for name, found in self.results.items():
            rows = found.get("rows", [])
            verdicts = Counter(row["verdict"] for row in rows)
            counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
            tests = sum(row.get("passed", 0) for row in rows)
            counts += f", {tests} tests passed" if tests else ""
            print(
                f"{name:12} {found['status']:12} {found['seconds']:6.1f}  {counts or found.get('reason', '')}"
            )
            if found["status"] not in ("done", FAILED):
                not_done.append(f"{name}: {found['status']}: {found.get('reason', '')}")
            not_done += [
                f"{name}: {row['name']}: {row['verdict']}: {_first_line(row)}"
                for row in rows
                if row["verdict"] not in (PASSED, MEASURED, FAILED)
            ]
        for name, found in self.results.items():
            for row in found.get("rows", []):
                if row["verdict"] in (FAILED, OUT_OF_TIME):
                    print(f"{row['verdict']}: {name}: {row['name']}: {_first_line(row)}")
        print("not done: " + ("\n  ".join(["", *not_done]) if not_done else "nothing"))
        print(f"numbers in {self.out}")

    @property
    def has_failed(self) -> bool:
        return any(found["status"] in (FAILED, OUT_OF_TIME) for found in self.results.values())


def _first_line(row: dict[str, Any]) -> str:
    return (str(row.get("reason", "")).strip().splitlines() or [""])[-1][:160]


def main(argv: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/gpu_check.sh", description=__doc__.split("\n")[0])
    of = f"of {', '.join(names)}; none is all of them"
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=of)
    parser.add_argument("--out", type=Path, help="folder of the results (OUT, .cache/gpu_check)")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all stages")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes without a GPU")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one stage, in this process
    options = parser.parse_args(argv)
    unknown = [name for name in options.stages if name not in names]
    if unknown:
        parser.error(f"stages: expected of {', '.join(names)}, found {', '.join(unknown)}")
    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    if len(chosen) == 1:
        chosen = [chosen[0]._replace(seconds=options.budget)]
    if options.rows:
        return run_stage(chosen[0], options.rows, options.budget, options.dry_run)
    out = options.out or Path(os.environ.get("OUT") or ROOT / ".cache" / "gpu_check")
    check = Check(out.resolve(), options.budget, options.dry_run)
    print(json.dumps(check.header, indent=1), flush=True)

    def stop(number: int, frame: object) -> None:
        check.stop_child()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        for stage in chosen:
            check.run(stage)
    finally:
        check.stop_child()
        check.report()
    return int(check.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())

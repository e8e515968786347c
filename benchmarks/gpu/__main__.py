"""All checks and timings of a machine with a GPU, within 25 minutes: ``python -m benchmarks.gpu [STAGE ...]``.

docs/developer/compiled-kernels.md has the stages. Each is a process with a time limit. A stage that is not a
pytest run is a list of rows, and appends a line to ``OUT/STAGE.jsonl`` before and after each. A row that takes too
long or crashes ends the process and is noted as such; the stage is started again with the next row. ``--dry-run``
tries everything without a GPU, as far as it goes. Exit code 1: a check failed or was out of time. What was skipped
is named with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

from benchmarks.gpu import edits
from benchmarks.tables import ROOT, command, write_json

PASSED, FAILED, SKIPPED, STARTED, OUT_OF_TIME = "passed", "failed", "skipped", "started", "out of time"
#: Seconds for everything, and for one row; a hung row ends its process.
BUDGET, ROW_SECONDS = 1500.0, 240.0
MAX_RESTARTS = 8
#: A row's name, and what measures it. It raises where a check fails.
Row = tuple[str, Callable[[], dict[str, Any]]]
#: device ("cuda", "cpu"), whether sizes are tiny, and the folder of the results → the rows of a stage.
Rows = Callable[[str, bool, Path], Iterator[Row]]


def cases_rows(device: str, is_dry: bool, out: Path) -> Iterator[Row]:
    """The tests' random cases natively, beside work on another stream."""
    from benchmarks.compiled import machine_code

    for name, cases in machine_code.CASES.items():
        for i in range(1 if is_dry else len(cases)):
            seconds = 0 if is_dry else 15 if name == "step" else 3
            run = partial(machine_code.run_natively, name, i, seconds)
            yield f"{name} {i}", run if is_dry else partial(beside_traffic, run)


def beside_traffic(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run`, while products of matrices follow each other on another stream."""
    import torch

    is_done = threading.Event()

    def work() -> None:
        stream, matrix = torch.cuda.Stream(), torch.ones(2048, 2048, device="cuda")
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


#: What a sanitizer watches: a kind of cases and one of them.
SANITIZED = {"index": ("index", 1), "LCS, panels": ("lcs", 1), "step, K 256": ("step", 5)}
#: compute-sanitizer's tools; it looks for races in shared memory only.
TOOLS = {
    "memcheck": [*SANITIZED], "initcheck": [*SANITIZED], "racecheck": ["LCS, panels", "step, K 256"],
    "synccheck": ["LCS, panels", "step, K 256"],
}  # fmt: skip


def sanitizer_rows(device: str, is_dry: bool, out: Path) -> Iterator[Row]:
    pairs = ((tool, name) for tool, programs in TOOLS.items() for name in programs)
    return ((f"{tool}: {name}", partial(sanitize, tool, name, is_dry)) for tool, name in pairs)


def sanitize(tool: str, name: str, is_dry: bool) -> dict[str, Any]:
    """Run a case under the tool; in a dry run one by itself.

    PyTorch's allocator cuts its tensors out of large blocks, where an overrun ends in another tensor and shows
    nowhere: here each tensor has an allocation of its own.
    """
    if is_dry and (tool, name) != ("memcheck", "index"):
        raise SkipTest("dry run")
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not is_dry and not Path(program).exists():
        raise SkipTest("not installed: compute-sanitizer")
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    prefix = [] if is_dry else [program, "--tool", tool, *quiet, "--error-exitcode", "99"]
    run = "run_natively({!r}, {}, 0)".format(*SANITIZED[name])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    call = [*prefix, sys.executable, "-c", f"from benchmarks.compiled import machine_code as m; m.{run}"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
    if done.returncode not in (0, 99) and "Traceback" not in done.stderr:
        raise SkipTest(f"the tool does not work here: {lines[-1]}")
    assert done.returncode == 0, "\n".join(lines[-30:])
    return {"remark": lines[-1]}


class Stage(NamedTuple):
    """One stage: `rows`, or the name of a function that is imported where they run; or the arguments of pytest in
    `tests`, in a dry run `dry_tests`."""

    name: str
    seconds: float
    rows: Rows | str = ""
    tests: tuple[str, ...] = ()
    dry_tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_ALIGN, _SPECULATOR = "tests/gpu_align", "tests/vllm_integration/test_vllm_speculator.py"
#: The limits together are `BUDGET`; the last one gets what the others leave.
STAGES = (
    *(Stage(name, time, partial(edits.rows, name), needs=("vllm",)) for name, time in edits.SECONDS.items()),
    Stage("cases", 170, cases_rows),
    Stage("steps", 40, "steps.rows"),
    Stage("serve", 90, "serve.rows", needs=("vllm",)),
    Stage("speculator", 30, tests=(_SPECULATOR,), dry_tests=(_SPECULATOR, "-k", "launches_nothing"),
          needs=("vllm",)),
    Stage("warm_up", 50, tests=(f"{_ALIGN}/test_warm_up.py",),  # where nothing was compiled before
          dry_tests=(f"{_ALIGN}/test_warm_up.py", "-k", "changes_no_slot")),
    Stage(
        "kernels", 130,
        tests=(f"{_ALIGN}/ops", *(f"{_ALIGN}/test_{name}.py" for name in (
            "drafter", "arena", "step_traffic", "admission", "capture",
        ))),
        dry_tests=(f"{_ALIGN}/test_capture.py", f"{_ALIGN}/test_arena.py", "-k", "replay or example"),
    ),
    Stage("suite", 60, tests=("benchmarks/alignment", "--benchmark-only"), needs=("pytest_benchmark",),
          dry_tests=("benchmarks/alignment", "--benchmark-only", "-k", "1-64-8 or 1-17")),
    Stage("sanitizer", 330, sanitizer_rows),
)  # fmt: skip


def append(path: Path, **fields: Any) -> None:
    """One line, whole whatever happens next."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(fields, default=str) + "\n")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each row."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def run_rows(rows: Iterator[Row], path: Path, limit: float) -> None:
    """In the stage's process: run the rows that `path` does not have."""
    import torch

    done = read(path)
    for name, run in rows:
        if name in done:
            continue
        append(path, name=name, verdict=STARTED)
        faulthandler.dump_traceback_later(limit, exit=True)
        begin = time.monotonic()
        try:
            fields = {"verdict": PASSED, **run()}
        except SkipTest as error:
            fields = {"verdict": SKIPPED, "reason": str(error)}
        except Exception as error:
            fields = {"verdict": FAILED, "reason": f"{type(error).__name__}: {error}"[:2000]}
            fields["trace"] = traceback.format_exc()[-3000:]
        faulthandler.cancel_dump_traceback_later()
        append(path, name=name, **fields, seconds=round(time.monotonic() - begin, 2))
        brief = [f"{key}={fields[key]}" for key in ("us", "iqr_us", "cold_us", "reason") if key in fields]
        print(f"    {fields['verdict']:12} {name} {' '.join(brief)[:160]}", flush=True)
        if fields["verdict"] == FAILED and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception:  # nothing works on this device any more
                os._exit(1)


def run_stage(stage: Stage, out: Path, seconds: float, is_dry: bool) -> dict[str, dict[str, Any]]:
    """Run a stage to its end or its limit. Returns its rows."""
    path, end = out / f"{stage.name}.jsonl", time.monotonic() + seconds
    path.unlink(missing_ok=True)
    for _ in range(MAX_RESTARTS):
        code = _run_process(stage, path, end - time.monotonic(), is_dry)
        open_rows = [name for name, row in read(path).items() if row["verdict"] == STARTED]
        verdict = OUT_OF_TIME if code is None else FAILED
        for name in open_rows:
            append(path, name=name, verdict=verdict, reason=f"the process ended with exit code {code}")
        if stage.tests:
            log = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = log[-1] if log else "it printed nothing"
            verdict = {0: PASSED, 5: SKIPPED, None: OUT_OF_TIME}.get(code, FAILED)
            append(path, name="pytest", verdict=verdict, reason=said)
        elif code is None or (code and not open_rows):
            append(path, name="the stage", verdict=verdict, reason=f"exit code {code}")
        if not open_rows or code is None:
            break
    return read(path)


def _run_process(stage: Stage, path: Path, seconds: float, is_dry: bool) -> int | None:
    """The exit code of the stage's process, or None where time was up. All that it started ends with it."""
    arguments = [sys.executable, "-m", "benchmarks.gpu", "--rows", str(path), stage.name]
    log = None
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["GPU_STAGE_SECONDS"] = f"{seconds:.0f}"
    if is_dry:
        environment["TRITON_INTERPRET"] = "1"
    if stage.tests:
        tests = stage.dry_tests if is_dry else stage.tests
        if stage.name == "suite":
            tests = (*tests, "--rows", str(path))
        elif importlib.util.find_spec("xdist") and not is_dry:
            tests = (*tests, "-n", "8", "--dist", "worksteal")
        arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
        log = path.with_suffix(".log").open("w", encoding="utf-8")
    child = subprocess.Popen(
        [*arguments, *(["--dry-run"] if is_dry and not stage.tests else [])],
        cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        return child.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def header() -> dict[str, Any]:
    """GPU and driver, CPU, versions, commit and date."""
    import torch

    def said(*words: str) -> str:
        with suppress(OSError):
            return subprocess.run([*words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        return ""

    dirty = "-dirty" if said("git", "status", "--porcelain", "-uno") else ""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": f"{os.cpu_count()} cores, {said('sh', '-c', 'grep -m1 name /proc/cpuinfo').partition(': ')[2]}",
        **{name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")},
        "python": sys.version.split()[0],
        "commit": said("git", "rev-parse", "HEAD") + dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def keep(path: Path, stage: str, machine: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Put a stage's rows into a file of results, beside those of others."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made_by = f"python -m benchmarks.gpu {stage} --json {path}"
    results[stage] = {"command": made_by, "machine": machine, "rows": [*rows]}
    write_json(path, results)


def report(results: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Print a table of the stages and what was not done. Returns whether a check failed or was out of time."""
    print(f"\n{'stage':12} rows")
    rows = [(stage, row) for stage, found in results.items() for row in found.values()]
    for stage, found in results.items():
        counts = Counter(row["verdict"] for row in found.values())
        print(f"{stage:12} {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}")
    for stage, row in rows:
        if row["verdict"] != PASSED:
            reason = (str(row.get("reason", "")).strip().splitlines() or [""])[-1]
            print(f"{row['verdict']}: {stage}: {re.sub(r'^.*/', '', row['name'])}: {reason[:160]}")
    return any(row["verdict"] in (FAILED, OUT_OF_TIME) for _, row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    names = {stage.name: stage for stage in STAGES}
    parser = command("benchmarks.gpu", __doc__)
    said = f"of {', '.join(names)}; none: all"
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=said)
    said = "folder of the results"
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu_check", help=said)
    said = "put the rows into this file, too, beside those of other stages"
    parser.add_argument("--json", type=Path, help=said)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes without a GPU")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one stage, in this process
    options = parser.parse_args(argv)
    if unknown := [name for name in options.stages if name not in names]:
        parser.error(f"stages: expected of {', '.join(names)}, found {', '.join(unknown)}")
    chosen = [names[name] for name in options.stages] or [*STAGES]
    if options.rows:
        rows = chosen[0].rows
        rows = pkgutil.resolve_name(f"benchmarks.gpu.{rows}") if isinstance(rows, str) else rows
        rows = rows("cpu" if options.dry_run else "cuda", options.dry_run, options.rows.parent)
        run_rows(rows, options.rows, limit=(5 if options.dry_run else 1) * ROW_SECONDS)
        return 0
    end = time.monotonic() + BUDGET
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # In a process of its own, so that this one holds no memory of the GPU.
    code = "import json; from benchmarks.gpu.__main__ import header; print(json.dumps(header()))"
    machine = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120))
    (out / "header.json").write_text(json.dumps(machine, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(machine, indent=1), flush=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for stage in chosen:
        left, reason = end - time.monotonic(), ""
        if missing := [name for name in stage.needs if importlib.util.find_spec(name) is None]:
            reason = f"not installed: {', '.join(missing)}"
        elif machine["gpu"] == "none" and not options.dry_run:
            reason = "no GPU; --dry-run tries the stages without one"
        elif left < 5:
            reason = "no time left"
        if reason:
            results[stage.name] = {"the stage": {"name": "the stage", "verdict": SKIPPED, "reason": reason}}
            continue
        print(f"==> {stage.name}", flush=True)
        limit = left if options.dry_run or len(chosen) == 1 else min(left, stage.seconds)
        results[stage.name] = run_stage(stage, out, limit, options.dry_run)
        if options.json:
            keep(options.json, stage.name, machine, results[stage.name].values())
    has_failed = report(results)
    print(f"numbers in {out}")
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""The GPU check without a GPU: every stage leaves its results, whatever happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu import gpu_check, result_file
from benchmarks.gpu.gpu_check import STAGES
from benchmarks.gpu.result_file import DRY_RUN_NOTE, FAILED, KILLED, OUT_OF_TIME

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu" / "gpu_check.sh"
NAMES = [stage.name for stage in STAGES]
HEADER = {"gpu": "none", "driver": "none", "commit": "none"}
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
#: Stops every process that runs a stage once its result file holds a row, so that it can be killed there.
STOP_AT_A_ROW = """
import json, os, signal
replace = os.replace
def stop(source, target):
    replace(source, target)
    if str(target) == os.environ.get("GPU_CHECK_FILE"):
        with open(target) as file:
            found = json.load(file)
        if found["pid"] == os.getpid() and found["rows"]:
            os.kill(os.getpid(), signal.SIGSTOP)
os.replace = stop
"""


@pytest.mark.parametrize(
    "stages",
    [[name for name in NAMES if name != "serve"], pytest.param(["serve"], marks=pytest.mark.vllm)],
    ids=["without engines", "with engines"],
)
def test_a_dry_run_of_all_stages(stages: list[str], tmp_path: Path) -> None:
    command = [str(SCRIPT), "--dry-run", "--out", str(tmp_path), *stages]
    done = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    everything = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(everything["stages"]) == stages
    for name in stages:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found == everything["stages"][name]
        assert found["stage"] == name
        assert found["dry_run"] is True
        assert found["status"] == "done", found
        assert {"gpu", "driver", "cuda", "torch", "triton", "python", "commit", "date"} <= set(
            found["header"]
        )
        assert found["rows"]
        assert {row["note"] for row in found["rows"]} == {DRY_RUN_NOTE}
        assert {row["verdict"] for row in found["rows"]} <= {"passed", "measured", "skipped"}
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()
    table, _, not_done = done.stdout.rpartition("not done:")
    assert all(re.search(rf"^{name} +done", table, re.MULTILINE) for name in stages)
    assert ("racecheck: step, K 256: skipped: dry run" in not_done) == ("sanitizer" in stages)


@pytest.mark.parametrize("name", ["kernels", "capture", "suite"])  # of tests, of rows, of benchmarks
def test_a_stage_that_is_killed_leaves_what_it_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pytest_benchmark")
    [stage] = (stage for stage in STAGES if stage.name == name)
    monkeypatch.setattr(gpu_check.Check, "_ask_header", lambda self: HEADER)
    (tmp_path / "sitecustomize.py").write_text(STOP_AT_A_ROW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    check = gpu_check.Check(tmp_path, 120, dry_run=True)
    thread = threading.Thread(target=check.run, args=(stage,))
    thread.start()
    path = tmp_path / f"{stage.name}.json"
    before: list[str] = []
    while thread.is_alive():
        found = result_file.read(path)
        before = [row["name"] for row in found.get("rows", [])]
        if found.get("pid", os.getpid()) != os.getpid() and before:
            os.kill(found["pid"], signal.SIGKILL)
            break
        time.sleep(0.01)
    thread.join()
    found = json.loads(path.read_text())
    assert found["status"] == KILLED
    assert found["reason"] == "killed from outside"
    assert before
    assert [row["name"] for row in found["rows"]][: len(before)] == before
    assert "started" not in {row["verdict"] for row in found["rows"]}
    assert not check.has_failed


ROWS = """
import sys, time
from pathlib import Path
from benchmarks.gpu.gpu_check import Row, run_rows
from benchmarks.gpu.result_file import ResultFile, SkipError

def fail(): raise ValueError("wrong")
def skip(): raise SkipError("not here")
rows = [Row("fails", 9, fail), Row("hangs", 1, lambda: time.sleep(60) or {}), Row("skips", 9, skip),
        Row("works", 9, lambda: {"us": 1})]
sys.exit(run_rows(ResultFile(Path(sys.argv[1]), "test", {}), iter(rows), time.monotonic() + 60))
"""


@pytest.mark.parametrize("failure", ['raise ValueError("wrong")', "import os; os.abort()"])
def test_a_row_that_fails_or_crashes_or_hangs_costs_itself(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.Check, "_ask_header", lambda self: HEADER)
    command = [sys.executable, "-c", ROWS.replace('raise ValueError("wrong")', failure)]
    monkeypatch.setattr(gpu_check, "command_of", lambda stage, out, *_: [*command, str(out / "lcs.json")])
    assert gpu_check.main(["--out", str(tmp_path), "--dry-run", "lcs"]) == 1
    found = json.loads((tmp_path / "lcs.json").read_text())
    assert found["status"] == FAILED
    verdicts = {row["name"]: row["verdict"] for row in found["rows"]}
    assert verdicts == {"fails": FAILED, "hangs": OUT_OF_TIME, "skips": "skipped", "works": "measured"}
    assert found["rows"][0]["reason"] in ("ValueError: wrong", "the process ended with exit code -6")

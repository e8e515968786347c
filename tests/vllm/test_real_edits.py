"""Real edits through real engines: a dry run of the stages of a GPU day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import read
from benchmarks.gpu.edits import DRY, DRY_RECORDS

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", DRY)
def test_engines_write_the_records_and_accept_what_is_simulated(stage: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", stage, "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    rows = read(tmp_path / f"{stage}.jsonl")
    assert done.returncode == 0, done.stdout[-3000:]
    assert {row["verdict"] for row in rows.values()} == {"passed"}
    assert sum("simulated" in row for row in rows.values()) == sum(DRY_RECORDS.values())

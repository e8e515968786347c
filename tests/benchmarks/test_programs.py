"""Benchmark programs run, in their smallest sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STAGES, Stage

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "options", "printed"),
    [
        pytest.param("gpu", ("--dry-run", "ngram", "suite", "--out", "{out}"), "suite", id="gpu"),
        pytest.param("quality.ablation", ("--check",), "", id="the names that the ablation replaces"),
        pytest.param("published", ("--quick",), "| tasks that agree | | 8 of 8 | 5 of 8 |", id="published"),
    ],
)
def test_a_program_runs(module: str, options: tuple[str, ...], printed: str, tmp_path: Path) -> None:
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *(o.format(out=tmp_path) for o in options)],
        cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert printed in done.stdout


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.tests], ids=lambda stage: stage.name)
def test_the_check_of_a_gpu_runs_tests_that_exist(stage: Stage) -> None:
    paths = [name for name in (*stage.tests, *stage.dry_tests) if "/" in name]
    assert [name for name in paths if not (ROOT / name).exists()] == []

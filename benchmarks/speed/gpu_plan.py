"""The stages of `gpu_check` as data, and the command of each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

#: Worker processes for the tests.
NUM_WORKERS = 8


class Stage(NamedTuple):
    """One stage. tests: what pytest gets, none for a stage of `gpu_stages`; needs: packages it has to have."""

    name: str
    seconds: float
    tests: tuple[str, ...] = ()
    dry_tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


STAGES = (
    Stage(
        "kernels", 160,
        tests=("tests/gpu_align/ops", "tests/gpu_align/test_capture.py", "tests/gpu_align/test_drafter.py",
               "tests/gpu_align/test_drafter_input.py", "tests/gpu_align/test_drafter_predictions.py",
               "tests/gpu_align/test_arena.py", "tests/gpu_align/test_step_traffic.py"),
        dry_tests=("tests/gpu_align/test_capture.py", "tests/gpu_align/ops/test_kernel_signatures.py",
                   "tests/gpu_align/test_arena.py", "-k", "capture or replay or signature or example"),
        needs=("pytest",),
    ),
    Stage("capture", 60),
    Stage("steps", 120),
    Stage("lcs", 60),
    Stage("ngram", 60),
    Stage("sanitizer", 90),
    Stage(
        "suite", 120, tests=("benchmarks/speed", "--benchmark-only"),
        dry_tests=("benchmarks/speed", "--benchmark-only", "-k", "1-1024"),
        needs=("pytest", "pytest_benchmark"),
    ),
    Stage("picture", 30, needs=("matplotlib",)),
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
        command = [sys.executable, "-m", "benchmarks.speed.gpu_stages", stage.name, str(path)]
        return [*command, "--seconds", f"{seconds:.0f}", *(["--dry-run"] if dry_run else [])]
    # Plugins by name: an installed one that cannot be imported must not stop the others.
    names = ["benchmarks.speed.rows_plugin"]
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

"""An eager launch on the host: the same as Triton's own, at a fraction of its cost."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_kept_launch_is_tritons_own_and_cheaper():
    """Compared argument by argument in the benchmark; the step's factor is about 7 (Triton 3.6) to 17."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.host_cost"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "launch what Triton launches" in run.stdout
    theirs, ours, *_ = (float(us) for us in re.findall(r"([\d.]+) µs", run.stdout))
    assert ours < theirs / 2
    assert "Drafter.add launches 3 kernels of ours and runs 6 operations of PyTorch" in run.stdout
    assert "Drafter.add, 32768 new tokens" in run.stdout


def test_the_interpreter_is_refused():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.host_cost"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "TRITON_INTERPRET" in run.stderr

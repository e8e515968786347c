"""An eager launch on the host: the same as Triton's own, at a fraction of its cost."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(interpret):
    command = [sys.executable, "-m", "benchmarks.speed.host_cost"]
    env = {**os.environ, "TRITON_INTERPRET": interpret}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_kept_launch_is_tritons_own_and_cheaper():
    """Compared argument by argument in the benchmark; the step's factor is about 7 (Triton 3.6) to 17."""
    done = run("0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launch what Triton launches" in done.stdout
    theirs, ours, *_ = (float(us) for us in re.findall(r"([\d.]+) µs", done.stdout))
    assert ours < theirs / 2
    assert "Drafter.add launches 3 kernels of ours and runs 6 operations of PyTorch" in done.stdout
    assert "Drafter.add, 32768 new tokens" in done.stdout


def test_the_interpreter_is_refused():
    done = run("1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr

"""The programs that examine compiled kernels without a GPU, and what counts as a race."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compiled.racing import Findings, RacingMachine
from benchmarks.compiled.sass import Program, parse
from benchmarks.compiled.sass_warp import Memory

pytest.importorskip("triton.backends.nvidia")
ROOT = Path(__file__).parents[2]


def printed_by(module: str, *options: str) -> str:
    """Run a program in a process of its own, as kernels are interpreted here. Returns its output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.compiled.{module}", *options],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_kernel_is_as_the_table_says_and_does_not_spill() -> None:
    """After a change of a kernel: ``python -m benchmarks.compiled.static_check --write``, of all variants."""
    options = "--target", "sm_90", "--only", "step 16", "--only", "lcs", "--only", "index"
    kernels = re.findall(r"^\| (\w+_kernel)", printed_by("static_check", *options), re.MULTILINE)
    assert len(set(kernels)) == 6


def test_every_kernel_does_what_its_reference_does() -> None:
    rows = [
        line.split("|") for line in printed_by("machine_code", "--quick").splitlines() if "_kernel" in line
    ]
    assert len(rows) == 6
    assert all(int(row[3].replace(",", "")) > 0 for row in rows)


def test_the_compiled_step_is_as_fast_as_the_table_says() -> None:
    """After a change of a kernel: ``python -m benchmarks.compiled.latency_model --write``."""
    options = "--target", "sm_90", "--only", "aligned, 1 new"
    assert "| aligned, 1 new |" in printed_by("latency_model", *options)


def test_a_kept_launch_is_tritons_own_and_cheaper() -> None:
    """Compared argument by argument in the program; the factor is about 7 (Triton 3.6) to 17."""
    printed = printed_by("host_cost")
    assert "launch what Triton launches" in printed
    theirs, ours, *_ = (float(us) for us in re.findall(r"([\d.]+) µs", printed))
    assert ours < theirs / 2


SHARED = ["S2R R0, SR_TID.X", "LEA R2, R0, RZ, 0x2", "STS [R2], R0"]
#: The word of the same lane in the other warp, of the next lane in the same warp.
OTHER_WARP, NEXT_LANE = "LOP3.LUT R3, R2, 0x80, RZ, 0x3c, !PT", "LOP3.LUT R3, R2, 0x4, RZ, 0x3c, !PT"
BARRIER, LOAD = "BAR.SYNC.DEFER_BLOCKING 0x0", "LDS R4, [R3]"
GLOBAL = ["MOV R2, c[0x0][0x160]", "MOV R3, c[0x0][0x164]", "MOV R0, 0x7", "S2R R1, SR_TID.X"]


def program_of(lines: list[str]) -> Program:
    """A line that begins with a point is a label."""
    return parse("".join(
        f"{line}:\n" if line[0] == "."
        else f"        /*{16 * i:04x}*/ {line} ;  /* 0x{0:016x} */\n /* 0x{7 << 46 | 7 << 49:016x} */\n"
        for i, line in enumerate(lines)
    ))  # fmt: skip


def run(lines: list[str], grid: tuple[int, int] = (1, 1), num_warps: int = 2, seed: int = 0) -> Findings:
    """A program of these instructions, with one tensor of 64 words."""
    memory = Memory([np.zeros(64, np.int32)])
    constants = bytes(0x160) + memory.address(0).to_bytes(8, "little")
    program = program_of([*lines, "EXIT"])
    findings = Findings(program)
    how = {"shared_start": 0, "shared_size": 256, "findings": findings, "seed": seed}
    RacingMachine(program, memory, constants, num_warps, **how).run_grid(grid)
    return findings


@pytest.mark.parametrize(
    ("lines", "grid", "races"),
    [
        ([*SHARED, BARRIER, OTHER_WARP, LOAD], (1, 1), False),
        ([*SHARED, OTHER_WARP, LOAD], (1, 1), True),
        # A warp's own words, one instruction later.
        ([*SHARED, NEXT_LANE, LOAD], (1, 1), False),
        # Programs have no shared memory in common, and no order.
        ([*SHARED, BARRIER, OTHER_WARP, LOAD], (3, 1), False),
        ([OTHER_WARP.replace("R2", "RZ"), LOAD], (1, 1), True),  # nothing was written
        ([*GLOBAL, "STG.E [R2.64], R0"], (1, 1), False),  # one value
        ([*GLOBAL, "STG.E [R2.64], R1"], (1, 1), True),
        ([*GLOBAL, "RED.E.ADD.STRONG.GPU [R2.64], R1"], (2, 2), False),
        ([*GLOBAL, "RED.E.ADD.STRONG.GPU [R2.64], R1", "LDG.E R4, [R2.64]"], (1, 1), True),
        ([*GLOBAL, "LDG.E R4, [R2.64]"], (2, 1), False),
        ([*GLOBAL, "LDG.E R4, [R2.64]", BARRIER, "STG.E [R2.64], R0"], (1, 1), False),
        ([*GLOBAL, "LDG.E R4, [R2.64]", BARRIER, "STG.E [R2.64], R0"], (2, 1), True),
        ([*GLOBAL, "LDG.E R4, [R2.64]", "STG.E [R2.64], R0"], (1, 1), True),
    ],
)  # fmt: skip
def test_what_races(lines: list[str], grid: tuple[int, int], races: bool) -> None:
    for seed in range(5):
        assert bool(run(lines, grid, seed=seed).races) == races, seed

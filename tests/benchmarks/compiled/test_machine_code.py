"""Machine code in random order: what counts as a race, and every kernel's code beside its reference."""

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks.compiled.machine_code import entered
from benchmarks.compiled.racing import Findings, RacingMachine
from benchmarks.compiled.sass import Program, parse
from benchmarks.compiled.sass_warp import Memory

SHARED = ["S2R R0, SR_TID.X", "LEA R2, R0, RZ, 0x2", "STS [R2], R0"]
#: What the command says of a planted fault.
VERDICTS = ("found", "MISSED", "none")
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
    findings = Findings(program, has_edges=True)
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


@pytest.mark.parametrize("line", ["LDG.E R4, [R2.64+0x100]", "LDG.E R4, [R2.64+0x2]", "LDS R4, [0x100]"])
def test_accesses_outside_or_unaligned(line: str) -> None:
    with pytest.raises(IndexError):
        run([*GLOBAL, line])


def test_where_a_bound_is_met() -> None:
    """Lane 4 of both warps; the second comparison counts where the first holds; upper words never do."""
    lane = ["S2R R0, SR_LANEID", "ISETP.GE.AND P0, PT, R0, 0x4, PT", "ISETP.LT.AND P1, PT, R0, 0x3, P0"]
    assert run([*lane, "ISETP.GE.AND.EX P0, PT, R0, 0x4, PT, P0"]).edges == [0, 2, 0, 0, 0]


def test_code_for_lanes_apart_and_padding_are_not_entered() -> None:
    branches = ["BRA.DIV UR4, `(.L_2)", "@P0 BRA `(.L_1)", "EXIT", ".L_1", "BRA P0, `(.L_1)", "EXIT"]
    program = program_of([*branches, ".L_2", "NOP", "BRA `(.L_1)", ".L_3", "BRA `(.L_3)"])
    assert entered(program) == {0, 1, 2, 3, 4}


def machine_code(*options: str) -> subprocess.CompletedProcess[str]:
    """The command. In a process of its own: here kernels are interpreted."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled.machine_code", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def test_every_kernel_does_what_its_reference_does() -> None:
    done = machine_code("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if "_kernel" in line]
    assert len(rows) == 6, done.stdout
    assert all(int(row[3].replace(",", "")) > 0 for row in rows), done.stdout


def test_faults_in_machine_code_are_found() -> None:
    """In the kernels of the index, which have no barrier. A bound may leave all that is stored as it is."""
    done = machine_code("--quick", "--only", "index", "--plant", "1")
    lines = [line.split(": ") for line in done.stdout.splitlines() if line.split(":")[0] in VERDICTS]
    counts = Counter((verdict, kind) for verdict, _, kind, *_ in lines)
    assert counts["found", "address off by one"] == 4, done.stdout + done.stderr
    assert counts["found", "bound moved by one"] > 0, done.stdout
    assert counts.keys() <= {
        ("found", "address off by one"),
        ("found", "bound moved by one"),
        ("MISSED", "bound moved by one"),
    }

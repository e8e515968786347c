"""The compiled kernels without a GPU: registers and loads, cycles by the model, the host's cost of a launch.

Instructions are read as they are encoded and run as they are meant; the committed tables are true.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compiled.kernel_configs import CONFIGS
from benchmarks.compiled.sass import Control, decode, parse
from benchmarks.compiled.sass_warp import Latencies, Machine, Memory, Trace
from benchmarks.compiled.static_check import differences, read_amd, read_nvidia, spills

ROOT = Path(__file__).parents[3]
_triton = find_spec("triton")
_nvdisasm = (
    Path(_triton.origin or "").parent / "backends/nvidia/bin/nvdisasm" if _triton else Path("nvdisasm")
)

USAGE = " Function k:\n  REG:40 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:404 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
SASS = """
        /*0060*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0070*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0080*/               @P1 LDG.E.64 R8, [R2.64] ;
        /*0090*/                   LDG.E.U8 R8, [R2.64] ;
        /*00a0*/                   LDG.E.128 R8, [R2.64] ;
        /*00b0*/                   STG.E.128 [R2.64], R8 ;
        /*00c0*/                   LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
"""
AMD = """
\tglobal_load_dword v1, v2, s[0:1]
\tglobal_load_dwordx4 v[4:7], v2, s[0:1]
\tbuffer_load_dwordx2 v[4:5], v2, s[0:3], 0 offen
\tglobal_load_ubyte v1, v2, s[0:1]
\tglobal_store_dwordx4 v2, v[4:7], s[0:1]
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
    .private_segment_fixed_size: 0
    .sgpr_count:     30
    .vgpr_count:     17
"""
ROW: dict[str, Any] = {"registers": 40, "stack": 0, "shared": 64, "loads": {"128": 2, "32": 1}}
#: Of a kernel for sm_90, as nvdisasm prints it: ids, the address of an element, a load and the first use of it.
LOAD = """
.text._some_kernel:
	//## File "/src/ops/kernels/step.py", line 35 inlined at "/src/ops/kernels/step.py", line 160
	//## File "/src/ops/kernels/step.py", line 160
        /*0000*/                   S2R R0, SR_TID.X ;               /* 0x0000000000007919 */
                                                                    /* 0x000e2e0000002100 */
        /*0010*/                   LDC.64 R2, c[0x0][0x210] ;       /* 0x00008400ff027b82 */
                                                                    /* 0x000e220000000a00 */
        /*0020*/                   IMAD.WIDE R2, R0, 0x4, R2 ;      /* 0x0000000400027825 */
                                                                    /* 0x001fca00078e0202 */
        /*0030*/                   LDG.E R4, desc[UR4][R2.64] ;     /* 0x0000000402047981 */
                                                                    /* 0x000ea2000c1e1900 */
        /*0040*/                   IADD3 R5, R4, 0x7, RZ ;          /* 0x0000000704057810 */
                                                                    /* 0x004fca0007ffe0ff */
        /*0050*/                   STG.E desc[UR4][R2.64], R5 ;     /* 0x0000000502007986 */
                                                                    /* 0x000fe2000c101904 */
        /*0060*/                   EXIT ;                           /* 0x000000000000794d */
                                                                    /* 0x000fea0003800000 */
"""


def run(*arguments: str, **variables: str) -> str:
    """What Python prints, without the interpreter."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_compilers_texts() -> None:
    loads = {"64": 1, "32": 1, "8": 1}
    assert read_nvidia(USAGE, SASS, 64) == {
        "registers": 40, "stack": 16, "shared": 64, "loads": {"128": 3, **loads},
    }  # fmt: skip
    assert read_amd(AMD, 0) == {
        "registers": 17, "scalars": 30, "stack": 0, "shared": 0, "loads": {"128": 1, **loads},
    }  # fmt: skip
    with pytest.raises(ValueError, match="STACK"):
        read_nvidia("REG:40", SASS, 0)
    with pytest.raises(ValueError, match="private_segment"):
        read_amd(".vgpr_count: 1\n.sgpr_count: 1", 0)


def test_a_difference_names_kernel_target_and_field() -> None:
    table = {"draft 16": {"sm_80": ROW, "sm_90": ROW}}
    assert differences(table, table) == []
    changed = {"draft 16": {"sm_80": ROW, "sm_90": {**ROW, "registers": 44, "loads": {"32": 9}}}}
    assert differences(table, changed) == [
        "draft 16, sm_90, registers: 40 in the table, 44 now",
        "draft 16, sm_90, loads: 2 × 128 + 1 × 32 in the table, 9 × 32 now",
    ]
    assert differences(table, {"draft 16": {"sm_80": ROW}}) == ["draft 16, sm_90: no longer compiled"]
    assert differences({}, table)[0] == "draft 16, sm_80: not in the table"
    warm = {"aligned": {"sm_90": {"warm": 1000}}}
    found = [differences(warm, {"aligned": {"sm_90": {"warm": now}}}, 0.02) for now in (1020, 1021, 979)]
    assert [len(lines) for lines in found] == [0, 1, 1]
    assert spills(table) == []
    assert spills({"walk": {"sm_80": {**ROW, "stack": 8}}}) == [
        "walk, sm_80: 8 bytes of stack a thread, expected 0"
    ]


def test_every_kernel_is_as_the_table_says_and_does_not_spill(tmp_path: Path) -> None:
    """By its IR, of which the table was made. Renew it after a change of a kernel:
    ``python -m benchmarks.compiled.static_check --write``."""
    told = run("-m", "benchmarks.compiled.static_check")
    assert all(f"\n| {config.label} |" in told for configs in CONFIGS.values() for config in configs)
    run(
        "-m",
        "benchmarks.compiled.static_check",
        "--all",
        "--only",
        "code 128",
        TRITON_CACHE_DIR=str(tmp_path),
    )


def test_what_has_another_ir_than_the_table_is_compiled() -> None:
    code = """
from benchmarks.compiled.static_check import measure
targets = ["sm_90", "gfx942"]
right = measure(targets, "set slot")["set slot"]
known = {"sm_90": {**right["sm_90"], "registers": 9}, "gfx942": {**right["gfx942"], "ir": "", "registers": 9}}
found = measure(targets, "set slot", {"set slot": known})["set slot"]
assert found == {"sm_90": known["sm_90"], "gfx942": right["gfx942"]}, found
"""
    run("-c", code)


def test_a_control_word() -> None:
    assert decode(0x000E2E0000002100) == Control(7, False, 0, 7, 0, 0)  # S2R: its result is on scoreboard 0
    assert decode(0x001FCA00078E0202) == Control(5, True, 7, 7, 1, 0)  # its first use waits for scoreboard 0
    assert decode(0x000EA2000C1E1900) == Control(1, False, 2, 7, 0, 0)  # a load: scoreboard 2
    assert decode(0x004FCA0007FFE0FF) == Control(5, True, 7, 7, 4, 0)  # bit 2: waits for scoreboard 2


def run_warp(text: str, values: Any, costs: Latencies | None = None) -> tuple[Trace, Any]:
    """The trace of one warp, and what it leaves of `values`, its only argument."""
    memory = Memory([np.asarray(values, np.uint32)])
    bank = bytes(0x210) + memory.address(0).to_bytes(8, "little") + bytes(64)
    trace = Machine(parse(text), memory, bank, 1, costs or Latencies()).run()
    return trace, memory.arrays[0]


def test_a_load_is_waited_for_and_added_to() -> None:
    trace, found = run_warp(LOAD, range(32))
    assert found.tolist() == [i + 7 for i in range(32)]
    slower, _ = run_warp(LOAD, range(32), Latencies(first=600))
    assert slower.cycles - trace.cycles == 600 - 263
    assert trace.waited[3] == 263 - 1  # the stall count of the load is 1
    assert parse(LOAD).code[0].lines == (("kernels/step.py", 35), ("kernels/step.py", 160))


def test_an_overrun_is_found() -> None:
    with pytest.raises(IndexError, match="outside of every tensor"):
        run_warp(LOAD, range(31))


@pytest.mark.skipif(not _nvdisasm.exists(), reason="Triton brings no nvdisasm here")
def test_the_compiled_lcs_is_as_fast_as_the_table_says(tmp_path: Path) -> None:
    """The step has the table's IR, as above, and takes 18 s to compile. Renew the table after a change of a
    kernel: ``python -m benchmarks.compiled.latency_model --write``."""
    # A cache of its own: what another run has compiled must not stand in for compiling.
    options = "--target", "sm_90", "--only", "lcs_length: 1k"
    assert "| lcs_length: 1k |" in run(
        "-m", "benchmarks.compiled.latency_model", *options, TRITON_CACHE_DIR=str(tmp_path)
    )


def test_a_kept_launch_is_tritons_own_and_cheaper() -> None:
    """Compared argument by argument in the benchmark; the step's factor is about 7 (Triton 3.6) to 17."""
    printed = run("-m", "benchmarks.compiled.host_cost")
    assert "launch what Triton launches" in printed
    theirs, ours, *_ = (float(us) for us in re.findall(r"([\d.]+) µs", printed))
    assert ours < theirs / 2
    assert "Drafter.add launches 3 kernels of ours and runs 6 operations of PyTorch" in printed
    assert "Drafter.add, 32768 new tokens" in printed

"""The static table: read from the compilers' text as it is, compared field by field, and true of the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import static_check
from benchmarks.speed.kernel_configs import CONFIGS
from benchmarks.speed.static_check import TARGETS, differences, read_amd, read_nvidia, spills, stored, write

ROOT = Path(__file__).parents[3]

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


def test_nvidia_text() -> None:
    assert read_nvidia(USAGE, SASS, 64) == {
        "registers": 40, "stack": 16, "shared": 64, "loads": {"128": 3, "64": 1, "32": 1, "8": 1},
    }  # fmt: skip
    with pytest.raises(ValueError, match="STACK"):
        read_nvidia("REG:40", SASS, 0)


def test_amd_text() -> None:
    assert read_amd(AMD, 0) == {
        "registers": 17, "scalars": 30, "stack": 0, "shared": 0, "loads": {"128": 1, "64": 1, "32": 1, "8": 1},
    }  # fmt: skip
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
    assert differences({}, {"walk": {"sm_80": ROW}}) == ["walk, sm_80: not in the table"]


def test_spills_are_named() -> None:
    assert spills({"walk": {"sm_80": ROW}}) == []
    assert spills({"walk": {"sm_80": {**ROW, "stack": 8}}}) == [
        "walk, sm_80: 8 bytes of stack a thread, expected 0"
    ]


def test_a_table_of_one_version_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "static.json"
    write("3.6.0", {"walk": {"sm_80": ROW}}, path)
    write("3.9.0", {"walk": {"sm_80": {**ROW, "registers": 9}}}, path)
    write("3.9.0", {"walk": {"sm_80": {**ROW, "registers": 8}}}, path)
    assert stored("3.6.0", path) == {"walk": {"sm_80": ROW}}
    assert stored("3.9.0", path) == {"walk": {"sm_80": {**ROW, "registers": 8}}}
    assert stored("4.0.0", path) is None


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.speed.static_check", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize("target", list(TARGETS))
def test_every_kernel_is_as_the_table_says_and_does_not_spill(target: str, tmp_path: Path) -> None:
    """Renew the table after a change of a kernel: ``python -m benchmarks.speed.static_check --write``."""
    done = run_check("--target", target, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((tmp_path / "found.json").read_text())["table"]
    assert set(table) == {config.label for configs in CONFIGS.values() for config in configs}
    assert all(row["registers"] > 0 for rows in table.values() for row in rows.values())


def test_a_wrong_command() -> None:
    assert "unknown target ['sm_1']" in run_check("--target", "sm_1").stderr
    assert "--write needs every row" in run_check("--write", "--only", "walk").stderr


def test_a_kernel_without_a_configuration_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_check, "find_kernels", lambda: {**CONFIGS, "draft._new_kernel": object()})
    with pytest.raises(ValueError, match=r"without one: \['draft._new_kernel'\], without a kernel: \[\]"):
        static_check.measure([])

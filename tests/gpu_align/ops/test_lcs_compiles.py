"""Every LCS kernel compiles for GPUs that are not here, at the widths the launchers use, without spills.

`python tests/gpu_align/ops/test_lcs_compiles.py` prints the table of gpu_align/ops/lcs/README.md. The
compiler runs in a process of its own: where TRITON_INTERPRET was set at import there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import pytest

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)} | {
    "gfx942": ("hip", "gfx942", 64)
}
# Words for predictions of 1k, 8k and 32k tokens; the last goes through in two panels, hence its carry.
WIDTHS = {32: False, 256: False, 512: True}
WAVEFRONT = {"length": (), "prefix_row": ("row_ptr",), "edit_script": ("history_ptr",)}


def variants() -> list[tuple[str, str, dict[str, Any], int]]:
    """Return (label, kernel, constants, warps), as the launchers call them."""
    out: list[tuple[str, str, dict[str, Any], int]] = []
    for words, panels in WIDTHS.items():
        for name, used in WAVEFRONT.items():
            unused = {"row_ptr", "history_ptr", "carry_ptr"} - {*used, *(["carry_ptr"] if panels else [])}
            constants = {"BLOCK_B": 1, "BLOCK_W": words, **dict.fromkeys(sorted(unused))}
            out.append((f"{name} {words}", "_lcs_wavefront_kernel", constants, words // 32))
        extend = {"BLOCK_B": 1, "BLOCK_W": words}
        out.append((f"extend {words}", "_lcs_extend_kernel", extend, words // 32))
    return [*out, ("walk", "_lcs_walk_kernel", {"BLOCK_B": 1, "BLOCK_O": 256}, 1)]


def compile_all(targets: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return {kernel: {target: {"registers", "stack"}}}; stack is bytes of spills a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gpu_align.ops.lcs import kernels

    types = {"op_ptr": "*i8", "carry_ptr": "*i8", "slots_ptr": "*i64"}
    table: dict[str, dict[str, dict[str, int]]] = {}
    for label, kernel, constants, warps in variants():
        fn = getattr(kernels, kernel)
        signature = {
            arg: "constexpr"
            if arg in constants
            else types.get(arg, "*i32" if arg.endswith("_ptr") else "i32")
            for arg in fn.arg_names
        }
        source = ASTSource(fn=fn, signature=signature, constexprs=constants)
        for name in targets:
            done = triton.compile(source, target=GPUTarget(*TARGETS[name]), options={"num_warps": warps})
            if name == "gfx942":
                found = re.search(r"\.private_segment_fixed_size:\s*(\d+)", done.asm["amdgcn"])
                registers = re.search(r"\.vgpr_count:\s*(\d+)", done.asm["amdgcn"])
            else:
                with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                    file.write(done.asm["cubin"])
                    file.flush()
                    tool = triton.knobs.nvidia.cuobjdump.path
                    usage = subprocess.run(
                        [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
                    ).stdout
                found, registers = re.search(r"STACK:(\d+)", usage), re.search(r"REG:(\d+)", usage)
            assert found, f"{label}, {name}: no stack size in the binary"
            assert registers, f"{label}, {name}: no register count in the binary"
            row = {"registers": int(registers.group(1)), "stack": int(found.group(1))}
            table.setdefault(label, {})[name] = row
    return table


@pytest.mark.parametrize("target", list(TARGETS))
def test_compiles_without_spills(target: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, "--json", target], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert len(table) == len(variants())
    for label, row in table.items():
        assert row[target]["stack"] == 0, f"{label} spills on {target}"


def main(args: list[str]) -> None:
    if args[:1] == ["--json"]:
        print(json.dumps(compile_all(args[1:])))
        return
    table = compile_all(list(TARGETS))
    print("| kernel, words | " + " | ".join(TARGETS) + " |\n|---|" + "---|" * len(TARGETS))
    for label, row in table.items():
        print(f"| {label} | " + " | ".join(f"{r['registers']}, {r['stack']}" for r in row.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every kernel compiles for GPUs that are not here, at the widths the launchers use, without spills.

`python tests/gpu_align/ops/test_kernels_compile.py` prints the table of gpu_align/ops/lcs/README.md. The
compiler runs in a process of its own: where TRITON_INTERPRET was set at import there is nothing to compile.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import triton

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)} | {
    "gfx942": ("hip", "gfx942", 64)
}
# Words for predictions of 1k, 8k and 32k tokens; the last goes through in two panels, hence its carry.
WIDTHS = {32: False, 256: False, 512: True}
WAVEFRONT = {"length": (), "prefix_row": ("row_ptr",), "edit_script": ("history_ptr",)}


# What is no pointer to int32, by operation: the names are those of the kernels' arguments.
TYPES = {
    "lcs": {"op_ptr": "*i8", "carry_ptr": "*i8", "slots_ptr": "*i64"},
    "realign": {"slots_ptr": "*i64"},
    "suffix_match": {"slots_ptr": "*i64"},
    "draft": {
        "slots_ptr": "*i64",
        "token_ids_ptr": "*i64",
        "confidence_ptr": "*fp32",
        "confidence_out_ptr": "*fp32",
        "source_ptr": "*i8",
    },
}


def variants() -> list[tuple[str, str, dict[str, Any], int]]:
    """Return (label, operation.kernel, constants, warps), as the launchers call them."""
    out: list[tuple[str, str, dict[str, Any], int]] = []
    for words, panels in WIDTHS.items():
        for name, used in WAVEFRONT.items():
            unused = {"row_ptr", "history_ptr", "carry_ptr"} - {*used, *(["carry_ptr"] if panels else [])}
            constants = {"BLOCK_B": 1, "BLOCK_W": words, **dict.fromkeys(sorted(unused))}
            out.append((f"{name} {words}", "lcs._lcs_wavefront_kernel", constants, words // 32))
        extend = {"BLOCK_B": 1, "BLOCK_W": words}
        out.append((f"extend {words}", "lcs._lcs_extend_kernel", extend, words // 32))
    out.append(("walk", "lcs._lcs_walk_kernel", {"BLOCK_B": 1, "BLOCK_O": 256}, 1))
    out.append(("realign", "realign._realign_kernel", {"BLOCK_N": 1024}, 4))
    match = {"MAX_MATCH": 64, "BLOCK_N": 1024}
    for name, flags in (("prediction", True), ("context", False)):
        constants = {**match, "HAS_ANCHOR": flags, "FROM_START": flags}
        out.append((f"suffix_match {name}", "suffix_match._suffix_match_kernel", constants, 4))
    for K, warps in ((16, 1), (64, 1), (256, 4)):
        out.append((f"draft {K}", "draft._draft_kernel", {"K": K, "BLOCK_K": K}, warps))
    return out


def compile_all(targets: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return {kernel: {target: {"registers", "stack"}}}; stack is bytes of spills a thread."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    table: dict[str, dict[str, dict[str, int]]] = {}
    for label, kernel, constants, warps in variants():
        operation, name = kernel.split(".")
        fn = getattr(importlib.import_module(f"gpu_align.ops.{operation}.kernels"), name)
        signature = {
            arg: "constexpr"
            if arg in constants
            else TYPES[operation].get(arg, "*i32" if arg.endswith("_ptr") else "i32")
            for arg in fn.arg_names
        }
        source = ASTSource(fn=fn, signature=signature, constexprs=constants)
        for target in targets:
            done = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps})
            if target == "gfx942":
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
            assert found, f"{label}, {target}: no stack size in the binary"
            assert registers, f"{label}, {target}: no register count in the binary"
            row = {"registers": int(registers.group(1)), "stack": int(found.group(1))}
            table.setdefault(label, {})[target] = row
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
    # Older compilers accept every kernel, too, but the wide ones cost them registers that they do not have.
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
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

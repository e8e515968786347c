"""Registers and memory of each compiled kernel: ``python -m benchmarks.compiled.static_check [--write]``.

Each kernel is compiled for `TARGETS` as its launcher calls it; docs/developer/compiled-kernels.md has the fields
that are read from the binary and compared with benchmarks/results/static.json. Exit code 1: something differs, or
a kernel spills; every difference is named.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import tables
from benchmarks.compiled.launches import TARGETS, Launch, in_place_of_triton
from gpu_align import Drafter, Recipes
from gpu_align.ops.lcs import lcs_length, lcs_prefix_row

#: {kernel and constants: {target: {field: value}}}
Table = dict[str, dict[str, dict[str, Any]]]


def step(K: int, has_shapes: bool) -> None:
    """A prediction of several blocks that arrives, a long context, and a step."""
    shape_of = np.arange(1024, dtype=np.int32) if has_shapes else None
    recipes = Recipes.from_lists([([1], [2], [0.5])], shape_of=shape_of)
    drafter = Drafter(
        max_slots=2, max_context_len=2048, max_prediction_len=2048, num_draft_tokens=K, vocab_size=1024,
        device="cpu", backend="triton", recipes=recipes,
    )  # fmt: skip
    drafter.add(0, [1, 2, 3] * 400, 0)
    ones = torch.ones(2, dtype=torch.int32)
    drafter.total_len.copy_(ones)
    drafter.propose(torch.arange(2), ones, torch.zeros((2, 3), dtype=torch.int64))


def lcs(size: int, has_row: bool) -> None:
    """Predictions above 16k tokens go through in several panels."""
    lengths = torch.ones(1, dtype=torch.int32)
    context, prediction = (torch.zeros((1, n), dtype=torch.int32) for n in (64, size))
    (lcs_prefix_row if has_row else lcs_length)(context, lengths, prediction, lengths, backend="triton")


#: Name → a call that launches kernels; nothing runs.
LAUNCHES: dict[str, Callable[[], None]] = {
    **{f"step {K}": partial(step, K, K == 64) for K in (16, 64, 256)},
    **{f"lcs {size}": partial(lcs, size, size == 4096) for size in (1024, 4096, 32_768)},
}


def measure(targets: Collection[str], only: Collection[str] = ("",)) -> Table:
    """The rows of all launches whose name contains one of `only`."""
    table: Table = {}
    for target in targets:

        def take(launch: Launch, target: str = target) -> None:
            rows = table.setdefault(launch.label, {})
            row = read(launch.compiled)
            if rows.setdefault(target, row) != row:
                raise ValueError(f"label: expected different ones, found {launch.label!r} twice")

        with in_place_of_triton(target, take):
            for name, call in LAUNCHES.items():
                if any(part in name for part in only):
                    call()
    return table


def read(compiled: Any) -> dict[str, Any]:
    """The fields of a row."""
    if "amdgcn" in compiled.asm:
        text, names = compiled.asm["amdgcn"], (r"\.vgpr_count", r"\.private_segment_fixed_size")
    else:
        import triton

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text, names = subprocess.check_output(command, text=True), (r"\bREG", r"\bSTACK")
    registers, stack = (int(re.findall(rf"{name}:\s*(\d+)", text)[0]) for name in names)
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared}


def differences(expected: Table, found: Table, is_part: bool) -> list[str]:
    """A line for each row that differs, or that only one has. is_part: further rows of `expected` are none."""
    lines, targets = [], next(iter(found.values()))
    for label, target in product(found if is_part else {**expected, **found}, targets):
        a, b = (table.get(label, {}).get(target, {}) for table in (expected, found))
        if a != b:
            lines.append(f"{label}, {target}: {a or 'no row'} in the table, {b or 'no row'} now")
    return lines


def markdown(table: Table) -> str:
    """Rows down, targets across."""
    targets = list(next(iter(table.values())))
    rows = ([label, *map(_cell, row.values())] for label, row in table.items())
    return tables.table(["kernel", *targets], rows, "l" * (len(targets) + 1))


def _cell(row: dict[str, Any]) -> str:
    """Registers, shared memory."""
    spilt = f", {row['stack']} B stack" if row["stack"] else ""
    return f"{row['registers']}, {row['shared']} B{spilt}"


def uninterpreted() -> None:
    """Triton reads this when a kernel is decorated; under the interpreter there is nothing to compile."""
    os.environ.pop("TRITON_INTERPRET", None)


def main(
    renew: Annotated[bool, typer.Option("--write", help="renew the table of the installed Triton")] = False,
    target: Annotated[list[str] | None, typer.Option(help="only these; not with --write")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"of {', '.join(LAUNCHES)}; not with --write")
    ] = None,
) -> None:
    """Compile every kernel for four targets and compare the result with the committed table."""
    if (renew and (target or only)) or not {*(target or ())} <= TARGETS.keys():
        raise typer.BadParameter(
            f"targets are {', '.join(TARGETS)}; --write needs all of them, and every row"
        )
    uninterpreted()
    table = measure(target or TARGETS, only or [""])
    typer.echo(f"registers, shared memory\n\n{markdown(table)}")
    spills = [
        f"{label}, {target}: {row['stack']} bytes of stack a thread, expected 0"
        for label, rows in table.items()
        for target, row in rows.items()
        if row["stack"]
    ]
    import triton

    stored = tables.read("static")
    if renew:
        stored["triton"][triton.__version__] = table
        tables.write_json(tables.RESULTS / "static.json", stored)
    expected: Table | None = stored["triton"].get(triton.__version__)
    typer.echo(f"\ntriton {triton.__version__}{'' if expected else ', which has no table to compare with'}")
    wrong = spills + (differences(expected, table, bool(only)) if expected else [])
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

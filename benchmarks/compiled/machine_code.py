"""Every kernel's machine code, executed: ``python -m benchmarks.compiled.machine_code [--quick]``, without a GPU.

Kernels are compiled as their launchers call them, for each target of `BANKS`, and `racing` runs their instructions
on the tests' cases. Drafts **and all that is stored** have to be what reference and oracle say; races, accesses
outside of a tensor or unaligned, and shared memory that is read before it is written are findings.

``--write`` puts the rows of the installed Triton into the pages, beside those of other versions that ran the same
kernels: for another one, ``pip install --target DIR triton==3.6.0`` and PYTHONPATH=DIR. Exit code 1: something was
found.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple
from unittest import mock
from zlib import crc32

import torch
import typer

from benchmarks import tables
from benchmarks.compiled import static_check
from benchmarks.compiled.launches import OPS, Launch, in_place_of_triton
from benchmarks.compiled.racing import Findings, Machine, where
from benchmarks.compiled.sass import Program, disassemble
from benchmarks.compiled.sass_memory import BANKS

#: Cases that differ, and races, after which a run ends.
MOST_WRONG = 20


class Code(NamedTuple):
    """One compiled variant of a kernel, and what its runs found."""

    kernel: str
    program: Program
    findings: Findings


class Emulator:
    """Runs what Triton compiled for a target, in place of a launch.

    Args:
        target: a key of `BANKS`.
    """

    def __init__(self, target: str) -> None:
        #: Of the order in which programs, warps and branches go.
        self.target, self.rng = target, random.Random(0)
        self.codes: dict[str, Code] = {}
        #: Name of the kernel that was launched last.
        self.last = ""

    def __call__(self, launch: Launch) -> None:
        self.last, compiled = launch.kernel, launch.compiled
        if compiled.hash not in self.codes:
            program = disassemble(compiled.asm["cubin"])
            self.codes[compiled.hash] = Code(launch.kernel, program, Findings(program))
        code, made = self.codes[compiled.hash], compiled.metadata
        if 0 in launch.grid:
            return
        with launch.in_memory(self.target) as (memory, constants):
            machine = Machine(
                code.program, memory, constants, made.num_warps, shared_start=BANKS[self.target][1],
                shared_size=made.shared, findings=code.findings, seed=self.rng.randrange(2**32),
            )  # fmt: skip
            machine.run_grid(launch.grid)


# Cases: each raises AssertionError where anything differs.


def steps(rng: random.Random, K: int, has_shapes: bool, is_small: bool = False) -> None:
    """Batches of requests that arrive, leave, are preempted and repeat each other: drafts and all state. Those
    with long prompts, or all, have two slots. Their predictions are indexed by the reference; see `indices`."""
    from gpu_align.drafter import admission
    from gpu_align.ops.index import admit
    from tests.gpu_align.step_batch import Known, StepBatch

    def admit_rows(*args: Any) -> None:
        *given, num_rows, num_texts, longest, shift, backend = args
        admit(*given, num_rows, num_texts, longest, shift, "reference")
        admit(*given, num_rows, 0, 0, shift, backend)  # the same rows once more

    has_indents = rng.random() < 0.5

    def knows(known: Known) -> bool:
        """A small vocabulary has no indentation, ever."""
        indents = not has_indents or bool(known.line_ends and known.runs) or rng.random() < 0.05
        return indents and bool(known.shapes) == has_shapes

    capacity = rng.choice([0, 2500])
    slots = 2 if is_small or capacity else 0
    batch = StepBatch.draw(rng, K=K, capacity=capacity, max_slots=slots, knows=knows)
    with mock.patch.object(admission, "admit", admit_rows):
        for _ in range(rng.randint(1, 6)):
            for row in batch.random_step():
                assert not row.wrong, row.wrong


def lcs_of(rng: random.Random, m: int, n: int, block_words: int | None) -> None:
    """Length and prefix row, of ragged batches."""
    from tests.gpu_align.ops.test_lcs import check_all, make_batch

    batch = make_batch(rng.randrange(2**32), rng.randint(1, 4), m, n, rng.choice([2, 3, 5, 30]))
    check_all(batch, "triton", block_words)


def long_contexts(rng: random.Random) -> None:
    """The length alone, of contexts that a program of 1,024 threads numbers in turns."""
    from gpu_align.ops.lcs import lcs_length
    from tests.gpu_align.ops.test_lcs import make_batch, panels_of, put

    batch = make_batch(rng.randrange(2**32), 1, 4200, 60, 30)
    with panels_of(128):
        found = [lcs_length(*put(batch, name), backend=name).tolist() for name in ("triton", "reference")]
    assert found[0] == found[1]


def indices(rng: random.Random, bits: int, is_small: bool = False) -> None:
    """Predictions that arrive, with their indexes."""
    from tests.gpu_align.ops.test_suffix_index import check_index

    sizes = [rng.choice([1, 2, 255, 257, 1025, 2500, rng.randint(1, 3000)]) for _ in range(rng.randint(1, 3))]
    if is_small:
        sizes = [rng.choice([2, 1025])]
    texts = [
        [rng.choice([3, 3, rng.randrange(131_072), -5, 2**31 - 1]) for _ in range(max(size, 2 << bits))]
        for size in sizes
    ]
    check_index(texts, bits, "triton")


def written(rng: random.Random) -> None:
    """Tokens that the drafter writes to rows."""
    from tests.gpu_align.ops.test_append import check_append, check_contexts

    check_append(rng, "triton")
    check_contexts(rng, "triton")


#: Name → its cases.
CASES: dict[str, list[Callable[[random.Random], None]]] = {
    "step": [lambda rng, K=K, s=s: steps(rng, K, s) for K in (16, 64, 256) for s in (False, True)],
    "lcs": [
        lambda rng, m=m, n=n, w=w: lcs_of(rng, m, n, w)
        for m, n, w in ((9, 65, None), (80, 200, 2), (300, 1000, 8), (30, 5000, 128))
    ]
    + [long_contexts],
    "index": [*(lambda rng, bits=bits: indices(rng, bits) for bits in (0, 7, 11)), written],
}


def run_natively(name: str, i: int, seconds: float) -> dict[str, int]:
    """A case again and again as its tests run it: on the GPU, or interpreted. Returns a row's fields."""
    end, rounds = time.monotonic() + seconds, 0
    while not rounds or time.monotonic() < end:
        CASES[name][i](random.Random(f"{name} {i} {rounds}"))
        rounds += 1
    return {"rounds": rounds}


def run_cases(emulator: Emulator, turns: Sequence[int], seconds: float) -> dict[str, str]:
    """The `turns` of every case, or two at least until its share of `seconds` of the processor is over. It ends
    when `MOST_WRONG` differ. Returns case and turn → what differs."""
    wrong: dict[str, str] = {}
    with in_place_of_triton(emulator.target, emulator):
        for name, i in ((name, i) for name, cases in CASES.items() for i in range(len(cases))):
            share = (0.8 if name == "step" else 0.1) / len(CASES[name])
            end = time.process_time() + share * seconds
            for turn in turns:
                of = f"0 {name} {i} {turn}"
                torch.manual_seed(crc32(of.encode()))
                try:
                    CASES[name][i](random.Random(of))
                except (AssertionError, IndexError, NotImplementedError, RuntimeError) as error:
                    wrong[of] = f"{emulator.last}: {type(error).__name__}: {str(error)[:500]}"
                found = len(wrong) + any(code.findings.races for code in emulator.codes.values())
                if found >= MOST_WRONG or (turn != turns[0] and time.process_time() > end):
                    break
    return wrong


def rows_of(emulator: Emulator, wrong: dict[str, str]) -> dict[str, dict[str, int]]:
    """Kernel → the sums of its variants.

    differences: cases that did not end as they should. same_value: bytes that two threads stored without an order,
    with one value. reached, code: instructions of the binaries that ran, and all that are `entered`.
    """
    rows: dict[str, Counter[str]] = {}
    for kernel, program, found in sorted(emulator.codes.values(), key=lambda code: code.kernel):
        own, row = entered(program), rows.setdefault(kernel, Counter())
        row.update(
            variants=1, programs=found.programs, instructions=sum(found.reached), differences=0,
            races=len(found.races), same_value=found.same_value,
            reached=sum(found.reached[i] > 0 for i in own), code=len(own),
        )  # fmt: skip
        row["differences"] = sum(text.startswith(f"{kernel}:") for text in wrong.values())
    return dict(rows)


def entered(program: Program) -> set[int]:
    """Instructions that a branch or the one before leads to. Not padding after the end, and not the
    code after ``BRA.DIV`` for warps whose lanes are apart: the emulator refuses those."""
    found: set[int] = set()
    left = [0]
    while left:
        if (i := left.pop()) in found or i >= len(program.code):
            continue
        found.add(i)
        ins = program.code[i]
        is_divided = "DIV" in ins.modifiers
        if not is_divided:
            left += [
                program.labels[o.text] for o in ins.operands if o.kind == "L" and o.text in program.labels
            ]
        is_one_way = ins.name in ("BRA", "EXIT", "RET") and ins.guard is None and not is_divided
        if not is_one_way or (ins.name == "BRA" and (len(ins.operands) > 1 or "CONV" in ins.modifiers)):
            left.append(i + 1)
    return found


# Command line.


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few cases, sm_90")] = False,
    write: Annotated[bool, typer.Option("--write", help="put the rows into results and pages")] = False,
    target: Annotated[list[str] | None, typer.Option(help="one of several, instead of all")] = None,
    seconds: Annotated[float, typer.Option(help="of the processor, for each target")] = 1500.0,
) -> None:
    """Execute the machine code of every kernel beside its reference, in random order, and look for races."""
    static_check.uninterpreted()
    import triton

    torch.set_num_threads(1)
    if quick:  # the code of the third LCS is a program of two warps
        few = (16, False), (256, True)
        CASES["step"] = [lambda rng, K=K, s=s: steps(rng, K, s, is_small=True) for K, s in few]
        CASES["lcs"] = [*CASES["lcs"][:2], lambda rng: lcs_of(rng, 8, 600, 8)]
        CASES["index"][:3] = [lambda rng, bits=bits: indices(rng, bits, is_small=True) for bits in (0, 7)]
    version, is_wrong = triton.__version__, False
    for name in ["sm_90"] if quick else target or BANKS:
        emulator = Emulator(name)
        wrong = run_cases(emulator, range(1 if quick else 1_000_000), seconds)
        rows = rows_of(emulator, wrong)
        if write:
            store(version, name, rows)
        typer.echo(f"triton {version}, {name}\n\n{markdown(rows)}\n")
        for case, text in wrong.items():
            typer.echo(f"{case}: {text}", err=True)
        races, unreached = Counter[tuple[str, str, str]](), Counter[str]()
        for _, program, found in emulator.codes.values():
            races.update(found.races)
            unreached.update(where(program.code[i]) for i in entered(program) if not found.reached[i])
        for race, times in races.most_common():
            typer.echo(f"race, {times} bytes: {' ← '.join(race)}", err=True)
        partly = [kernel for kernel, row in rows.items() if row["reached"] < 0.98 * row["code"]]
        if partly and not quick:
            most = dict(unreached.most_common(12))
            typer.echo(f"reached less than 98 %: {', '.join(partly)}; most of it: {most}")
        is_wrong = is_wrong or bool(wrong or races)
    if write:
        subprocess.run([sys.executable, tables.DOCS / "_scripts" / "fill_numbers.py"], check=True)
    if is_wrong:
        raise typer.Exit(1)


def store(version: str, target: str, rows: dict[str, dict[str, int]]) -> None:
    """Put the rows beside those of other targets and versions, as far as these are of the same kernels."""
    stored, sources = (
        tables.read("machine_code"),
        b"".join(p.read_bytes() for p in sorted(OPS.glob("*/kernel.py"))),
    )
    if stored.get("kernels") != (kernels := f"{crc32(sources):08x}"):
        stored = {"made_by": stored["made_by"], "kernels": kernels, "triton": {}}
    stored["triton"].setdefault(version, {})[target] = {
        kernel: {"kernel": kernel, **row} for kernel, row in rows.items()
    }
    tables.write_json(tables.RESULTS / "machine_code.json", stored)


def markdown(rows: dict[str, dict[str, int]]) -> str:
    """The table of a target."""
    shown = "variants", "programs", "instructions", "differences", "races"
    cells = {kernel: [f"{row[name]:,}" for name in shown] for kernel, row in rows.items()}
    reached = {kernel: f"{row['reached'] / row['code']:.1%}" for kernel, row in rows.items()}
    heads = "kernel", *shown, "code reached"
    return tables.table(heads, ([kernel, *cells[kernel], reached[kernel]] for kernel in rows))


if __name__ == "__main__":
    typer.run(main)

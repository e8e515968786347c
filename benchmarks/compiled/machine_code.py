"""Every kernel's machine code, executed: ``python -m benchmarks.compiled.machine_code [--quick]``, without a GPU.

Kernels are compiled as their launchers call them, for each of `TARGETS`, and stand in the place of Triton's: what
launches them does so unchanged, and `racing` runs their instructions on tensors of the CPU. The cases are those of
the tests: batches of requests that arrive, leave and repeat each other, in garbage. Drafts **and all that is
stored** have to be what reference and oracle say; races, accesses outside of a tensor or unaligned, and shared
memory that is read before it is written are findings. So are instructions that no case reached, if they are more
than 2 %.

``--write`` puts the rows of the installed Triton into the pages, beside those of other versions: for another one,
``pip install --target DIR triton==3.6.0`` and PYTHONPATH=DIR. Exit code 1: something was found.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import torch
import typer

from benchmarks import tables
from benchmarks.compiled import static_check
from benchmarks.compiled.racing import Findings, RacingMachine, where
from benchmarks.compiled.sass import Program, disassemble
from benchmarks.compiled.sass_warp import Memory, constant_bank, flat

#: Target → where shared memory begins.
TARGETS = {"sm_80": 0, "sm_90": 0x400, "sm_100": 0x400}
#: Shares of a run's time; those that are not here have one.
WEIGHTS = {"step": 8}


@dataclass
class Code:
    """One compiled variant of a kernel, and what its runs found."""

    label: str
    program: Program
    #: Those of the kernel that are in constant bank 0.
    arguments: list[str]
    shared: int
    num_warps: int
    findings: Findings


class Emulator:
    """Lets Triton compile kernels for a target, as for a launch, and runs what it made.

    Args:
        target: a key of `TARGETS`.
        seed: of the order in which programs, warps and branches go.
        runs: else it only compiles, into Triton's cache.
    """

    def __init__(self, target: str, seed: int, runs: bool = True) -> None:
        self.target, self.rng, self.runs = target, random.Random(seed), runs
        self.codes: dict[str, Code] = {}
        self.compiled: set[str] = set()
        #: Name of the kernel that was launched last.
        self.last = ""

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Any, by_name: dict[str, Any]) -> None:
        self.last = kernel.fn.__name__
        compiled = kernel.warmup(*args, grid=grid, **by_name)
        if not self.runs:
            self.compiled.add(compiled.hash)
            return
        if compiled.hash not in self.codes:
            self.codes[compiled.hash] = self._code_of(kernel, compiled)
        if 0 not in grid:
            given = {**dict(zip(kernel.arg_names, args, strict=False)), **by_name}
            self._run(self.codes[compiled.hash], given, (*grid, 1)[:2])

    def _code_of(self, kernel: Any, compiled: Any) -> Code:
        names, constants = kernel.arg_names, compiled.src.constants
        sizes = [f"{names[i]} {value}" for (i,), value in constants.items() if names[i].isupper()]
        arguments = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
        code, made = disassemble(compiled.asm["cubin"]), compiled.metadata
        return Code(
            ", ".join([kernel.fn.__name__, *sizes]),
            code,
            arguments,
            made.shared,
            made.num_warps,
            Findings(code),
        )

    def _run(self, code: Code, given: dict[str, Any], grid: tuple[int, int]) -> None:
        arguments = list(flat({name: given[name] for name in code.arguments}).values())
        tensors = [arg for arg in arguments if isinstance(arg, torch.Tensor)]
        # Views share their memory: a storage is laid out once.
        storages = {t.untyped_storage().data_ptr(): _bytes_of(t) for t in tensors}
        memory = Memory(list(storages.values()))
        begins = {pointer: memory.address(i) for i, pointer in enumerate(storages)}

        def placed(arg: Any) -> tuple[int, int]:
            if not isinstance(arg, torch.Tensor):
                return int(arg), 4
            pointer = arg.untyped_storage().data_ptr()
            return begins[pointer] + arg.data_ptr() - pointer, 8

        bank = constant_bank(self.target, map(placed, arguments))
        machine = RacingMachine(
            code.program, memory, bank, code.num_warps, shared_start=TARGETS[self.target], shared_size=code.shared,
            findings=code.findings, seed=self.rng.randrange(2**32),
        )  # fmt: skip
        machine.run_grid(grid)
        for own, array in zip(storages.values(), memory.arrays, strict=True):
            own[:] = array


def _bytes_of(t: torch.Tensor) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()


class EmulatedKernel:
    """In the place of a ``@triton.jit`` function."""

    def __init__(self, kernel: Any, emulator: Emulator) -> None:
        self.kernel, self.emulator = kernel, emulator
        self.fn, self.arg_names, self.params = kernel.fn, kernel.arg_names, kernel.params

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **by_name: self.emulator.launch(self.kernel, grid, args, by_name)


@contextmanager
def in_place_of_triton(emulator: Emulator) -> Iterator[None]:
    """Every launch of a kernel goes to `emulator`, on CPU tensors."""
    from triton.runtime import driver

    from benchmarks.compiled.host_cost import NoDevice
    from gpu_align.ops import lcs

    # Triton keeps what it compiled by the number of a device.
    driver.set_active(NoDevice(static_check.target_of(emulator.target), int(emulator.target[3:])))
    kernels = static_check.find_kernels()
    # The backend "triton" takes CPU tensors where Triton interprets. Kernels are compiled ones by now.
    with patch.dict(os.environ, TRITON_INTERPRET="1"), patch.object(lcs, "_INTERPRETER_REQUESTS", 1):
        try:
            for name, kernel in kernels.items():
                setattr(_module(name), name.split(".")[1], EmulatedKernel(kernel, emulator))
            yield
        finally:
            for name, kernel in kernels.items():
                setattr(_module(name), name.split(".")[1], kernel)


def _module(name: str) -> Any:
    return importlib.import_module(f"gpu_align.ops.{name.split('.')[0]}.kernel")


# Cases: each raises AssertionError where anything differs.


def steps(rng: random.Random, K: int, has_shapes: bool, is_small: bool = False) -> None:
    """Batches of requests that arrive, leave, are preempted and repeat each other: drafts and all state. Those
    with long prompts, or all, have two slots."""
    from tests.gpu_align.step_batch import Known, StepBatch

    has_indents = rng.random() < 0.5

    def knows(known: Known) -> bool:
        """A small vocabulary has no indentation, ever."""
        indents = not has_indents or bool(known.line_ends and known.runs) or rng.random() < 0.05
        return indents and bool(known.shapes) == has_shapes

    capacity = rng.choice([0, 2500])
    slots = 2 if is_small or capacity else 0
    batch = StepBatch.draw(rng, K=K, capacity=capacity, max_slots=slots, knows=knows)
    for _ in range(rng.randint(1, 6)):
        for row in batch.random_step():
            assert not row.wrong, row.wrong


def lcs_of(rng: random.Random, m: int, n: int, block_words: int | None) -> None:
    """Length and prefix row, of ragged batches."""
    from tests.gpu_align.ops.test_lcs import check_all, make_batch

    check_all(
        make_batch(rng.randrange(2**32), rng.randint(1, 4), m, n, rng.choice([2, 3, 5, 30])),
        "triton",
        block_words,
    )


def long_contexts(rng: random.Random) -> None:
    """The length alone, of contexts that a program of 1,024 threads numbers in turns."""
    from gpu_align.ops.lcs import lcs_length
    from tests.gpu_align.ops.test_lcs import make_batch, put

    batch = make_batch(rng.randrange(2**32), 1, 4200, 60, 30)
    found, same = (
        lcs_length(*put(batch, backend), backend=backend, block_words=128)
        for backend in ("triton", "reference")
    )
    assert found.tolist() == same.tolist()


def indices(rng: random.Random, bits: int) -> None:
    from tests.gpu_align.ops.test_suffix_index import check_index

    size = rng.choice([1, 2, 255, 257, 1025, 2500, rng.randint(1, 3000)])
    check_index(
        [rng.choice([3, 3, rng.randrange(131_072), -5, 2**31 - 1]) for _ in range(size)], bits, "triton"
    )


#: Name → its cases.
CASES: dict[str, list[Callable[[random.Random], None]]] = {
    "step": [lambda rng, K=K, s=s: steps(rng, K, s) for K in (16, 64, 256) for s in (False, True)],
    "lcs": [
        lambda rng, m=m, n=n, w=w: lcs_of(rng, m, n, w)
        for m, n, w in ((9, 65, None), (80, 200, 2), (300, 1000, 8), (30, 5000, 128))
    ]
    + [long_contexts],
    "index": [lambda rng, bits=bits: indices(rng, bits) for bits in (0, 11, 16)],
}


def compile_cases(target: str, name: str) -> dict[str, int]:
    """Compile what a kind of cases launches, for a GPU that need not be there. Returns a row's fields."""
    emulator = Emulator(target, 0, runs=False)
    run_cases(emulator, [name], range(2), 0, most_wrong=10**9)  # nothing is computed: everything is wrong
    return {"compiled": len(emulator.compiled)}


def run_natively(name: str, i: int, seconds: float) -> dict[str, int]:
    """A case again and again as its tests run it: on the GPU, or interpreted. Returns a row's fields."""
    end, rounds = time.monotonic() + seconds, 0
    while not rounds or time.monotonic() < end:
        CASES[name][i](random.Random(f"{name} {i} {rounds}"))
        rounds += 1
    return {"rounds": rounds}


#: Instead of all, for a quick run; the code of this LCS is a program of two warps.
SMALL_LCS = [lambda rng: lcs_of(rng, 8, 600, 8)]
SMALL_STEPS = [lambda rng, K=K, s=s: steps(rng, K, s, is_small=True) for K, s in ((16, False), (256, True))]


class Row(NamedTuple):
    """What the runs of a kernel found, all its variants together.

    Attributes:
        differences: cases of it that did not end as they should.
        instructions: that were executed, of any warp.
        reached, code: instructions of the binaries that ran, and all that are `entered`.
        same_value: bytes that two threads stored without an order, with one value.
    """

    kernel: str
    variants: int
    programs: int
    instructions: int
    differences: int
    races: int
    same_value: int
    reached: int
    code: int


class Outcome(NamedTuple):
    """wrong: case and seed → what differs; rows: by kernel; races and unreached: where in the sources."""

    wrong: dict[str, str]
    rows: list[Row]
    races: Counter[tuple[str, str, str]]
    unreached: Counter[str]


def run_cases(
    emulator: Emulator, names: Collection[str], turns: Sequence[int], seed: int, seconds: float = float("inf"),
    most_wrong: int = 20,
) -> Outcome:  # fmt: skip
    """The `turns` of every case, or two at least until its share of `seconds` of the processor is over."""
    wrong: dict[str, str] = {}
    variants = [(name, i) for name in names for i in range(len(CASES[name]))]
    with in_place_of_triton(emulator):
        for name, i in variants:
            share = WEIGHTS.get(name, 1) / len(CASES[name]) / sum(WEIGHTS.get(n, 1) for n in names)
            end = time.process_time() + share * seconds
            for turn in turns:
                of = f"{seed} {name} {i} {turn}"
                torch.manual_seed(crc32(of.encode()))
                try:
                    CASES[name][i](random.Random(of))
                except (AssertionError, IndexError, NotImplementedError, RuntimeError) as error:
                    wrong[of] = f"{emulator.last}: {type(error).__name__}: {str(error)[:500]}"
                found = len(wrong) + any(code.findings.races for code in emulator.codes.values())
                if found >= most_wrong or (turn != turns[0] and time.process_time() > end):
                    break
    return _outcome(emulator, wrong)


def _outcome(emulator: Emulator, wrong: dict[str, str]) -> Outcome:
    races: Counter[tuple[str, str, str]] = Counter()
    unreached: Counter[str] = Counter()
    rows: dict[str, Row] = {}
    for code in emulator.codes.values():
        found = code.findings
        own = sorted(entered(code.program))
        kernel = code.label.partition(",")[0]
        differences = sum(text.startswith(f"{kernel}:") for text in wrong.values())
        row = Row(
            kernel, 1, found.programs, found.instructions, differences, len(found.races), found.same_value,
            sum(found.reached[i] > 0 for i in own), len(own),
        )  # fmt: skip
        before = rows.get(kernel, Row(kernel, *[0] * 8))
        rows[kernel] = Row(kernel, *map(sum, zip(before[1:], row[1:], strict=True)))._replace(
            differences=row.differences
        )
        races.update(found.races)
        unreached.update(where(code.program.code[i]) for i in own if not found.reached[i])
    return Outcome(wrong, sorted(rows.values()), races, unreached)


def entered(program: Program) -> set[int]:
    """Instructions that a branch or the one before leads to. Not padding behind the end, and not what is behind
    ``BRA.DIV``: for warps whose lanes are apart, of which the emulator says that there is none."""
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
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, sm_100; all unless told")] = None,
    only: Annotated[list[str] | None, typer.Option(help="of the cases: step, lcs, index")] = None,
    seconds: Annotated[float, typer.Option(help="for each target")] = 450.0,
    seed: Annotated[int, typer.Option(help="of cases and schedules")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="few cases, sm_90")] = False,
    write: Annotated[bool, typer.Option("--write", help="put the rows into results and pages")] = False,
) -> None:
    """Execute the machine code of every kernel beside its reference, in random order, and look for races."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is decorated
    import triton

    torch.set_num_threads(1)
    targets = static_check.chosen_targets(target or (["sm_90"] if quick else None), TARGETS, False)
    names = only or list(CASES)
    if quick:
        CASES["lcs"], CASES["step"] = [*CASES["lcs"][:2], *SMALL_LCS], SMALL_STEPS
        CASES["index"] = CASES["index"][:2]
    version, is_wrong = triton.__version__, False
    for chosen in targets:
        outcome = run_cases(Emulator(chosen, seed), names, range(2 if quick else 1_000_000), seed, seconds)
        stored = tables.read("machine_code")
        of = stored["triton"].setdefault(version, {}).setdefault(chosen, {})
        of |= {row.kernel: row._asdict() for row in outcome.rows}
        if write:
            (tables.RESULTS / "machine_code.json").write_text(
                tables.as_json(stored, depth=4), encoding="utf-8"
            )
        typer.echo(f"triton {version}, {chosen}\n\n{markdown(outcome.rows)}\n")
        for of, text in outcome.wrong.items():
            typer.echo(f"{of}: {text}", err=True)
        for race, times in outcome.races.most_common():
            typer.echo(f"race, {times} bytes: {' ← '.join(race)}", err=True)
        few = [row.kernel for row in outcome.rows if row.reached < 0.98 * row.code]
        if few and not quick:
            most = dict(outcome.unreached.most_common(12))
            typer.echo(f"reached less than 98 %: {', '.join(few)}; most of it: {most}")
        is_wrong = is_wrong or bool(outcome.wrong or outcome.races)
    if write:
        subprocess.run([sys.executable, tables.DOCS / "_scripts" / "fill_numbers.py"], check=True)
    if is_wrong:
        raise typer.Exit(1)


def markdown(rows: list[Row]) -> str:
    """The table of a target."""
    heads = "kernel", "variants", "programs", "instructions", "differences", "races", "code reached"
    return tables.table(
        heads,
        [
            (
                *row[:2],
                f"{row.programs:,}",
                f"{row.instructions:,}",
                row.differences,
                row.races,
                f"{100 * row.reached / max(row.code, 1):.1f} %",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    typer.run(main)

"""Every kernel's machine code, executed: ``python -m benchmarks.speed.machine_code [--quick]``, without a GPU.

Kernels are compiled as their launchers call them, for each of `TARGETS`, and stand in the place of Triton's: what
launches them does so unchanged, and `racing` runs their instructions on tensors of the CPU. The cases are those of
the tests: batches of requests that arrive, leave and repeat each other, in garbage. Drafts **and all that is
stored** have to be what reference and oracle say; races, accesses outside of a tensor or unaligned, and shared
memory that is read before it is written are findings. So are instructions that no case reached, if they are more
than 2 %.

``--plant`` breaks the machine code instead, a barrier, an atomic or a bound at a time, and tells which of these
faults were found. Exit code 1: something was found, or a planted fault was not.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer

from benchmarks import tables
from benchmarks.speed import static_check
from benchmarks.speed.racing import Findings, RacingMachine, where
from benchmarks.speed.sass import Instruction, Program, disassemble
from benchmarks.speed.sass_warp import STACK, Memory

#: Target → where a kernel's arguments begin in constant bank 0, where the stack pointer stands in it, and where
#: shared memory begins.
TARGETS = {"sm_80": (0x160, 0x28, 0), "sm_90": (0x210, 0x28, 0x400), "sm_100": (0x380, 0x37C, 0x400)}
#: Wrong cases after which a run does not look for more.
MOST_WRONG = 20
_TYPES = {
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}
#: Shares of a run's time; those that are not here have one.
WEIGHTS = {"step": 8}


@dataclass
class Code:
    """One compiled variant of a kernel, and what its runs found."""

    label: str
    program: Program
    shared: int
    num_warps: int
    findings: Findings = field(default_factory=Findings)


class Emulator:
    """Compiles kernels for a target and runs their launches.

    Args:
        target: a key of `TARGETS`.
        seed: of the order in which programs, warps and branches go.
    """

    def __init__(self, target: str, seed: int) -> None:
        self.target, self.rng = target, random.Random(seed)
        self.codes: dict[Any, Code] = {}
        #: Name of the kernel that was launched last.
        self.last = ""

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Any, by_name: dict[str, Any]) -> None:
        num_warps, registers = by_name.pop("num_warps", 4), by_name.pop("maxnreg", 0)
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **by_name}
        source = _source_of(kernel, given)
        self.last = kernel.fn.__name__
        key = self.last, repr(source), num_warps, registers
        if key not in self.codes:
            self.codes[key] = self._compile(kernel, source, num_warps, registers)
        code = self.codes[key]
        arguments = {name: given[name] for name in kernel.arg_names if source[0][name] != "constexpr"}
        if 0 not in grid:
            self._run(code, arguments, (*grid, 1)[:2])

    def _compile(self, kernel: Any, source: Any, num_warps: int, registers: int) -> Code:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, attrs = source
        options = {"num_warps": num_warps, **({"maxnreg": registers} if registers else {})}
        target = GPUTarget(*static_check.TARGETS[self.target])
        done = triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)
        sizes = [
            f"{name} {value}" for name, value in constants.items() if name.isupper() and value is not None
        ]
        label = f"{kernel.fn.__name__}, {', '.join(sizes)}"
        return Code(label, disassemble(done.asm["cubin"]), done.metadata.shared, num_warps)

    def _run(self, code: Code, arguments: dict[str, Any], grid: tuple[int, int]) -> None:
        tensors = [arg for arg in arguments.values() if isinstance(arg, torch.Tensor)]
        # Views share their memory: a storage is laid out once.
        storages = {t.untyped_storage().data_ptr(): _bytes_of(t) for t in tensors}
        memory = Memory(list(storages.values()))
        begins = {pointer: memory.address(i) for i, pointer in enumerate(storages)}
        start, stack, shared_start = TARGETS[self.target]
        bank = bytearray(4096)
        bank[stack : stack + 4] = STACK.to_bytes(4, "little")
        for arg in arguments.values():
            value, size = arg, 4
            if isinstance(arg, torch.Tensor):
                pointer = arg.untyped_storage().data_ptr()
                value, size = begins[pointer] + arg.data_ptr() - pointer, 8
            start = -(-start // size) * size
            bank[start : start + size] = (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
            start += size
        RacingMachine(
            code.program, memory, bytes(bank), code.num_warps, shared_start=shared_start,
            shared_size=code.shared, findings=code.findings, seed=self.rng.randrange(2**32),
        ).run_grid(grid)  # fmt: skip
        for own, array in zip(storages.values(), memory.arrays, strict=True):
            own[:] = array


def _bytes_of(t: torch.Tensor) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()


def _source_of(kernel: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """``(signature, constants, attrs)`` as Triton's own launcher makes them."""
    signature, constants, attrs = {}, {}, {}
    for i, p in enumerate(kernel.params):
        value = given[p.name]
        if p.is_constexpr or value is None or (not p.do_not_specialize and _is_one(value)):
            signature[p.name], constants[p.name] = "constexpr", value
            continue
        signature[p.name] = _TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        number = value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
        if not p.do_not_specialize and not p.do_not_specialize_on_alignment and number % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attrs


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


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
    from gpu_align.ops import lcs

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
    return importlib.import_module(f"gpu_align.ops.kernels.{name.split('.')[0]}")


# Cases: each raises AssertionError where anything differs.


def steps(rng: random.Random, K: int) -> None:
    """Batches of requests that arrive, leave, are preempted and repeat each other: drafts and all state."""
    from tests.gpu_align.step_batch import StepBatch

    batch = StepBatch.draw(rng, K=K)
    for _ in range(rng.randint(1, 6)):
        for row in batch.random_step():
            assert not row.wrong, row.wrong


def lcs_of(rng: random.Random, m: int, n: int, block_words: int | None) -> None:
    """Length, prefix row and edit script, of ragged batches."""
    from tests.gpu_align.ops.test_lcs import check_all, make_batch

    check_all(
        make_batch(rng.randrange(2**32), rng.randint(1, 4), m, n, rng.choice([2, 3, 5, 30])),
        "triton",
        block_words,
    )


def scans(rng: random.Random) -> None:
    from tests.gpu_align.ops.test_suffix_match import random_rows

    for row in random_rows(rng.randrange(2**32), rng.randint(1, 4)):
        assert row["holds"], row


def indices(rng: random.Random, bits: int) -> None:
    from tests.gpu_align.ops.test_suffix_index import check_index

    size = rng.choice([1, 2, 255, 257, 1025, 2500])
    check_index(
        [rng.choice([3, 3, rng.randrange(131_072), -5, 2**31 - 1]) for _ in range(size)], bits, "triton"
    )


def budgets(rng: random.Random, least_b: int, least_k: int) -> None:
    """Of sizes for which one variant is compiled: up to a power of two of requests, below one of drafts."""
    B, K = rng.randint(least_b, 2 * least_b - 2), rng.randint(least_k, 2 * least_k - 1)
    from tests.gpu_align.ops.test_draft_budget import drafts, expected, limit

    rows = [
        sorted(
            (rng.choice([0.0, 0.25, 0.9, 1.0, rng.random()]) for _ in range(rng.randint(0, K))), reverse=True
        )
        for _ in range(B)
    ]
    budget = rng.choice([0, 1, B, B * K // 3, B * K])
    assert limit(drafts(rows, "cpu", K=K), budget, "triton").length.tolist() == expected(rows, budget)


#: Name → its cases.
CASES: dict[str, list[Callable[[random.Random], None]]] = {
    "step": [lambda rng, K=K: steps(rng, K) for K in (16, 64, 256)],
    "lcs": [
        lambda rng, m=m, n=n, w=w: lcs_of(rng, m, n, w)
        for m, n, w in ((9, 65, None), (12, 200, 2), (40, 1000, 8), (30, 5000, 128))
    ],
    "suffix match": [scans],
    "index": [lambda rng, bits=bits: indices(rng, bits) for bits in (0, 9, 16)],
    "budget": [lambda rng, B=B, K=K: budgets(rng, B, K) for B, K in ((17, 16), (129, 4))],
}


class Row(NamedTuple):
    """What the runs of a kernel found, all its variants together.

    Attributes:
        differences: cases of it that did not end as they should.
        instructions: that were executed, of any warp.
        reached, code: instructions of the binaries that ran, and all but padding.
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
    emulator: Emulator, names: Collection[str], rounds: int, seed: int, seconds: float = float("inf")
) -> Outcome:
    """Every case `rounds` times, or twice at least until its share of `seconds` is over."""
    wrong = {}
    variants = [(name, i) for name in names for i in range(len(CASES[name]))]
    with in_place_of_triton(emulator):
        for name, i in variants:
            share = WEIGHTS.get(name, 1) / len(CASES[name]) / sum(WEIGHTS.get(n, 1) for n in names)
            end = time.monotonic() + share * seconds
            for turn in range(rounds):
                of = f"{seed} {name} {i} {turn}"
                try:
                    CASES[name][i](random.Random(of))
                except (AssertionError, IndexError, NotImplementedError, RuntimeError) as error:
                    wrong[of] = f"{emulator.last}: {type(error).__name__}: {str(error)[:500]}"
                if turn and (time.monotonic() > end or len(wrong) >= MOST_WRONG):
                    break
    return _outcome(emulator, wrong)


def _outcome(emulator: Emulator, wrong: dict[str, str]) -> Outcome:
    races: Counter[tuple[str, str, str]] = Counter()
    unreached: Counter[str] = Counter()
    rows: dict[str, Row] = {}
    for code in emulator.codes.values():
        found = code.findings
        own = [i for i, ins in enumerate(code.program.code) if not _is_padding(ins)]
        kernel = code.label.partition(",")[0]
        differences = sum(text.startswith(f"{kernel}:") for text in wrong.values())
        row = Row(
            kernel, 1, found.programs, found.instructions, differences, len(found.races), found.same_value,
            len(set(own) & set(found.reached)), len(own),
        )  # fmt: skip
        before = rows.get(kernel, Row(kernel, *[0] * 8))
        rows[kernel] = Row(kernel, *map(sum, zip(before[1:], row[1:], strict=True)))._replace(
            differences=row.differences
        )
        races.update(found.races)
        unreached.update(where(code.program.code[i]) for i in own if i not in found.reached)
    return Outcome(wrong, sorted(rows.values()), races, unreached)


def _is_padding(ins: Instruction) -> bool:
    """Behind a kernel's end: a branch to itself, and nothing."""
    return ins.name == "NOP" or (ins.name == "BRA" and not ins.lines)


# Planted faults.


def plants(program: Program, rng: random.Random, comparisons: int) -> Iterator[tuple[str, Program]]:
    """Programs with a fault each: every barrier left out, every atomic a store, some comparisons moved by one."""
    code = program.code
    turned = {"GE": "GT", "GT": "GE", "LT": "LE", "LE": "LT"}
    bounds = [i for i, ins in enumerate(code) if ins.name == "ISETP" and ins.modifiers[0] in turned]
    for i, ins in enumerate(code):
        if ins.name == "BAR":
            yield f"barrier left out: {where(ins)}", _with(program, i, name="NOP")
        elif ins.name in ("RED", "REDG"):
            yield f"atomic is a store: {where(ins)}", _with(program, i, name="STG")
    for i in sorted(rng.sample(bounds, min(comparisons, len(bounds)))):
        ins = code[i]
        moved = (turned[ins.modifiers[0]], *ins.modifiers[1:])
        yield f"bound moved by one: {where(ins)}", _with(program, i, modifiers=moved)


def _with(program: Program, i: int, **changes: Any) -> Program:
    code = list(program.code)
    code[i] = replace(code[i], **changes)
    return Program(code, program.labels)


class Planted(NamedTuple):
    """A fault, and what was reported: empty where nothing was."""

    kernel: str
    fault: str
    reported: str


def plant_faults(
    target: str, name: str, case: int, rounds: int, seed: int, comparisons: int
) -> Iterator[Planted]:
    """Every fault of `plants` in every kernel that a case launches with more than one warp or an atomic."""
    with patch.dict(CASES, {name: [CASES[name][case]]}):
        sound = Emulator(target, seed)
        run_cases(sound, [name], rounds, seed)
        for key, code in sound.codes.items():
            for fault, program in plants(code.program, random.Random(seed), comparisons):
                broken = Emulator(target, seed)
                broken.codes = {k: replace(c, findings=Findings()) for k, c in sound.codes.items()}
                broken.codes[key] = replace(broken.codes[key], program=program)
                found = run_cases(broken, [name], rounds, seed)
                reported = [*(" ← ".join(race) for race in found.races), *found.wrong.values()]
                yield Planted(code.label, fault, reported[0] if reported else "")


# Command line.


def main(
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, sm_100; all unless told")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="of the cases: step, lcs, suffix match, index, budget")
    ] = None,
    seconds: Annotated[float, typer.Option(help="for each target, compiling included")] = 600.0,
    seed: Annotated[int, typer.Option(help="of cases and schedules")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="few cases, sm_90")] = False,
    plant: Annotated[int | None, typer.Option(help="plant faults instead: with so many moved bounds")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="add the rows to this file")] = None,
) -> None:
    """Execute the machine code of every kernel beside its reference, in random order, and look for races."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is decorated
    import triton

    torch.set_num_threads(1)
    targets = static_check.chosen_targets(target or (["sm_90"] if quick else None), TARGETS, False)
    names = only or list(CASES)
    if quick:
        CASES["lcs"], CASES["step"] = CASES["lcs"][:2], CASES["step"][::2]
    version, is_wrong, rows = triton.__version__, False, {}
    for chosen in targets:
        if plant is not None:
            verdicts: Counter[str] = Counter()
            for name, case in [(of, i) for of in names for i in range(len(CASES[of]))]:
                for found in plant_faults(chosen, name, case, 3, seed, plant):
                    verdict = "found" if found.reported else "MISSED"
                    verdicts[verdict] += 1
                    typer.echo(f"{verdict}: {found.kernel}: {found.fault}: {found.reported[:160]}")
            typer.echo(f"{chosen}: {verdicts['found']} of {verdicts.total()} planted faults found")
            continue
        outcome = run_cases(Emulator(chosen, seed), names, 2 if quick else 1_000_000, seed, seconds)
        rows[chosen] = outcome.rows
        typer.echo(f"triton {version}, {chosen}\n\n{markdown(outcome.rows)}\n")
        for of, text in outcome.wrong.items():
            typer.echo(f"{of}: {text}", err=True)
        for race, times in outcome.races.most_common():
            typer.echo(f"race, {times} bytes: {' ← '.join(race)}", err=True)
        few = [row.kernel for row in outcome.rows if row.reached < 0.98 * row.code]
        if few and not quick:
            typer.echo(
                f"reached less than 98 %: {', '.join(few)}; most of it: {dict(outcome.unreached.most_common(12))}"
            )
        is_wrong = is_wrong or bool(outcome.wrong or outcome.races)
    if json_path is not None:
        found = {t: {r.kernel: r._asdict() for r in of} for t, of in rows.items()}
        static_check.write(version, {**(static_check.stored(version, json_path) or {}), **found}, json_path)
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

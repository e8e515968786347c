"""Cycles of a step and of the exact LCS from the compiled code, without a GPU: docs/developer/compiled-kernels.md.

Compiles the kernels as their launchers call them, disassembles the binaries (`sass`) and runs them (`sass_warp`)
on requests in the states of `PATHS`. So loops take as many turns, and branches go, as they do on a GPU. Drafts
and lengths must be the reference's.

The model goes once a GPU has timed a step.

One program alone, in order, with its instructions in the cache and the latencies of `sass_warp.Latencies`; sm_100
has its own code, but the latencies and multiprocessors of sm_90. Not in it: misses of the instruction cache, other
programs on the same multiprocessor (but for the throughput of the LCS), queues of the memory. Of 8k tokens to be
folded again, and of contexts of the LCS, a part is run and the rest taken to cost as much for each token.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import typer

from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, VOCAB_SIZE, make_recipes, make_texts
from benchmarks.compiled import static_check
from benchmarks.compiled.kernel_configs import Config
from benchmarks.compiled.sass import Program, disassemble
from benchmarks.compiled.sass_warp import Latencies, Machine, Memory, Trace, constant_bank, flat
from benchmarks.tables import RESULTS
from gpu_align import Drafter, Recipes

NUM_TEXT = 32_768
Tokens = npt.NDArray[np.int32]


class Situation(NamedTuple):
    """A request before and after the tokens of a step.

    output: its tokens, as far as they are written after the step. steps: lengths of the output at which steps ran
    before.
    """

    prediction: Tokens
    output: Tokens
    steps: tuple[int, ...]
    prompt: Tokens = np.zeros(0, np.int32)


#: The last token of every output: one that each text of `make_texts` has about 330 times, more than are looked at.
OFTEN = 7


def aligned(new: int) -> Situation:
    """In sync since its beginning, `new` tokens more."""
    texts = make_texts(1, NUM_TEXT, "aligned")
    prediction = texts.predictions[0].copy()
    prediction[texts.done + new - 1] = OFTEN
    return Situation(prediction, prediction[: texts.done + new], (texts.done,))


def lost(new: int, done: int) -> Situation:
    """Diverged at once and never in sync again: `done` tokens, and `new` more."""
    texts = make_texts(1, NUM_TEXT, "lost")
    output = texts.outputs[0][: done + new].copy()
    output[-1] = OFTEN
    return Situation(texts.predictions[0], output, (done,) if done else ())


def repeated(new: int) -> Situation:
    """Lost, and its last 64 tokens were written 200 tokens ago: the longest match, in its own context."""
    path = lost(new, NUM_TEXT // 2)
    path.output[-201] = OFTEN
    path.output[-64 - new :] = path.output[-264 - new : -200]
    return path


def edited(new: int) -> Situation:
    """Four edits of two tokens each are behind it; in sync again, `new` tokens more."""
    path = aligned(new)
    output = path.output.copy()
    end = len(output) - new
    for at in range(end - 200, end - 40, 40):
        output[at : at + 2] = 50_000 + at
    return Situation(path.prediction, output, tuple(range(end - 208, end + 1, 8)))


def resynced(new: int) -> Situation:
    """The first two of `new` tokens differ from the prediction; then it is in sync again: an edit is recorded."""
    path = aligned(new)
    output = path.output.copy()
    output[-new : 2 - new] = 50_000
    return path._replace(output=output)


def first_step(num_prompt: int, is_prepared: bool) -> Situation:
    """The first step behind a prompt; one token is written, the prediction's first."""
    texts = make_texts(1, NUM_TEXT, "lost")
    prediction = texts.predictions[0].copy()
    prediction[0] = OFTEN
    return Situation(prediction, prediction[:1], (0,) if is_prepared else (), texts.outputs[0][:num_prompt])


#: Name → the path. An output that diverged looks far at every eighth token, from 16,385 tokens on at 16,392.
PATHS: dict[str, Callable[[], Situation]] = {
    "aligned, 1 new": lambda: aligned(1),
    "aligned, 8 new": lambda: aligned(8),
    "aligned, 17 new": lambda: aligned(17),
    "aligned behind edits, 8 new": lambda: edited(8),
    "diverged and resynced, 8 new": lambda: resynced(8),
    "lost, 1 new, looks near": lambda: lost(1, NUM_TEXT // 2),
    "lost, 1 new, looks far": lambda: lost(1, NUM_TEXT // 2 + 7),
    "lost, 8 new": lambda: lost(8, NUM_TEXT // 2),
    "lost, 17 new": lambda: lost(17, NUM_TEXT // 2),
    "lost, 17 new, 64 match in the context": lambda: repeated(17),
    "first step, prompt of 32k": lambda: first_step(NUM_TEXT - 32, is_prepared=False),
    "first step, prompt of 32k, prepared": lambda: first_step(NUM_TEXT - 32, is_prepared=True),
    "resume, 8k lost tokens, prepared": lambda: lost(1, 8192),
}
#: Name → (the path of a length, the length it stands for, the lengths that are run): all lost tokens are folded
#: again. Its cycles are the first length's, and for each further token as many as there are between the two.
SCALED: dict[str, tuple[Callable[[int], Situation], int, tuple[int, int]]] = {
    "resume, 8k lost tokens": (lambda num_lost: lost(num_lost, 0), 8192, (128, 192)),
}

#: What drafters know.
RECIPES: dict[str, Callable[[], Recipes | None]] = {
    "no recipes": lambda: None,
    "recipes": make_recipes,
}


class Launch(NamedTuple):
    """A kernel as a launcher calls it: arguments by name, in order; constants are constexprs and None."""

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    max_registers: int


def launches(module: Any, call: Callable[[], object]) -> list[Launch]:
    """The launches of a module's kernels that `call` makes; nothing is launched."""
    found: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel, self.fn = kernel, kernel.fn

        def __getitem__(self, _: Any) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int = 4, maxnreg: int = 0, **by_name: Any) -> None:
                named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **by_name}
                constants = {
                    p.name: named[p.name]
                    for p in self.kernel.params
                    if p.is_constexpr or named[p.name] is None
                }
                arguments = flat({n: named[n] for n in self.kernel.arg_names if n not in constants})
                found.append(Launch(self.kernel, arguments, constants, num_warps, maxnreg))

            return launch

    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return found


class Case:
    """A path as a drafter sees it, in front of its last step. recipes: a key of `RECIPES`."""

    def __init__(self, path: Situation, recipes: str) -> None:
        length = NUM_TEXT + NUM_DRAFT_TOKENS
        self.drafter = Drafter(
            max_slots=1, max_context_len=length, max_prediction_len=NUM_TEXT,
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device="cpu", backend="reference",
            recipes=RECIPES[recipes](),
        )  # fmt: skip
        self.drafter.add(0, path.prediction, len(path.prompt))
        tokens = np.concatenate([path.prompt, path.output])
        self.tensors = (
            torch.zeros((1, length), dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32),
        )  # fmt: skip
        self.tensors[0][0, : len(tokens)] = torch.from_numpy(tokens)
        for written in path.steps:
            self.tensors[1].fill_(len(path.prompt) + written)
            self.drafter.propose(*self.tensors)
        self.tensors[1].fill_(len(tokens))

    def launch(self) -> Launch:
        """What a step launches on a GPU."""
        from gpu_align.ops.step import StepLaunch
        from gpu_align.ops.step import kernel as kernels

        drafter = self.drafter
        bound = drafter._state, drafter._tables, drafter._recipes, drafter._draft, drafter._settings
        [launch] = launches(kernels, lambda: StepLaunch(*bound)(*self.tensors))
        return launch

    def run(self, compiler: Compiler, latencies: Latencies) -> Trace:
        """The compiled step; its drafts have to be the reference's. The case stays as it is."""
        launch = self.launch()
        tensors = {n: arg for n, arg in launch.arguments.items() if isinstance(arg, torch.Tensor)}
        before = [tensor.clone() for tensor in tensors.values()]

        def drafts() -> dict[str, torch.Tensor]:
            """What there is now; all tensors are then as before."""
            found = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("out.")}
            for tensor, value in zip(tensors.values(), before, strict=True):
                tensor.copy_(value)
            return found

        trace = run_launch(launch, compiler(launch).program, compiler.target, latencies)
        found = drafts()
        self.drafter.propose(*self.tensors)
        for name, expected in drafts().items():
            assert torch.equal(found[name], expected), f"{name}: expected {expected}, found {found[name]}"
        return trace


def run_launch(launch: Launch, program: Program, target: str, latencies: Latencies) -> Trace:
    """Run program 0 of a launch; what it writes is in the tensors of `launch` afterwards."""
    tensors = {n: arg for n, arg in launch.arguments.items() if isinstance(arg, torch.Tensor)}
    memory = Memory([tensor.contiguous().numpy() for tensor in tensors.values()])
    addresses = {name: memory.address(i) for i, name in enumerate(tensors)}
    values = ((addresses[n], 8) if n in addresses else (arg, 4) for n, arg in launch.arguments.items())
    bank = constant_bank(target, values)
    trace = Machine(program, memory, bank, launch.num_warps, latencies).run()
    for tensor, array in zip(tensors.values(), memory.arrays, strict=True):
        tensor.copy_(torch.from_numpy(array))
    return trace


#: Of an H100 or H200: multiprocessors, their schedulers, and what a multiprocessor holds.
NUM_SMS, SCHEDULERS = 132, 4
WARPS, REGISTERS, SHARED, PROGRAMS = 64, 65_536, 227 * 1024, 32

#: Prediction lengths that are run, and the context lengths; cycles between the latter are those of a token.
SIZES = (1024, 4096)
TOKENS = (64, 192)
#: The batch and context of the throughput that is not at full occupancy.
BATCH, CONTEXT = 256, 4096


class Compiled(NamedTuple):
    """A kernel's instructions, and what a program of it takes from a multiprocessor."""

    program: Program
    registers: int
    shared: int

    def programs(self, num_warps: int) -> int:
        """Programs that a multiprocessor holds at once."""
        registers = -(-self.registers // 8) * 8 * 32 * num_warps
        shared = SHARED // self.shared if self.shared else PROGRAMS
        return max(min(PROGRAMS, WARPS // num_warps, REGISTERS // registers, shared), 1)


def record(num_tokens: int, num_prediction: int) -> tuple[list[Launch], torch.Tensor, int]:
    """``(launches, the tensor of the length, what it should be)`` of `lcs_length` for one pair.

    Tokens are drawn as code has them: half of them from fifty.
    """
    from gpu_align.ops import lcs as launch
    from gpu_align.ops.lcs import kernel as kernels

    rng = np.random.default_rng(num_prediction)
    often, seldom = (rng.integers(0, n, num_prediction + max(TOKENS), np.int32) for n in (50, 40_000))
    text = torch.from_numpy(np.where(rng.random(len(often)) < 0.5, often, seldom)).reshape(1, -1)
    context = text[:, num_prediction : num_prediction + num_tokens].contiguous()
    prediction = text[:, :num_prediction].contiguous()
    lengths = [torch.tensor([t.shape[1]], dtype=torch.int32) for t in (context, prediction)]
    out = torch.zeros(1, dtype=torch.int32)
    inputs = context, lengths[0], prediction, lengths[1]
    expected = int(launch.lcs_length(*inputs, backend="reference"))
    with patch.object(launch, "resolve_backend", lambda *_: "triton"):
        found = launches(kernels, lambda: launch.lcs_length(*inputs, out=out))
    return found, out, expected


def measure_lcs(compiler: Compiler, size: int) -> dict[str, float]:
    """The row of a prediction length.

    cycles: of a token, in programs alone, of both kernels; instructions: of a warp and token, of both; registers:
    the more; tcups_batch and tcups_full: 10**12 cells a second at 1 GHz, for `BATCH` pairs with contexts of
    `CONTEXT` tokens, and for as many pairs as the GPU holds. One kernel runs after the other. Programs of a
    multiprocessor take as long as one alone or, where that is more, as long as the busiest pipe takes for all of
    them.
    """
    runs = [_run_lcs(compiler, num_tokens, size) for num_tokens in TOKENS]
    kernels = [
        _LcsKernel(a, b, compiled, warps) for (a, compiled, warps), (b, _, _) in zip(*runs, strict=True)
    ]
    full = NUM_SMS * max(kernel.held for kernel in kernels)
    rates = (
        pairs * size * CONTEXT / sum(kernel.cycles(pairs) for kernel in kernels) for pairs in (BATCH, full)
    )
    batch, full_rate = (round(rate / 1e3, 2) for rate in rates)
    return {
        "cycles": round(sum(kernel.a_token(lambda trace: trace.cycles) for kernel in kernels), 1),
        "instructions": round(
            sum(k.a_token(lambda trace: trace.count.total()) / k.num_warps for k in kernels), 1
        ),
        "registers": max(kernel.compiled.registers for kernel in kernels),
        "tcups_batch": batch,
        "tcups_full": full_rate,
    }


def _run_lcs(compiler: Compiler, num_tokens: int, size: int) -> list[tuple[Trace, Compiled, int]]:
    """Every kernel of one call, run one after the other, and its warps."""
    found, out, expected = record(num_tokens, size)
    runs = []
    for launch in found:
        compiled = compiler(launch)
        trace = run_launch(launch, compiled.program, compiler.target, Latencies())
        runs.append((trace, compiled, launch.num_warps))
    assert int(out) == expected, f"LCS: expected {expected}, found {int(out)}"
    return runs


class _LcsKernel(NamedTuple):
    """Two runs of one kernel, with `TOKENS`."""

    first: Trace
    last: Trace
    compiled: Compiled
    num_warps: int

    def a_token(self, cycles: Callable[[Trace], float]) -> float:
        return (cycles(self.last) - cycles(self.first)) / (TOKENS[1] - TOKENS[0])

    def whole(self, cycles: Callable[[Trace], float]) -> float:
        """What `CONTEXT` tokens take, by the two runs."""
        return cycles(self.first) + self.a_token(cycles) * (CONTEXT - TOKENS[0])

    @property
    def held(self) -> int:
        return self.compiled.programs(self.num_warps)

    def cycles(self, batch: int) -> float:
        """Of a batch: one program a pair, as many at once as the multiprocessors hold."""
        few = min(self.held, -(-batch // NUM_SMS))
        bound = max(self.whole(lambda trace, pipe=pipe: trace.load(pipe)) for pipe in self.last.busy)
        return -(-batch // (NUM_SMS * few)) * max(self.whole(lambda trace: trace.cycles), few * bound)


TARGETS = ("sm_90", "sm_100")
GIGAHERTZ = 1.755
WARM, COLD = Latencies(), Latencies(first=600)
TABLE = RESULTS / "latency.json"
#: What a number may differ by from the table's.
TOLERANCE = 0.02
#: What the rows of the step begin with, and what its drafter knows.
STEPS = {"step: ": "no recipes", "step with recipes: ": "recipes"}


class Compiler:
    """Launch → its instructions for a target, compiled once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.compiled: dict[str, Compiled] = {}

    def __call__(self, launch: Launch) -> Compiled:
        key = f"{launch.kernel.fn.__name__} {launch.constants} {launch.num_warps}"
        if key not in self.compiled:
            # Triton asks such an argument nothing, so it does not know its alignment.
            unknown = frozenset(p.name for p in launch.kernel.params if p.do_not_specialize)
            config = Config(
                "", launch.constants, launch.num_warps, unaligned=unknown, max_registers=launch.max_registers
            )
            done = static_check.compile_kernel(launch.kernel, config, self.target)
            registers = static_check.read_cubin(done)["registers"]
            self.compiled[key] = Compiled(disassemble(done.asm["cubin"]), registers, done.metadata.shared)
        return self.compiled[key]


def measure(target: str, only: str = "") -> dict[str, dict[str, float]]:
    """Label → row, for every path and size whose label contains `only`."""
    compiler, rows = Compiler(target), {}
    for prefix, recipes in STEPS.items():
        for name in (*PATHS, *SCALED):
            if only in prefix + name:
                rows[prefix + name] = measure_path(name, recipes, compiler)
    for size in SIZES:
        if only in (label := f"lcs_length: {size // 1024}k"):
            rows[label] = measure_lcs(compiler, size)
    return rows


def measure_path(name: str, recipes: str, compiler: Compiler) -> dict[str, float]:
    """Cycles, with all data in the second-level cache (warm) or in memory (cold), and instructions."""

    def run(path: Situation) -> dict[str, int]:
        case = Case(path, recipes)
        warm, cold = (case.run(compiler, costs) for costs in (WARM, COLD))
        return {"warm": warm.cycles, "cold": cold.cycles, "instructions": warm.count.total()}

    if name in PATHS:
        return run(PATHS[name]())
    make, length, (short, longer) = SCALED[name]
    a, b = run(make(short)), run(make(longer))
    return {key: round(a[key] + (b[key] - a[key]) * (length - short) / (longer - short)) for key in a}


def _cell(row: dict[str, Any]) -> str:
    """Cycles and µs of a step, warm / cold; throughput of the LCS."""
    if "warm" in row:
        us = " / ".join(f"{row[key] / GIGAHERTZ / 1e3:,.1f}" for key in ("warm", "cold"))
        return f"{row['warm']:,} cycles, {us} µs"
    rates = " / ".join(f"{row[key] * GIGAHERTZ:.1f}" for key in ("tcups_batch", "tcups_full"))
    return f"{row['cycles']} cycles a token, {row['instructions']} instr. a word, {rates} TCUPS"


def main(
    renew: Annotated[bool, typer.Option("--write", help="renew the table of the installed Triton")] = False,
    target: Annotated[list[str] | None, typer.Option(help="only these; not with --write")] = None,
    only: Annotated[str, typer.Option(help="rows whose label contains this; not with --write")] = "",
) -> None:
    """Run the compiled kernels on recorded requests and compare their cycles with the committed table."""
    # Read when Triton and the kernels are imported, which has happened; under the interpreter nothing compiles.
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET: expected unset or 0, found 1: the interpreter compiles nothing")
    import triton

    targets = static_check.chosen_targets(target, TARGETS, renew and bool(target or only))
    by_target = {t: measure(t, only) for t in targets}
    table = {label: {t: by_target[t][label] for t in targets} for label in by_target[targets[0]]}
    typer.echo(
        f"triton {triton.__version__}; warm / cold at {GIGAHERTZ} GHz; TCUPS of 256 × 4k / of a full GPU\n"
    )
    typer.echo(static_check.markdown(table, _cell))
    static_check.settle(table, TABLE, renew, only, tolerance=TOLERANCE)


if __name__ == "__main__":
    typer.run(main)

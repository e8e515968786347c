"""Cycles of a step and of the exact LCS from the compiled code, without a GPU.

``python -m benchmarks.speed.latency_model [--write]`` compiles the kernels as their launchers call them,
disassembles the binaries (`sass`) and runs them (`sass_warp`) on requests in the states of `latency_paths`. So
loops take as many turns, and branches go, as they do on a GPU. Drafts and lengths must be the reference's.

Assumptions (`sass_memory.Latencies`): one program alone, in order, with its instructions in the cache. Loads: 40
cycles from the first-level cache, and for the first access to each 32 bytes 263 (warm: they are in the
second-level cache) or 600 (cold: in memory). Shared memory 23 to 30, shuffles and reductions across a warp 23, a
barrier 25, constants 30, a taken branch 8 beyond its stall count. Pipes of 16 lanes take an instruction every
second cycle.
Microseconds are at 1.755 GHz (an H200 runs at up to 1.98); a launch takes 1.5 to 2 more. sm_100 has its own code,
but the latencies and multiprocessors of sm_90.

Not in it: misses of the instruction cache, other programs on the same multiprocessor (but for the throughput of
the LCS, `latency_lcs`), queues of the memory. Of 8k tokens to be folded again, and of contexts of the LCS, a part
is run and the rest taken to cost as much for each token.

The table is compared with benchmarks/results/latency.json, which has one for each Triton version. Exit code 1: a
number differs by more than 2 %. ``--write`` renews the table of the installed version. ``--lines 10`` shows where
the cycles of each path go.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.speed import static_check
from benchmarks.speed.kernel_configs import Config
from benchmarks.speed.latency_lcs import SIZES, Compiled, measure_lcs
from benchmarks.speed.latency_lines import hot_lines
from benchmarks.speed.latency_paths import PATHS, SCALED, Case, Launch, run_step
from benchmarks.speed.sass import disassemble
from benchmarks.speed.sass_memory import Latencies
from benchmarks.speed.sass_warp import Trace

TARGETS = ("sm_90", "sm_100")
GIGAHERTZ = 1.755
WARM, COLD = Latencies(), Latencies(first=600)
TABLE = Path(__file__).parents[1] / "results" / "latency.json"
#: What a number may differ by from the table's.
TOLERANCE = 0.02
#: What the rows of the step begin with, and what its drafter knows.
STEPS = {"step: ": "no recipes", "step with recipes: ": "recipes", "step with shapes: ": "shapes"}


class Compiler:
    """Launch → its instructions, compiled once."""

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
        names = [name for name in (*PATHS, *SCALED) if only in prefix + name]
        for name in names:
            rows[prefix + name] = measure_path(name, recipes, compiler)
    for size in SIZES:
        if only in (label := f"lcs_length: {size // 1024}k"):
            rows[label] = measure_lcs(compiler, target, size)
    return rows


def measure_path(name: str, recipes: str, compiler: Compiler) -> dict[str, float]:
    """Cycles, with all data in the second-level cache (warm) or in memory (cold), and instructions."""
    if name in PATHS:
        return _run(Case(PATHS[name](), recipes), compiler)
    make, length, (short, longer) = SCALED[name]
    a, b = (_run(Case(make(n), recipes), compiler) for n in (short, longer))
    return {key: round(a[key] + (b[key] - a[key]) * (length - short) / (longer - short)) for key in a}


def _run(case: Case, compiler: Compiler) -> dict[str, float]:
    warm, cold = (run_case(case, compiler, costs) for costs in (WARM, COLD))
    return {"warm": warm.cycles, "cold": cold.cycles, "instructions": warm.count.total()}


def run_case(case: Case, compiler: Compiler, costs: Latencies = WARM) -> Trace:
    """A path of the step, checked."""
    return run_step(case, lambda launch: compiler(launch).program, compiler.target, costs)


def differences(expected: static_check.Table, found: static_check.Table) -> list[str]:
    """What differs by more than `TOLERANCE`, one line a number; rows that only one of them has are named, too."""
    lines = []
    rows = [(label, target) for table in (expected, found) for label, row in table.items() for target in row]
    for label, target in dict.fromkeys(rows):
        a, b = expected.get(label, {}).get(target), found.get(label, {}).get(target)
        if a is None or b is None:
            lines.append(f"{label}, {target}: {'not in the table' if a is None else 'no longer measured'}")
            continue
        for name in a:
            if abs(b[name] - a[name]) > TOLERANCE * a[name]:
                lines.append(f"{label}, {target}, {name}: {a[name]} in the table, {b[name]} now")
    return lines


def markdown(table: static_check.Table) -> str:
    """Rows down, targets across: cycles and µs of a step, warm / cold; throughput of the LCS."""
    targets = list(next(iter(table.values())))
    lines = ["| path | " + " | ".join(targets) + " |", "|---|" + "---|" * len(targets)]
    for label, rows in table.items():
        cells = []
        for row in rows.values():
            if "warm" in row:
                us = " / ".join(f"{row[key] / GIGAHERTZ / 1e3:,.1f}" for key in ("warm", "cold"))
                cells.append(f"{row['warm']:,} cycles, {us} µs")
            else:
                rates = " / ".join(f"{row[key] * GIGAHERTZ:.1f}" for key in ("tcups_batch", "tcups_full"))
                cells.append(
                    f"{row['cycles']} cycles a token, {row['instructions']} instr. a word, {rates} TCUPS"
                )
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show_lines(targets: list[str], only: str, number: int) -> None:
    """Print the most expensive functions and lines of every path whose label contains `only`."""
    for target in targets:
        compiler = Compiler(target)
        for prefix, recipes in STEPS.items():
            for name in PATHS:
                if only in prefix + name:
                    case = Case(PATHS[name](), recipes)
                    trace = run_case(case, compiler)
                    typer.echo(f"\n{target}, {prefix}{name}: {trace.cycles} cycles\n")
                    typer.echo(hot_lines(compiler(case.launches()[0]).program, trace, number))


def main(
    renew: Annotated[bool, typer.Option("--write", help="renew the table of the installed Triton")] = False,
    target: Annotated[list[str] | None, typer.Option(help="only these; not with --write")] = None,
    only: Annotated[str, typer.Option(help="rows whose label contains this; not with --write")] = "",
    lines: Annotated[int, typer.Option(help="show so many functions and source lines instead")] = 0,
) -> None:
    """Run the compiled kernels on recorded requests and compare their cycles with the committed table."""
    # Read when Triton and the kernels are imported, which has happened; under the interpreter nothing compiles.
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET: expected unset or 0, found 1: the interpreter compiles nothing")
    import triton

    targets = static_check.chosen_targets(target, TARGETS, renew and bool(target or only))
    if lines:
        show_lines(targets, only, lines)
        return
    by_target = {t: measure(t, only) for t in targets}
    table = {label: {t: by_target[t][label] for t in targets} for label in by_target[targets[0]]}
    version = triton.__version__
    typer.echo(f"triton {version}; warm / cold at {GIGAHERTZ} GHz; TCUPS of 256 × 4k / of a full GPU\n")
    typer.echo(markdown(table))
    if renew:
        static_check.write(version, table, TABLE, "latency_model")
        typer.echo(f"\nwrote {TABLE}")
    expected = static_check.stored(version, TABLE)
    if expected is None:
        typer.echo(f"\nno table of triton {version}: nothing to compare with")
        return
    wanted: dict[str, Any] = {
        label: {t: row for t, row in rows.items() if t in targets}
        for label, rows in expected.items()
        if only in label
    }
    different = differences(wanted, table)
    for line in different:
        typer.echo(line, err=True)
    if different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

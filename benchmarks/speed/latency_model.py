"""Cycles of a step and of the exact LCS from the compiled code, without a GPU.

``python -m benchmarks.speed.latency_model [--write]`` compiles the kernels as their launchers call them, disassembles
the binaries (`sass`) and runs them (`sass_warp`) on requests in the states of `latency_paths`. So loops take as many
turns, and branches go, as they do on a GPU. What the code leaves in memory is compared with the reference.

Assumptions (`sass_warp.Latencies`): one program alone, in order, with its instructions in the cache. Loads: 40 cycles
from the first-level cache, and for the first access to each 32 bytes 263 (warm: they are in the second-level cache)
or 600 (cold: in memory). Shared memory 23 to 30, shuffles and reductions across a warp 23, a barrier 25, constants 30,
a taken branch 8 beyond its stall count. Pipes of 16 lanes take an instruction every second cycle. Microseconds are at
1.755 GHz; a launch takes 1.5 to 2 more. sm_100 has its own code, but the latencies of sm_90.

The table is compared with benchmarks/results/latency.json, which has one for each Triton version. Exit code 1: a
path differs by more than 2 %. ``--write`` renews the table of the installed version.
"""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.speed import static_check
from benchmarks.speed.kernel_configs import Config
from benchmarks.speed.latency_paths import PATHS, SCALED, Case, Launch, run_step
from benchmarks.speed.sass import Program, disassemble
from benchmarks.speed.sass_warp import Latencies, Trace

TARGETS = ("sm_90", "sm_100")
GIGAHERTZ = 1.755
WARM, COLD = Latencies(), Latencies(first=600)
TABLE = Path(__file__).parents[1] / "results" / "latency.json"


class Compiler:
    """Launch → its instructions, compiled once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.programs: dict[str, Program] = {}

    def __call__(self, launch: Launch) -> Program:
        key = f"{launch.kernel.fn.__name__} {launch.constants} {launch.num_warps}"
        if key not in self.programs:
            config = Config("", launch.constants, launch.num_warps)
            done = static_check.compile_kernel(launch.kernel, config, self.target)
            self.programs[key] = disassemble(done.asm["cubin"])
        return self.programs[key]


def measure_step(target: str, compiler: Compiler, with_recipes: bool, only: str) -> dict[str, Any]:
    """Path → {"warm", "cold", "instructions"}."""
    rows: dict[str, Any] = {}
    for name, make in PATHS.items():
        if only in name:
            case = Case(make(), with_recipes)
            rows[name] = _row([run_step(case, compiler, target, costs) for costs in (WARM, COLD)])
    for name, (make_of, length, lengths) in SCALED.items():
        if only in name:
            cases = [Case(make_of(n), with_recipes) for n in lengths]
            a, b = (
                _row([run_step(case, compiler, target, costs) for costs in (WARM, COLD)]) for case in cases
            )
            factor = (length - lengths[0]) / (lengths[1] - lengths[0])
            rows[name] = {key: round(a[key] + (b[key] - a[key]) * factor) for key in a}
    return rows


def _row(traces: list[Trace]) -> dict[str, int]:
    warm, cold = traces
    return {"warm": warm.cycles, "cold": cold.cycles, "instructions": warm.count.total()}


@lru_cache(maxsize=None)
def _functions(file: str) -> tuple[list[tuple[int, int, str]], list[str]] | None:
    path = static_check.OPS / file
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    found = [
        (node.lineno, node.end_lineno or 0, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    return found, text.splitlines()


def _function(file: str, line: int) -> str:
    found = _functions(file)
    return next((name for a, b, name in found[0] if a <= line <= b), file) if found else file


def hot_lines(program: Program, trace: Trace, number: int) -> str:
    """Where the cycles of a path go: by function, with what it calls, and by line.

    A cycle is an instruction's in which it issued, or in which another one waited for its result.
    """
    functions: Counter[str] = Counter()
    lines: Counter[tuple[str, int]] = Counter()
    waits: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for i, count in trace.count.items():
        own = [at for at in program.code[i].lines if _functions(at[0])] or [("?", 0)]
        cycles = trace.issued[i] + trace.waited[i]
        for name in {_function(*at) for at in own}:
            functions[name] += cycles
        lines[own[0]] += cycles
        waits[own[0]] += trace.waited[i]
        counts[own[0]] += count
    text = [f"{'cycles':>7}  function, with what it calls"]
    text += [f"{cycles:>7}  {name}" for name, cycles in functions.most_common(number)]
    text += ["", f"{'cycles':>7} {'waits':>7} {'instr.':>7}  line"]
    for (file, line), cycles in lines.most_common(number):
        found = _functions(file)
        source = found[1][line - 1].strip() if found else ""
        at = f"{file}:{line} {_function(file, line)}"
        text.append(f"{cycles:>7} {waits[file, line]:>7} {counts[file, line]:>7}  {at:<48} {source[:70]}")
    return "\n".join(text)


def main(
    target: Annotated[list[str] | None, typer.Option(help="only these; not with --write")] = None,
    only: Annotated[str, typer.Option(help="paths whose name contains this; not with --write")] = "",
    recipes: Annotated[bool, typer.Option(help="the step with recipes, with --lines")] = False,
    lines: Annotated[int, typer.Option(help="show so many functions and source lines of each path")] = 0,
) -> None:
    """Run the compiled kernels on recorded requests and compare their cycles with the committed table."""
    os.environ.pop("TRITON_INTERPRET", None)
    for t in target or TARGETS:
        compiler = Compiler(t)
        if lines:
            for name, make in PATHS.items():
                if only in name:
                    case = Case(make(), recipes)
                    trace = run_step(case, compiler, t, WARM)
                    [launch] = case.launches()
                    typer.echo(f"\n{t}, {name}: {trace.cycles} cycles, {trace.count.total()} instructions\n")
                    typer.echo(hot_lines(compiler(launch), trace, lines))
            continue
        for name, row in measure_step(t, compiler, recipes, only).items():
            typer.echo(f"{t} {name}: {row} {row['warm'] / GIGAHERTZ / 1e3:.1f} µs")


if __name__ == "__main__":
    typer.run(main)

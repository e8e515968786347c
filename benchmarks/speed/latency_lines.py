"""Where the cycles of a path go: by function and by source line of the kernels."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

from benchmarks.speed import static_check
from benchmarks.speed.sass import Instruction, Program
from benchmarks.speed.sass_warp import Trace


@cache
def _source(file: str) -> tuple[list[tuple[int, int, str]], list[str]] | None:
    """``(first line, last line, name)`` of the functions of a file of `gpu_align.ops`, and its lines."""
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
    found = _source(file)
    return next((name for a, b, name in found[0] if a <= line <= b), file) if found else file


def _places(ins: Instruction) -> list[tuple[str, int]]:
    """Lines of our kernels that an instruction belongs to, the innermost function's first.

    Triton writes a load as two lines of assembler; the second may be counted as the source line behind the load.
    """
    found = [at for at in ins.lines if _source(at[0])]
    if not found:
        return [("Triton", 0)]
    file, line = found[0]
    source = _source(file)
    if ins.name in ("LDG", "STG", "REDG", "ATOMG") and source is not None:
        is_access = [bool(re.search(r"tl\.(load|store|atomic)", source[1][i - 1])) for i in (line - 1, line)]
        if is_access == [True, False]:
            found[0] = file, line - 1
    return found


def hot_lines(program: Program, trace: Trace, number: int) -> str:
    """The `number` most expensive functions, with what they call, and lines.

    Cycles are those from the issue of an instruction to the next one, and those for which another instruction
    waited for its result.
    """
    functions: Counter[str] = Counter()
    lines: Counter[tuple[str, int]] = Counter()
    waits: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for i, count in trace.count.items():
        places = _places(program.code[i])
        cycles = trace.issued[i] + trace.waited[i]
        for name in {_function(*at) for at in places}:
            functions[name] += cycles
        lines[places[0]] += cycles
        waits[places[0]] += trace.waited[i]
        counts[places[0]] += count
    text = [f"{'cycles':>7}  function, with what it calls"]
    text += [f"{cycles:>7}  {name}" for name, cycles in functions.most_common(number)]
    text += ["", f"{'cycles':>7} {'waits':>7} {'instr.':>7}  line"]
    for (file, line), cycles in lines.most_common(number):
        source = _source(file)
        code = source[1][line - 1].strip() if source else ""
        at = f"{file}:{line} {_function(file, line)}"
        text.append(f"{cycles:>7} {waits[file, line]:>7} {counts[file, line]:>7}  {at:<48} {code[:70]}")
    return "\n".join(text)

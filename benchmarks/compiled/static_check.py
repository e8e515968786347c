"""What the compiler made of every kernel, without a GPU: ``python -m benchmarks.compiled.static_check [--write]``.

Each kernel of `kernel_configs` is compiled for `TARGETS`; docs/developer/compiled-kernels.md has the fields that
are read from the binary and its disassembly and compared with benchmarks/results/static.json. Exit code 1:
something differs, or a kernel spills; every difference is named. A kernel whose IR is that of the table is
compiled with ``--all`` only.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.tables import RESULTS, as_json
from benchmarks.tables import table as markdown_table

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
TABLE = RESULTS / "static.json"
OPS = Path(__file__).parents[2] / "gpu_align" / "ops"

#: {kernel and config: {target: {field: value}}}
Table = dict[str, dict[str, dict[str, Any]]]


def target_of(name: str) -> Any:
    """Triton's own, of a key of `TARGETS` or another GPU of NVIDIA's."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*(TARGETS.get(name) or ("cuda", int(name.removeprefix("sm_")), 32)))


def find_kernels() -> dict[str, Any]:
    """``operation.name`` → the function, for every kernel of the library."""
    from triton.runtime import JITFunction

    found = {}
    for path in sorted(OPS.glob("*/kernel.py")):
        operation = path.parent.name
        module = importlib.import_module(f"gpu_align.ops.{operation}.kernel")
        for name, value in vars(module).items():
            # Kernels of another module that this one imports belong there.
            if name.endswith("_kernel") and getattr(value, "__module__", None) == module.__name__:
                if not isinstance(value, JITFunction):
                    raise RuntimeError(
                        f"{operation}.{name}: expected a compiled kernel, found {type(value).__name__}"
                    )
                found[f"{operation}.{name}"] = value
    return found


def measure(targets: list[str], only: str = "", known: Table | None = None) -> Table:
    """Every kernel whose label contains `only`, for `targets`. What is `known` of the same IR is not compiled."""
    from benchmarks.compiled.kernel_configs import CONFIGS

    kernels = find_kernels()
    if set(kernels) != set(CONFIGS):
        raise ValueError(
            f"benchmarks/compiled/kernel_configs.py: expected an entry for each kernel; without one: "
            f"{sorted(set(kernels) - set(CONFIGS))}, without a kernel: {sorted(set(CONFIGS) - set(kernels))}"
        )
    table: Table = {}
    for name, configs in CONFIGS.items():
        for config in configs:
            if only in config.label:
                if config.label in table:
                    raise ValueError(f"label: expected different ones, found {config.label!r} twice")
                rows = _compile_anew(kernels[name], config, targets, (known or {}).get(config.label, {}))
                table[config.label] = rows
    return table


def _compile_anew(kernel: Any, config: Any, targets: list[str], known: dict[str, Any]) -> dict[str, Any]:
    ir = digest_of_ir(kernel, config)
    known = {target: row for target, row in known.items() if row.get("ir") == ir}
    return {t: known.get(t) or {"ir": ir, **_compile(kernel, config, t)} for t in targets}


def _source_of(kernel: Any, config: Any) -> Any:
    """Triton's, of a kernel by one of `kernel_configs`."""
    from triton.compiler import ASTSource

    from benchmarks.compiled.kernel_configs import TYPES

    types = {**TYPES, **config.types}
    signature: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
    for i, arg in enumerate(kernel.arg_names):
        if arg in config.constants:
            signature[arg] = "constexpr"
            continue
        kind = signature[arg] = types.get(arg, "*i32" if arg.endswith("_ptr") else "i32")
        paths = [(i, j) for j in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
        for path in paths if arg not in config.unaligned else ():
            if (kind[path[1]] if isinstance(kind, tuple) else kind)[0] == "*" or arg.startswith("stride"):
                attrs[path] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=config.constants, attrs=attrs)


def digest_of_ir(kernel: Any, config: Any) -> str:
    """Of what it is compiled with, and of the `_effects` of Triton's IR behind its own passes, functions inlined:
    how a kernel is cut into functions and files, and what its names are, does not show."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    target, context = target_of("sm_90"), ir.context()
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = _source_of(kernel, config).make_ir(target, options, functions, modules, context)
    module = backend.make_ttir(module, {}, options, target.arch)
    text = f"{config.warps} {config.max_registers} {_effects(str(module))}"
    return sha256(text.encode()).hexdigest()[:8]


#: Operations on one line whose order among others says something.
_ORDERED = (
    "tt.load",
    "tt.store",
    "tt.atomic",
    "barrier",
    "scf.",
    "tt.return",
    "tt.reduce",
    "tt.scan",
    "tt.func",
)


def _effects(ir: str) -> str:
    """List the operations that read, write or branch, in order, with each value as the expression that computes
    it. Names, the order of pure operations and places in the source do not show."""
    values: dict[str, str] = {}
    numbers = count()
    name = r"%[\w.$-]+"

    def value(found: re.Match[str]) -> str:
        return values[found[0]]

    kept = []
    for line in ir.splitlines():
        line = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", line).strip()
        pure = re.fullmatch(rf"({name}) = (.*[^{{])", line)
        if pure and not any(ordered in line for ordered in _ORDERED):
            values[pure[1]] = sha256(re.sub(name, value, pure[2]).encode()).hexdigest()[:16]
        elif not line.startswith("#loc"):
            # Results, and arguments of loops and functions; a name may stand for something else from here on.
            values |= {new: f"%{next(numbers)}" for new in re.findall(rf"({name})(?=(?::\d+)? = |: )", line)}
            kept.append(re.sub(name, value, line))
    return "\n".join(kept)


def compile_kernel(kernel: Any, config: Any, target: str) -> Any:
    """What Triton makes of a kernel for a target, by one of `kernel_configs`."""
    import triton

    options = {"num_warps": config.warps}
    if config.max_registers and TARGETS[target][0] == "cuda":
        options["maxnreg"] = config.max_registers
    return triton.compile(_source_of(kernel, config), target=target_of(target), options=options)


def _compile(kernel: Any, config: Any, target: str) -> dict[str, Any]:
    done = compile_kernel(kernel, config, target)
    if TARGETS[target][0] == "hip":
        return read_amd(done.asm["amdgcn"], done.metadata.shared)
    return read_cubin(done)


def read_cubin(done: Any) -> dict[str, Any]:
    """The fields of a row from what `compile_kernel` made for an NVIDIA GPU."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        sass = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    return read_nvidia(usage, sass, done.metadata.shared)


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_nvidia(usage: str, sass: str, shared: int) -> dict[str, Any]:
    """The fields of a row from ``cuobjdump -res-usage`` and ``nvdisasm -c``."""
    loads: Counter[str] = Counter()
    for kind in re.findall(r"\bLDG(?:STS)?\b((?:\.\w+)*)", sass):
        found = re.search(r"\.[US]?(8|16|64|128|256)(?:\.|$)", kind)
        loads[found[1] if found else "32"] += 1
    return {
        "registers": _number(r"\bREG:(\d+)", usage),
        "stack": _number(r"\bSTACK:(\d+)", usage),
        "shared": shared,
        "loads": _sorted(loads),
    }


_AMD_BITS = {"ubyte": 8, "sbyte": 8, "ushort": 16, "sshort": 16, "short": 16}


def read_amd(assembly: str, shared: int) -> dict[str, Any]:
    """The fields of a row from the assembler text and its metadata."""
    loads: Counter[str] = Counter()
    for kind in re.findall(r"^\s+(?:global|buffer|flat)_load_(\w+)", assembly, re.MULTILINE):
        if (words := re.match(r"(?:dword|b32)(?:x(\d))?", kind)) is not None:
            loads[str(32 * int(words[1] or 1))] += 1
        else:
            loads[str(next((bits for name, bits in _AMD_BITS.items() if kind.startswith(name)), kind))] += 1
    return {
        "registers": _number(r"\.vgpr_count:\s*(\d+)", assembly),
        "scalars": _number(r"\.sgpr_count:\s*(\d+)", assembly),
        "stack": _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly),
        "shared": shared,
        "loads": _sorted(loads),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern!r}:\n{text[:500]}")
    return int(found[1])


def _sorted(loads: Counter[str]) -> dict[str, int]:
    return {bits: loads[bits] for bits in sorted(loads, key=lambda b: -int(b) if b.isdigit() else 0)}


def spills(table: Table) -> list[str]:
    """``kernel, target`` of every row that uses the stack."""
    return [
        f"{label}, {target}: {row['stack']} bytes of stack a thread, expected 0"
        for label, rows in table.items()
        for target, row in rows.items()
        if row["stack"]
    ]


def differences(expected: Table, found: Table, tolerance: float = 0.0) -> list[str]:
    """What differs, one line a field: numbers by more than this share. Rows that only one has are named, too."""
    lines = []
    rows = [(label, target) for table in (expected, found) for label, row in table.items() for target in row]
    for label, target in dict.fromkeys(rows):
        a, b = expected.get(label, {}).get(target), found.get(label, {}).get(target)
        if a is None or b is None:
            lines.append(f"{label}, {target}: {'not in the table' if a is None else 'no longer compiled'}")
            continue
        for name in dict.fromkeys((*a, *b)):
            x, y = a.get(name), b.get(name)
            if x != y and not (tolerance and None not in (x, y) and abs(x - y) <= tolerance * x):
                lines.append(f"{label}, {target}, {name}: {_shown(x)} in the table, {_shown(y)} now")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{n} × {bits}" for bits, n in value.items()) or "none"
    return str(value)


def stored(version: str, path: Path = TABLE) -> Table | None:
    """The committed table of a Triton version, or None."""
    found: dict[str, Table] = json.loads(path.read_text(encoding="utf-8"))["triton"] if path.exists() else {}
    return found.get(version)


def write(version: str, table: Table, path: Path = TABLE) -> None:
    """Put `table` in its place in the committed file, one row a line; other versions stay."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"triton": {}}
    found["triton"] = dict(sorted({**found["triton"], version: table}.items()))
    path.write_text(as_json(found, depth=4), encoding="utf-8")


def markdown(table: Table, cell: Callable[[dict[str, Any]], str]) -> str:
    """Rows down, targets across."""
    targets = list(next(iter(table.values())))
    rows = ([label, *map(cell, row.values())] for label, row in table.items())
    return markdown_table(["kernel", *targets], rows, "l" * (len(targets) + 1))


def _cell(row: dict[str, Any]) -> str:
    """Registers, shared memory, loads of 128 bits of all."""
    wide = sum(n for bits, n in row["loads"].items() if bits.isdigit() and int(bits) >= 128)
    spilt = f", {row['stack']} B stack" if row["stack"] else ""
    return f"{row['registers']}, {row['shared']} B, {wide}/{sum(row['loads'].values())}{spilt}"


def settle(
    table: Table, path: Path, renew: bool, only: str, wrong: Sequence[str] = (), tolerance: float = 0.0
) -> None:
    """Write what was found, or name what differs from the committed table or is `wrong`; then exit code 1."""
    import triton

    if renew:
        write(triton.__version__, table, path)
        typer.echo(f"\nwrote {path}")
    expected = stored(triton.__version__, path)
    if expected is None:
        typer.echo(f"\nno table of triton {triton.__version__}: nothing to compare with")
    targets = {target for rows in table.values() for target in rows}
    wanted = {
        label: {target: row for target, row in rows.items() if target in targets}
        for label, rows in (table if expected is None else expected).items()
        if only in label
    }
    lines = [*wrong, *differences(wanted, table, tolerance)]
    for line in lines:
        typer.echo(line, err=True)
    if lines:
        raise typer.Exit(1)


def chosen_targets(target: list[str] | None, known: Collection[str], renews_a_part: bool) -> list[str]:
    """The targets of a run, all unless told. Ends the program on an unknown one, or on a part to be renewed."""
    targets = list(target or known)
    unknown = [t for t in targets if t not in known]
    if unknown or renews_a_part:
        wrong = f"unknown target {unknown}" if unknown else "--write needs every row and every target"
        typer.echo(f"error: {wrong}; targets are {', '.join(known)}", err=True)
        raise typer.Exit(2)
    return targets


def main(
    renew: Annotated[bool, typer.Option("--write", help="renew the table of the installed Triton")] = False,
    target: Annotated[list[str] | None, typer.Option(help="only these; not with --write")] = None,
    only: Annotated[str, typer.Option(help="kernels whose label contains this; not with --write")] = "",
    every: Annotated[bool, typer.Option("--all", help="also what has the IR of the table")] = False,
) -> None:
    """Compile every kernel for four targets and compare the result with the committed table."""
    # Read when a kernel is decorated; under the interpreter there is nothing to compile.
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    targets = chosen_targets(target, TARGETS, renew and bool(target or only))
    version = triton.__version__
    table = measure(targets, only, None if renew or every else stored(version))
    typer.echo(f"triton {version}; registers, shared memory, loads of 128 bits or more / all loads\n")
    typer.echo(markdown(table, _cell))
    settle(table, TABLE, renew, only, spills(table))


if __name__ == "__main__":
    typer.run(main)

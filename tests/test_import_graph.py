"""Who imports whom, by the sources: no circles, few levels, and a library that knows no engine.

No module imports another one's private name, and a class name stands for one class.

Imports inside functions count like those at the top; those under `TYPE_CHECKING` do not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_align.ops.rules import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gpu_align", "vllm_integration")
_SHARED = frozenset({"config", "wire", "seams", "budget"})
#: What each package of vllm_integration may import of it besides itself; those not listed: anything.
MAY_IMPORT = {
    "frontend": _SHARED,
    "scheduler": _SHARED,
    "worker": _SHARED,
    "budget": frozenset({"config", "wire"}),
    "config": frozenset({"seams", "wire"}),
    "wire": frozenset[str](),
    "seams": frozenset[str](),
}
#: Of the files and folders of `gpu_align`: how many stand on each other, and imports between them.
MAX_LEVELS, MAX_EDGES = 5, 20
#: What measures, learns and shows; and the module that runs it. The core, all else of `gpu_align`, uses neither.
TOOLS = "gpu_align.tools."
FACES = {"gpu_align.__main__"}
#: Where kernels and references get an operation's numbers and rules, by its name: an import of that operation.
OPS = "gpu_align.ops."
NAMESPACES = {f"{OPS}device", f"{OPS}host"}


_parsed = lru_cache(maxsize=1000)(ast.parse)


class Import(NamedTuple):
    importer: str
    imported: str


def sources() -> dict[str, str]:
    """Module → source, of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def imports(modules: Mapping[str, str]) -> list[Import]:
    """Every import of every module; of `from package import name` the module `name`, where there is one."""
    found = []
    for importer, source in modules.items():
        is_package = any(name.startswith(importer + ".") for name in modules)
        nodes = [*ast.walk(_parsed(source))]
        tests = (n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
        left_out = {part for test in tests for statement in test.body for part in ast.walk(statement)}
        for node in nodes:
            if node in left_out:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = importer.split(".")
                base = parts[: len(parts) - node.level + is_package] if node.level else []
                start = ".".join([*base, *([node.module] if node.module else [])])
                full = [f"{start}.{alias.name}" for alias in node.names]
                names = [name if name in modules else start for name in full]
                if start in NAMESPACES:
                    numbers = (f"{OPS}{alias.name}" for alias in node.names)
                    names += [
                        name
                        for name in numbers
                        if name in modules and not f"{importer}.".startswith(f"{name}.")
                    ]
            else:
                continue
            found += [Import(importer, name) for name in names if name != importer]
    return found


def violations(modules: Mapping[str, str]) -> list[str]:
    """Each import, or circle of imports, that must not be; empty when all is well."""
    found = imports(modules)
    named = [*_private_names(modules), *_class_names(modules), *_levels(found), *_by_string(modules)]
    circles = *_circles(found, modules), *_operations(found)
    return [*_of_the_library(found), *_of_the_plugin(found), *circles, *named]


def _private_names(modules: Mapping[str, str]) -> Iterator[str]:
    for importer, source in modules.items():
        for node in ast.walk(_parsed(source)):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    yield f"{importer} imports the private name {alias.name} of {node.module}"


def _class_names(modules: Mapping[str, str]) -> Iterator[str]:
    places = defaultdict(list)
    for module, source in modules.items():
        for node in _parsed(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{' and '.join(found)} each have a class {name}"


def _is_core(module: str) -> bool:
    is_tool = f"{module}.".startswith(TOOLS) or module in FACES
    return module.split(".")[0] == "gpu_align" and not is_tool


def _by_string(modules: Mapping[str, str]) -> Iterator[str]:
    """A core module that names a tool's module in an argument: of `import_module`. A request has "tools"."""
    for module in filter(_is_core, modules):
        calls = (node for node in ast.walk(_parsed(modules[module])) if isinstance(node, ast.Call))
        for node in (node for call in calls for node in ast.walk(call)):
            if isinstance(node, ast.Constant) and re.search(r"\.tools\b|\btools\.", str(node.value)):
                yield f"{module} names {node.value!r}: the core imports no tool"


def _levels(found: list[Import]) -> Iterator[str]:
    """The parts of `gpu_align`, files and folders: each stands on what it imports."""
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported in found:
        parts = [*importer.split("."), "__init__"][:2], [*imported.split("."), "__init__"][:2]
        if parts[0][0] == parts[1][0] == "gpu_align" and parts[0] != parts[1]:
            edges[parts[0][1]].add(parts[1][1])

    def level(part: str, above: tuple[str, ...] = ()) -> int:
        below = [level(other, (*above, part)) for other in edges[part] if other not in above]
        return 1 + max(below, default=0)

    levels, edge_count = max(map(level, list(edges))), sum(map(len, edges.values()))
    if levels > MAX_LEVELS or edge_count > MAX_EDGES:
        yield f"gpu_align: expected {MAX_LEVELS} levels and {MAX_EDGES} edges, found {levels} and {edge_count}"


def operations_of(found: list[Import]) -> dict[str, set[str]]:
    """The operations that each one imports; `layout`, which all import, left out."""
    edges: dict[str, set[str]] = {operation: set() for operation in OPERATIONS[1:]}
    for pair in found:
        a, b = (name.removeprefix(OPS).split(".")[0] if name.startswith(OPS) else "" for name in pair)
        if a in edges and b in edges and a != b:
            edges[a].add(b)
    return edges


def _operations(found: list[Import]) -> Iterator[str]:
    for operation, imported in operations_of(found).items():
        for other in imported.difference(OPERATIONS[: OPERATIONS.index(operation)]):
            yield f"ops/{operation} imports {other}: `rules.OPERATIONS` has it lower"


def _of_the_library(found: list[Import]) -> Iterator[str]:
    for importer, imported in found:
        if _is_core(importer) and (f"{imported}.".startswith(TOOLS) or imported in FACES):
            yield f"{importer} imports {imported}: the core imports no tool"
        if importer.split(".")[0] == "gpu_align" and imported.split(".")[0] in ("vllm", "vllm_integration"):
            yield f"{importer} imports {imported}: the library knows no engine"


def _of_the_plugin(found: list[Import]) -> Iterator[str]:
    for importer, imported in found:
        if not importer.startswith("vllm_integration.") or imported.split(".")[0] != "vllm_integration":
            continue
        package, other = importer.split(".")[1], [*imported.split("."), ""][1]
        if package in MAY_IMPORT and other not in MAY_IMPORT[package] | {package}:
            allowed = ", ".join(sorted(MAY_IMPORT[package])) or "nothing of the package"
            yield f"{importer} imports {imported}: {package} may import {allowed}"


def _circles(found: list[Import], modules: Mapping[str, str]) -> Iterator[str]:
    """The first circle, if there is one."""
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for importer, imported in found:
        if imported in modules:
            edges[importer].add(imported)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        yield f"{' and '.join(error.args[1][1:])} import each other"


def test_nothing_imports_what_it_must_not() -> None:
    assert violations(sources()) == []


@pytest.mark.parametrize("importer", ["align", "align.kernel", "align.reference"])
def test_a_circle_between_two_operations_is_found(importer: str) -> None:
    """`match` imports `align`, so that whatever `align` imports of it closes a circle."""
    line = "from ..device import match" if "." in importer else "from .. import match"
    planted = sources()
    planted[f"{OPS}{importer}"] += f"\n{line}\n"
    assert "ops/align imports match: `rules.OPERATIONS` has it lower" in violations(planted)


@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_the_readme_of_an_operation_names_its_imports(operation: str) -> None:
    text = (ROOT / "gpu_align/ops" / operation / "README.md").read_text("utf-8")
    line = re.search(r"\*\*Imports\*\*([^.]*)\.", text)
    found = operations_of(imports({k: v for k, v in sources().items() if k.startswith(OPS)}))[operation]
    assert line is not None
    assert re.findall(r"`(\w+)`", line[1]) == [name for name in OPERATIONS if name in found]

"""Looks every seam up in vLLM's sources, without importing them: another version's, or before a GPU is touched.

python -m vllm_integration.seams.source_probe WHEEL_OR_DIRECTORY [--record VERSION]
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .table import SEAMS, Seam, SeamStatus

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MAX_IMPORTS = 8  # a name is followed through that many modules
#: Version that was run → place of a function that is wrapped or stood in for → digest of its statements.
_BODIES = Path(__file__).with_name("bodies.json")
#: Digits of a digest, and functions that a line names.
_DIGITS, _SHOWN = 12, 5


class _Found(NamedTuple):
    """A top-level statement that defines a name, and the module it is in."""

    module: str
    node: ast.stmt


class Sources:
    """The Python files below `root`, the directory or the wheel that contains the package."""

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    def text(self, module: str) -> str | None:
        """The module's source, or None when there is no such file."""
        *folders, name = module.split(".")
        for parts in ((f"{name}.py",), (name, "__init__.py")):
            file = self._root.joinpath(*folders, *parts)
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    def tree(self, module: str) -> ast.Module | None:
        """The module's syntax tree, or None when there is no such file, or it cannot be read."""
        if module not in self._trees:
            try:
                text = self.text(module)
                self._trees[module] = None if text is None else ast.parse(text)
            except (OSError, ValueError, SyntaxError):
                self._trees[module] = None
        return self._trees[module]

    def find(self, module: str, name: str, imports_left: int = _MAX_IMPORTS) -> _Found | None:
        """The place where a name of a module is defined; imports are followed as far as there are sources."""
        tree = self.tree(module)
        for node in _statements(tree.body if tree is not None else []):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return _Found(module, node)
            if name in _assigned(node):
                return _Found(module, node)
            if isinstance(node, ast.ImportFrom) and imports_left:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(self._imported(module, node), alias.name, imports_left - 1)
                        return found or _Found(module, node)
        return None

    def classes(self, found: _Found, imports_left: int = _MAX_IMPORTS) -> Iterator[_Found]:
        """A class and its bases, in the order attributes are looked up (single inheritance suffices)."""
        if not isinstance(found.node, ast.ClassDef):
            return
        yield found
        for base in found.node.bases if imports_left else []:
            if isinstance(base, ast.Subscript):  # Base[T]
                base = base.value
            if isinstance(base, ast.Name):
                parent = self.find(found.module, base.id)
                if parent is not None:
                    yield from self.classes(parent, imports_left - 1)

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = module.split(".")
        is_package = self._root.joinpath(*path).is_dir()
        path = path[: len(path) - node.level + is_package]
        return ".".join([*path, node.module] if node.module else path)


def probe_sources(root: Path | zipfile.Path | None = None, seams: Sequence[Seam] = SEAMS) -> list[SeamStatus]:
    """Look every seam up below `root`, the directory or the wheel of vLLM; None: that of the installed one. A
    method that a class leaves abstract and ours does not implement is a change."""
    sources = Sources(root or installed_root() or Path())
    statuses = [_probe_one(sources, seam) for seam in seams]
    implemented = {seam.place for seam in seams if seam.kind == "implement"}
    first_of: dict[str, int] = {}
    for index, seam in enumerate(seams):
        if seam.kind == "implement":
            first_of.setdefault(seam.place.rpartition(".")[0], index)
    for place, index in first_of.items():
        seam, state = seams[index], statuses[index]
        left = [name for name in _abstract(sources, seam) if f"{place}.{name}" not in implemented]
        if left and state.state == "found":
            detail = f"the class has the abstract methods {', '.join(left)}, which ours does not implement"
            statuses[index] = replace(state, state="changed", detail=detail)
    return statuses


@functools.cache
def probe_installed(root: Path | None, seams: tuple[Seam, ...]) -> tuple[SeamStatus, ...]:
    """The same of the installed vLLM, looked up once a process."""
    return tuple(probe_sources(root, seams))


def _abstract(sources: Sources, seam: Seam) -> list[str]:
    """Methods that the class of a seam leaves abstract."""
    found = sources.find(seam.module, seam.attribute.partition(".")[0])
    states: dict[str, bool] = {}
    for base in sources.classes(found) if found is not None else ():
        for node in _body(base.node):
            if isinstance(node, _Function):
                is_abstract = any("abstract" in ast.dump(each) for each in node.decorator_list)
                states.setdefault(node.name, is_abstract)
    return [name for name, is_abstract in states.items() if is_abstract]


def _probe_one(sources: Sources, seam: Seam) -> SeamStatus:
    if sources.tree(seam.module) is None:
        return SeamStatus(seam, "missing", f"no module {seam.module}, or one that cannot be read")
    name, _, member = seam.attribute.partition(".")
    found = sources.find(seam.module, name)
    if found is None:
        return SeamStatus(seam, "missing", f"no name {name}")
    if seam.kind == "global":
        return SeamStatus(seam, "found")
    bases = list(sources.classes(found))
    if member and not (bases or isinstance(found.node, _Function)):
        return SeamStatus(seam, "missing", f"{name} is no class")
    if seam.kind == "field":
        if any(_has(base.node, member) for base in bases or [found]):
            return SeamStatus(seam, "found")
        return SeamStatus(seam, "missing", f"{name} has no {member}")
    methods = (node for base in bases for node in _body(base.node) if isinstance(node, _Function))
    named = (node for node in methods if node.name == (member or "__init__"))
    function = found.node if isinstance(found.node, _Function) else next(named, None)
    if function is None:
        return SeamStatus(seam, "missing", f"no callable {member or name}")
    body = digest(function) if seam.kind in ("wrap", "implement") else ""
    names, needed = _of_function(function)
    names = names[function is not found.node and not member :]  # of a class its first argument is left out
    known, more = names[: len(seam.parameters)], names[len(seam.parameters) :]
    if tuple(known) != seam.parameters:
        expected = ", ".join(seam.parameters)
        return SeamStatus(seam, "changed", f"expected parameters {expected}, got {', '.join(names)}", body)
    if seam.kind == "call" and (more := [name for name in more if name in needed]):
        return SeamStatus(seam, "changed", f"needs further parameters {', '.join(more)}", body)
    return SeamStatus(seam, "found", "", body)


def digest(function: _Function) -> str:
    """A digest of a function without comments, docstring and annotations; equal on all versions of Python."""
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    return hashlib.sha256(repr(list(map(_shape, body))).encode()).hexdigest()[:_DIGITS]


def _shape(node: object) -> Any:
    if isinstance(node, ast.AST):
        left_out = ("ctx", "kind", "type_comment", "type_params", "annotation", "returns")
        fields = [(name, _shape(value)) for name, value in ast.iter_fields(node) if name not in left_out]
        return type(node).__name__, [(name, value) for name, value in fields if value not in (None, [])]
    return list(map(_shape, node)) if isinstance(node, list) else node


@functools.cache
def _bodies() -> dict[str, dict[str, str]]:
    recorded: dict[str, dict[str, str]] = json.loads(_BODIES.read_text())
    return recorded


def run_with() -> tuple[str, ...]:
    """The versions of vLLM that this package was run with, the oldest first."""
    return tuple(_bodies())


def compared(statuses: Sequence[SeamStatus], version: str) -> tuple[str, list[SeamStatus]]:
    """A version that was run, this one or else the newest, and the functions that have another body in it."""
    known = version if version in _bodies() else run_with()[-1]
    bodies = _bodies()[known]
    return known, [s for s in statuses if s.body and s.body != bodies.get(s.seam.place)]


def version_of(root: Path | zipfile.Path | None = None) -> str:
    """The version of vLLM below `root` without what its build adds; empty where it is not known."""
    text = Sources(root or installed_root() or Path()).text("vllm._version") or ""
    found = re.search(r"^__version__ = (?:version = )?['\"](\d+(?:\.\d+)*)", text, re.M)
    return found[1] if found else ""


def too_old(version: str) -> bool:
    """Whether a version is older than all that were run."""
    return bool(version) and _numbers(version) < _numbers(run_with()[0])[:2]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def difference(statuses: Sequence[SeamStatus] | None = None) -> str:
    """How the installed vLLM differs from those that were run, in words; empty where it does not."""
    version = version_of()
    statuses = probe_installed(installed_root(), SEAMS) if statuses is None else statuses
    known, differing = compared(statuses, version)
    some = ", ".join(status.seam.name for status in differing[:_SHOWN])
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    bodies = f"{len(differing)} bodies differ from {known}: review {some}{more}" if differing else ""
    if version in run_with():
        return bodies
    return f"not run with this version, {version or 'unknown'}, but with {', '.join(run_with())}" + (
        f"; {bodies}" if bodies else ""
    )


def _of_function(function: _Function) -> tuple[list[str], set[str]]:
    """Names of all parameters, and of those that need an argument."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    needed = {name for name, value in zip(keywords, arguments.kw_defaults, strict=True) if value is None}
    variable = [argument.arg for argument in (arguments.vararg,) if argument is not None]
    return [*positional, *variable, *keywords], {*without_default, *needed}


def _has(node: ast.stmt, name: str) -> bool:
    """Whether a class declares the attribute, or sets it in a method; or a function has one of that name."""
    attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == name]
    if isinstance(node, _Function):
        return bool(attributes)
    if any(isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self" for each in attributes):
        return True
    return any(name in _assigned(member) or getattr(member, "name", "") == name for member in _body(node))


def _body(node: ast.stmt) -> list[ast.stmt]:
    return list(_statements(node.body)) if isinstance(node, ast.ClassDef) else []


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those inside `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*node.body, *handlers, *node.orelse, *node.finalbody])


@functools.cache
def installed_root() -> Path | None:
    """The directory that holds the installed vLLM, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of every seam and what differs from the version that was run last; 0 when all are found."""
    parser = argparse.ArgumentParser(prog="python -m vllm_integration.seams.source_probe")
    parser.add_argument("root", type=Path, help="a wheel, or the directory that contains vllm/")
    parser.add_argument("--record", metavar="VERSION", help="this version was run: keep its bodies")
    given = parser.parse_args(arguments)
    root = zipfile.Path(given.root) if given.root.suffix == ".whl" else given.root
    statuses = probe_sources(root)
    for status in statuses:
        detail = f": {status.detail}" if status.detail else ""
        print(f"{status.state:8}{status.seam.name:34} {status.seam.place}{detail}")
    version, differing = compared(statuses, version_of(root))
    for status in differing:
        print(f"differs {status.seam.name:34} {status.seam.place}")
    bad = [status for status in statuses if status.state != "found"]
    print(f"{given.root}: {len(statuses) - len(bad)} of {len(statuses)} seams found")
    print(f"{len(differing)} bodies differ from {version}" + (": review" if differing else ""))
    if given.record:
        bodies = {**_bodies(), given.record: {s.seam.place: s.body for s in statuses if s.body}}
        in_order = dict(sorted(bodies.items(), key=lambda item: [int(n) for n in item[0].split(".")]))
        _BODIES.write_text(json.dumps(in_order, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

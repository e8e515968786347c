"""Looks every seam up in vLLM's sources, without importing them: another version's, or before a GPU is touched.

python -m vllm_integration.seams.source_probe WHEEL_OR_DIRECTORY
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .table import SEAMS, Seam, SeamStatus

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MAX_IMPORTS = 8  # a name is followed through that many modules


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
        """The module's syntax tree, or None when there is no such file."""
        if module not in self._trees:
            text = self.text(module)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, name: str, imports_left: int = _MAX_IMPORTS) -> _Found | None:
        """Where a name of a module is defined; imports are followed as far as there are sources."""
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
    """Look every seam up below `root`, the directory or the wheel of vLLM; None: that of the installed one."""
    sources = Sources(root or installed_root() or Path())
    return [_probe_one(sources, seam) for seam in seams]


def _probe_one(sources: Sources, seam: Seam) -> SeamStatus:
    if sources.tree(seam.module) is None:
        return SeamStatus(seam, "missing", f"no module {seam.module}")
    name, _, member = seam.attribute.partition(".")
    found = sources.find(seam.module, name)
    if found is None:
        return SeamStatus(seam, "missing", f"no name {name}")
    if seam.kind == "global":
        return SeamStatus(seam, "found")
    bases = list(sources.classes(found))
    if member and not bases:
        return SeamStatus(seam, "missing", f"{name} is no class")
    if seam.kind == "field":
        if any(_sets(base.node, member) for base in bases):
            return SeamStatus(seam, "found")
        return SeamStatus(seam, "missing", f"{name} sets no {member}")
    parameters = _parameters(found, bases, member)
    if parameters is None:
        return SeamStatus(seam, "missing", f"no callable {member or name}")
    names, needed = parameters
    known, more = names[: len(seam.parameters)], names[len(seam.parameters) :]
    if tuple(known) != seam.parameters:
        expected = ", ".join(seam.parameters)
        return SeamStatus(seam, "changed", f"expected parameters {expected}, got {', '.join(names)}")
    if seam.kind == "call" and (more := [name for name in more if name in needed]):
        return SeamStatus(seam, "changed", f"needs further parameters {', '.join(more)}")
    return SeamStatus(seam, "found")


def _parameters(found: _Found, bases: list[_Found], member: str) -> tuple[list[str], set[str]] | None:
    """Names of all parameters, and of those that need an argument; None when it cannot be called."""
    if member:
        function = _method(bases, member)
        return None if function is None else _of_function(function)
    if isinstance(found.node, _Function):
        return _of_function(found.node)
    if not bases:
        return None
    init = _method(bases, "__init__")
    if init is not None:
        names, needed = _of_function(init)
        return names[1:], needed - {names[0]}
    fields = [
        node for base in reversed(bases) for node in _body(base.node) if isinstance(node, ast.AnnAssign)
    ]
    named = {node.target.id: node.value is None for node in fields if isinstance(node.target, ast.Name)}
    return list(named), {name for name, required in named.items() if required}


def _of_function(function: _Function) -> tuple[list[str], set[str]]:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    needed = {name for name, value in zip(keywords, arguments.kw_defaults, strict=True) if value is None}
    variable = [argument.arg for argument in (arguments.vararg,) if argument is not None]
    return [*positional, *variable, *keywords], {*without_default, *needed}


def _method(bases: list[_Found], name: str) -> _Function | None:
    for base in bases:
        for node in _body(base.node):
            if isinstance(node, _Function) and node.name == name:
                return node
    return None


def _sets(node: ast.stmt, name: str) -> bool:
    """Whether a class declares the attribute, or any of its methods sets it on something."""
    for member in _body(node):
        if name in _assigned(member) or (isinstance(member, _Function) and member.name == name):
            return True
        for inner in ast.walk(member) if isinstance(member, _Function) else ():
            if isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store):
                return True
    return False


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


#: Modules that vLLM's fix for recurrent layers changed, and what stands there without it, but for white space.
_UNFIXED = {
    "vllm.v1.attention.backends.gdn_attn": r"num_decode_draft_tokens_cpu\[[^]]+\]\.sum\(\)\.item\(\)==0",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid": r"num_draft_tokens_per_req>0",
}


def recurrent_fault(root: Path | None = None) -> str:
    """What is wrong with vLLM's recurrent layers, in words: a row without drafts behind accepted ones goes on from
    the state before these, where its fix is missing. Empty where it is there. root: as of `probe_sources`."""
    sources = Sources(root or installed_root() or Path())
    for module, fault in _UNFIXED.items():
        text = sources.text(module)
        if text is None or re.search(fault, re.sub(r"\s", "", text)):
            return f"this vLLM has no fix for recurrent layers beside drafts (vllm#39273), see {module}"
    return ""


@functools.cache
def installed_root() -> Path | None:
    """The directory that holds the installed vLLM, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of every seam; 0 when all are found."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        print("usage: python -m vllm_integration.seams.source_probe WHEEL_OR_DIRECTORY", file=sys.stderr)
        return 2
    root = Path(given[0])
    statuses = probe_sources(zipfile.Path(root) if root.suffix == ".whl" else root)
    for status in statuses:
        place = f"{status.seam.module}.{status.seam.attribute}"
        detail = f": {status.detail}" if status.detail else ""
        print(f"{status.state:8}{status.seam.name:26}{place}{detail}")
    bad = [status for status in statuses if status.state != "found"]
    print(f"{given[0]}: {len(statuses) - len(bad)} of {len(statuses)} seams found")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every private name of vLLM that the plugin uses, renamed or changed, one at a time.

In the sources of vLLM as the probe reads them; its group is then installed in the vLLM of this process. Exactly
this name has to be reported, and a group that misses one wraps nothing, costs what the table says, and leaves the
others whole.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from vllm_integration.seams import guard, source_probe
from vllm_integration.seams import install as installer
from vllm_integration.seams.table import GROUPS, SEAMS, Seam

#: The one ERROR line where a name of the core is missing.
OFF = "gpu_align is off, vLLM serves without predicted outputs: "
OTHER = "spelt_differently"
#: What has an attribute, and its name.
Place = tuple[Any, str]
#: `make test` takes every n-th.
EVERY = 8
#: Those of the installed vLLM, parsed once.
SOURCES = source_probe.Sources(source_probe.installed_root() or Path())


def changes(every: int) -> list[tuple[Seam, str]]:
    """Each seam renamed, and where it has a signature changed; every n-th of these."""
    how = [
        (seam, how) for seam in SEAMS for how in ("renamed", "changed") if how == "renamed" or seam.parameters
    ]
    return how[::every]


def wrong_of(chosen: list[tuple[Seam, str]]) -> list[str]:
    """What is otherwise than expected after each of these changes, in this process."""
    for group in GROUPS.values():
        for module in group.modules:
            importlib.import_module(module)
    places = {seam: _owner(seam) for seam in SEAMS}
    originals = {seam: inspect.getattr_static(*places[seam]) for seam in SEAMS if seam.kind == "wrap"}
    source_probe.Sources = lambda _: SOURCES  # type: ignore[assignment,misc]
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    installer.logger.addHandler(handler)
    installer.logger.propagate = False
    found = []
    for seam, how in chosen:
        with _as_it_was(originals, places), _edited(seam, how, places) as touched:
            lines.clear()
            wrong = [*_differs(seam, how, originals, places, touched, lines)]
        found += [f"{seam.name} {how}: {each}" for each in wrong]
    return found


def _differs(
    seam: Seam,
    how: str,
    originals: dict[Seam, Any],
    places: dict[Seam, Place],
    touched: Callable[[Seam], bool],
    lines: list[str],
) -> Iterator[str]:
    def is_wrapped(seam: Seam) -> bool:
        owner, leaf = places[seam]
        return hasattr(inspect.getattr_static(owner, leaf, None), installer.MARK)

    own = seam.groups[0]
    reason = installer.install(own)
    state = "missing" if how == "renamed" else "changed"
    reported = re.findall(r"(vllm[\w.]*) is (missing|changed): ", reason)
    expected = [(s.place, state) for s in SEAMS if own in s.groups and touched(s)]
    if not reported or reported != expected[: len(reported) if reason.endswith(" characters") else None]:
        yield f"reported {reported}"
    if any(is_wrapped(s) for s in originals if own in s.groups):
        yield "something of the group is wrapped"
    costs = GROUPS[own].costs
    if [line.startswith(f"gpu_align {costs}: " if costs else OFF) for line in lines] != [True]:
        yield f"lines {lines}"
    if (installer.off_reason() is not None) != (not costs):
        yield f"off: {installer.off_reason()}"
    for name in GROUPS:
        if any(touched(s) for s in SEAMS if name in s.groups):
            continue
        wrapped = [s for s in originals if name in s.groups]
        if installer.install(name) or not all(map(is_wrapped, wrapped)):
            yield f"{name} is not whole"


def test_a_changed_name_costs_its_group_alone_and_is_reported(count: Callable[[int], int]) -> None:
    """In a process of its own, whose vLLM is changed."""
    if source_probe.installed_root() is None:
        pytest.skip("vLLM is not installed")
    chosen = changes(max(1, EVERY // count(1)))
    assert len(chosen) >= len(SEAMS) // EVERY
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(wrong_of, chosen).result(600) == []


@contextmanager
def _as_it_was(originals: dict[Seam, Any], places: dict[Seam, Place]) -> Iterator[None]:
    """The plugin on, nothing wrapped and nothing told, before and after."""
    installer._off_reason = None
    os.environ.pop(guard._TOLD, None)
    source_probe.probe_installed.cache_clear()
    try:
        yield
    finally:
        installer._off_reason = None
        source_probe.probe_installed.cache_clear()
        for seam, original in originals.items():
            if inspect.getattr_static(*places[seam]) is not original:
                setattr(*places[seam], original)


def _owner(seam: Seam) -> Place:
    owner: Any = importlib.import_module(seam.module)
    *path, leaf = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, leaf


@contextmanager
def _edited(seam: Seam, how: str, places: dict[Seam, Place]) -> Iterator[Callable[[Seam], bool]]:
    """Sources with this name spelt differently, or with another signature; which seams this touches."""
    owner, leaf = places[seam]
    value = getattr(owner, leaf, None)
    homes = _homes(owner)
    if how == "renamed" and leaf == "__init__":  # every class has one: the class is renamed
        leaf, homes = owner.__name__, [importlib.import_module(seam.module)]
    elif how == "changed" and not isinstance(owner, type):  # where it is defined, which may be elsewhere
        homes = _homes(value) if isinstance(value, type) else [sys.modules[value.__module__]]
        leaf = "__init__" if isinstance(value, type) else value.__name__
    new = Edit(leaf, "" if how == "renamed" else seam.parameters[-1])
    trees = {getattr(home, "__module__", home.__name__): None for home in homes}
    with ExitStack() as undo:
        for module in trees:
            tree = SOURCES.tree(module)
            owners = {home.__name__ for home in homes if getattr(home, "__module__", "") == module}
            if tree is not None:
                SOURCES._trees[module] = new.of(tree, owners)
                undo.callback(SOURCES._trees.__setitem__, module, tree)

        def touched(other: Seam) -> bool:
            there, name = places[other]
            if how == "renamed" and isinstance(homes[0], types.ModuleType):
                return other.module == seam.module and other.attribute.partition(".")[0] == leaf
            if how == "changed" and not isinstance(owner, type):
                return getattr(there, name, None) is value
            same = name == leaf and bool({*_homes(there)} & {*homes})
            return same and (how == "renamed" or bool(other.parameters))

        yield touched


def _homes(owner: Any) -> list[Any]:
    """Where an attribute of `owner` may be defined."""
    return [base for base in getattr(owner, "__mro__", (owner,)) if base is not object]


class Edit(ast.NodeTransformer):
    """Spells a name differently, or where there is one, a parameter of what has this name."""

    def __init__(self, name: str, parameter: str) -> None:
        self._name, self._parameter = name, parameter

    def of(self, tree: ast.Module, owners: set[str]) -> ast.Module:
        """A copy with the name edited in these classes or functions; without any, in the module itself."""
        edited, kinds = copy.deepcopy(tree), (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in [n for n in ast.walk(edited) if isinstance(n, kinds) and n.name in owners]:
            node.body = [self.visit(statement) for statement in node.body]
        return edited if owners else self.visit(edited)

    def visit(self, node: Any) -> Any:
        if self._parameter:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == self._name:
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    argument.arg = OTHER if argument.arg == self._parameter else argument.arg
            if self._name == "__init__" and isinstance(node, ast.AnnAssign):  # a field of a dataclass
                node.target = Edit(self._parameter, "").visit(node.target)
            return self.generic_visit(node) if isinstance(node, ast.Module | ast.If) else node
        for field in ("name", "id", "attr"):
            if getattr(node, field, None) == self._name:
                node = copy.copy(node)
                setattr(node, "asname" if isinstance(node, ast.alias) else field, OTHER)
        return self.generic_visit(node)

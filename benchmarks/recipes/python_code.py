"""Python: functions of packages. Samples of a group are functions of one file; only their structure agrees."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.recipes.groups import Group, Output, Task, fives, shuffled
from benchmarks.recipes.packages import CODE, Package, Shelf

NAME = "python"
MOST_GROUPS, MOST_OUTPUTS = 600, 300
#: Functions of one package that are replayed.
MOST_OF_A_PACKAGE = 60
#: Characters of a function.
LEAST, MOST = 250, 2_000


class Function(NamedTuple):
    """A function of a package: its module, its name, its source and its syntax tree."""

    module: str
    name: str
    source: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


def task(shelf: Shelf) -> Task:
    """Groups of functions of one module, and single functions."""
    groups = []
    for package in CODE["train"]:
        by_module: dict[str, list[str]] = {}
        for function in functions(shelf, package):
            by_module.setdefault(function.module, []).append(function.source)
        for module, sources in by_module.items():
            groups += [Group(NAME, _ask(module), samples) for samples in fives(sources)]
    outputs = []
    for package in CODE["test"]:
        found = {function.source: function.module for function in functions(shelf, package)}
        for source in shuffled(found, NAME)[:MOST_OF_A_PACKAGE]:
            outputs.append(Output(NAME, _ask(found[source]), source))
    return Task(shuffled(groups, NAME)[:MOST_GROUPS], shuffled(outputs, NAME)[:MOST_OUTPUTS])


def _ask(module: str) -> str:
    return f"Write a function of the module {module}.\n"


def functions(shelf: Shelf, package: Package, least: int = LEAST, most: int = MOST) -> Iterator[Function]:
    """The functions of a package whose source has `least` to `most` characters, in the order of its files."""
    for path, text in shelf.texts(package, "python").items():
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        module = path.removesuffix(".pyi").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        lines = text.splitlines(keepends=True)
        for node in _defined(tree):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
            if least <= len(source) <= most:
                yield Function(module, node.name, source, node)


def _defined(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of the module and methods of its classes."""
    for outer in tree.body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

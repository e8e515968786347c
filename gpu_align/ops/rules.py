"""Numbers and scalar rules of the operations, each written once, and how kernels and references see them.

A number is a plain int at the top of the operation that owns it, a rule a function marked by `@rule` beside it.
Both are named with their operation: ``from ..device import match`` in a kernel and ``from ..host import match`` in
a reference, then ``match.MAX_MATCH`` and ``match.key_of(...)``. Rules name those of lower operations likewise,
after ``from .. import match``.

Triton and Numba compile a rule, for kernels with blocks as arguments: it has no branch but `where`, and no loop.
Integer division of what may be below 0 differs between the two: no rule does it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

Rule = TypeVar("Rule", bound=Callable[..., Any])

#: What a step is made of, from the lowest up: each imports those before it only. `layout` is what all share, and
#: `lcs`, of whole texts, no part of a step.
OPERATIONS = "layout", "index", "align", "match", "choose", "recipes", "compose", "step", "lcs"
_rules: set[Any] = set()


def rule(function: Rule) -> Rule:
    """For a function at the head of an operation that both sides compile."""
    _rules.add(function)
    return function


def where(condition: int, a: int, b: int) -> int:
    return a if condition else b


def int64(value: int) -> int:
    return int(value)


def int32(value: int) -> int:
    return int(value)


def numbers_of(operation: str) -> dict[str, int | tuple[int, ...]]:
    """As they are now: a caller may have set other values than the file has."""
    names = vars(_module_of(operation)).items()
    return {name: value for name, value in names if name.isupper() and isinstance(value, int | tuple)}


def compile_rules(
    operation: str,
    compile_rule: Callable[[FunctionType], Any],
    primitives: dict[str, Any],
    numbers: dict[str, Any],
    namespace_of: Callable[[str], Any],
) -> dict[str, Any]:
    """The numbers of an operation, and its rules, compiled; what these refer to is taken from the arguments.

    namespace_of: of another operation, which a rule names.
    """
    module = _module_of(operation)
    functions = ((name, value) for name, value in vars(module).items() if isinstance(value, FunctionType))
    found = {name: function for name, function in functions if function in _rules}
    twins = {**vars(module), **primitives, **numbers}
    for name, value in vars(module).items():
        if isinstance(value, ModuleType) and value.__name__.rpartition(".")[0] == __package__:
            twins[name] = namespace_of(name)
    for name, function in found.items():
        twins[name] = compile_rule(FunctionType(function.__code__, twins, name))
    return numbers | {name: twins[name] for name in found}


def _module_of(operation: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{operation}")

"""Scalar rules that kernels and references share, each written once, in plain Python, beside its numbers.

`ops.host` compiles them by Numba for the references, `ops.device` by Triton for the kernels, where arguments may
be blocks: so a rule has no branch but `where`, and no loop. Integer division of what may be below 0 differs
between the two: no rule does it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

Rule = TypeVar("Rule", bound=Callable[..., Any])

_rules: list[Any] = []


def rule(function: Rule) -> Rule:
    """For a function at the head of an operation that both sides compile."""
    _rules.append(function)
    return function


@rule
def where(condition: int, a: int, b: int) -> int:
    return a if condition else b


@rule
def int64(value: int) -> int:
    return int(value)


@rule
def int32(value: int) -> int:
    return int(value)


def compile_all(compile_rule: Callable[[FunctionType], Any], names: dict[str, Any]) -> dict[str, Any]:
    """Every rule, compiled, by name; a rule that `names` has is taken from there, as is what rules refer to."""
    twins = {name: value for function in _rules for name, value in function.__globals__.items()} | names
    for function in _rules:
        if (name := function.__name__) not in names:
            # By its name: another function may stand in its place.
            twins[name] = compile_rule(FunctionType(function.__globals__[name].__code__, twins, name))
    return twins

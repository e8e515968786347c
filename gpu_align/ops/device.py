"""Numbers and rules as kernels see them, see `rules`.

A kernel must not read a plain module constant, nor an attribute of a module, as Triton does not make these part of
its cache key, and a changed value would run a stale binary. A ``tl.constexpr`` is part of it: an operation is one.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from .rules import OPERATIONS, compile_rules, numbers_of


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _int64(value):
    return value.to(tl.int64)


@triton.jit
def _int32(value):
    return value.to(tl.int32)


_PRIMITIVES = {"tl": tl, "where": _where, "int64": _int64, "int32": _int32}


class _Operation(tl.constexpr):  # type: ignore[misc]
    """Its numbers and rules as one constexpr. A compiler takes attributes of its value, the interpreter these."""

    def __init__(self, name: str) -> None:
        self.numbers = {key: tl.constexpr(value) for key, value in numbers_of(name).items()}
        names = compile_rules(name, triton.jit, _PRIMITIVES, self.numbers, _namespace)
        super().__init__(SimpleNamespace(**names))

    def __getattr__(self, name: str) -> Any:
        if name == "value" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        """Part of a cache key, as the sources of the rules that a kernel uses are."""
        return repr(self.numbers)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # Triton keeps it to see whether it has changed


_namespace = cache(_Operation)


def __getattr__(name: str) -> Any:
    if name not in OPERATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _namespace(name)

"""Numbers and rules as kernels see them: ``from ..device import WAYS, rank_of``.

A number of `layout` or of an operation is a ``tl.constexpr`` here: a kernel must not read a plain module constant,
nor an attribute of a module, as Triton does not make these part of its cache key, and a changed value would run a
stale binary. The rules of `ops.rules` are compiled by Triton here.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from . import align, choose, compose, layout, match, recipes, rules


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def int64(value):
    return value.to(tl.int64)


@triton.jit
def int32(value):
    return value.to(tl.int32)


def _names() -> dict[str, Any]:
    modules = layout, align, match, choose, compose, recipes
    numbers = {name: value for module in modules for name, value in vars(module).items() if name.isupper()}
    twins = {name: tl.constexpr(value) for name, value in numbers.items() if isinstance(value, int | tuple)}
    return {**twins, "tl": tl, "where": where, "int64": int64, "int32": int32}


_TWINS = rules.compile_all(triton.jit, _names())


def __getattr__(name: str) -> Any:
    if name not in _TWINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _TWINS[name]

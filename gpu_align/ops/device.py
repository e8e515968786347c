"""Numbers and rules as kernels see them: ``from ..device import c``, then ``c.WAYS`` and ``c.rank_of(...)``.

A kernel must not read a plain module constant, nor an attribute of a module, as Triton does not make these part of
its cache key, and a changed value would run a stale binary. A ``tl.constexpr`` is part of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from . import rules
from .constants import numbers


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def int64(value):
    return value.to(tl.int64)


@triton.jit
def int32(value):
    return value.to(tl.int32)


_NUMBERS = {name: tl.constexpr(value) for name, value in numbers().items() if isinstance(value, int | tuple)}
_PRIMITIVES = {"tl": tl, "where": where, "int64": int64, "int32": int32}


class _Common(tl.constexpr):  # type: ignore[misc]
    """All of them as one constexpr. A compiler looks for its attributes in its value, the interpreter here."""

    def __getattr__(self, name: str) -> Any:
        if name == "value" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        """Part of a cache key, as the sources of the rules that a kernel uses are."""
        return repr(_NUMBERS)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # Triton keeps it to see whether it has changed


c = _Common(SimpleNamespace(**rules.compile_all(triton.jit, {**_NUMBERS, **_PRIMITIVES})))

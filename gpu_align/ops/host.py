"""The rules as references see them: ``from ..host import rank_of``. Numba compiles them where it is installed."""

from __future__ import annotations

from typing import Any

from . import rules
from .jit import njit

_TWINS = rules.compile_all(njit, {})


def __getattr__(name: str) -> Any:
    if name not in _TWINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _TWINS[name]

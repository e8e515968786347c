"""The references' loops: compiled by Numba where it is installed, plain Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba import njit as _njit
except ImportError:  # the same results, some hundred times slower
    COMPILED = False

    def njit(function: F) -> F:
        return function

else:
    COMPILED = True

    def njit(function: F) -> F:
        compiled: F = _njit(function)
        return compiled

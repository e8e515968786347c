"""Loops over the requests of a step that Numba compiles in the background. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from threading import main_thread
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_align.ops import host
from gpu_align.ops.host import Entry

F = TypeVar("F", bound=Callable[..., Any])

#: Arrays by the number of their axes.
Ints1 = npt.NDArray[np.int64]
Ints2: TypeAlias = Ints1
Ints3: TypeAlias = Ints1
Shorts1 = npt.NDArray[np.int16]
Shorts3: TypeAlias = Shorts1
Bytes1 = npt.NDArray[np.uint8]
Bytes2: TypeAlias = Bytes1
Floats1 = npt.NDArray[np.float64]
Floats2: TypeAlias = Floats1
Floats3: TypeAlias = Floats1
#: A value of each type that a loop may take, by the name that its annotation has.
_EXAMPLES: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
for _name, _type in {"Ints": np.int64, "Shorts": np.int16, "Bytes": np.uint8, "Floats": np.float64}.items():
    _EXAMPLES |= {f"{_name}{axes}": np.zeros([1] * axes, _type) for axes in (1, 2, 3)}
LOOPS: list[Loop] = []


def helper(function: F) -> F:
    """A function that loops may call."""
    if host.COMPILED:
        from numba.extending import register_jitable

        register_jitable(function)
    return function


class Loop:
    """A function, as a decorator, that calls none of ours but a `helper`: plain Python until it is compiled, by
    the types of its annotations; then it checks no bounds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = self._run = function
        self._entry = Entry(function)
        LOOPS.append(self)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def compile(self) -> None:
        types = [kind for name, kind in self.plain.__annotations__.items() if name != "return"]
        self._run = self._entry.prepare(*map(_EXAMPLES.__getitem__, types))


def compile_loops() -> None:
    """Compile all loops that are imported by now, or load them. Any thread may call it; a process that ends waits
    for one loop, which cannot be cut off in LLVM, and not for the others."""
    for loop in LOOPS:
        if main_thread().is_alive():
            loop.compile()

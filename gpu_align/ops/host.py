"""Loops that Numba compiles where it is installed, plain Python elsewhere; numbers and rules as references see
them, see `rules`."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from .rules import OPERATIONS, compile_rules, int32, int64, numbers_of, where

F = TypeVar("F", bound=Callable[..., Any])

#: What keeps an entry from being compiled once for all processes, the latest reason; empty while nothing does.
not_kept = ""
#: Held while an entry is compiled: a thread that needs what another one compiles waits for it.
_COMPILING = threading.Lock()

try:
    import numba
    from numba.core.options import DefaultOptions
except Exception as error:  # not there, or not for this NumPy, which it may find out in any way
    COMPILED = False
    not_kept = "Numba is not installed" if isinstance(error, ModuleNotFoundError) else f"Numba: {error}"
else:
    # Asked for its `__dict__`, this object of Numba's compiler answers with an invalid function of LLVM. Code that
    # looks through the objects of all modules, as vLLM does on the CPU when an engine starts, would stumble on it.
    _llvm = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    getattr(_llvm, "_fntab", {}).setdefault("__dict__", {})
    # With NUMBA_DISABLE_JIT=1 Numba itself leaves every function as it is.
    COMPILED = not numba.config.DISABLE_JIT
    # The loops own nothing. Without this flag, which Numba has for itself, every slice and every call counts
    # references, and a step takes twice as long.
    _OPTIONS = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
    # State and candidates are tuples of arrays, and a call passes them word by word: inlined, a step takes a
    # third less.
    _INNER = {**_OPTIONS, "forceinline": True}


def njit(function: F) -> F:
    """For a loop that other loops call."""
    return cast(F, numba.njit(**_INNER)(function)) if COMPILED else function


@njit
def to_int(value: Any) -> int:
    """An int; under Numba, whose `int` keeps the width of an int32, an int64."""
    return int(value) + 0


_PRIMITIVES = {function.__name__: njit(function) for function in (where, int64, int32)}


@cache
def _namespace(operation: str) -> ModuleType:
    """A module, as Numba takes what is in one for constants, and compiles calls of its functions."""
    module = ModuleType(operation)
    vars(module).update(compile_rules(operation, njit, _PRIMITIVES, numbers_of(operation), _namespace))
    return module


def __getattr__(name: str) -> Any:
    if name not in OPERATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _namespace(name)


class Entry:
    """A loop that Python calls: ``entry(*args)``, as a decorator.

    It is compiled once, for the types of the first arguments, arrays with any strides; `prepare` does it ahead.
    What is compiled is kept on disk, where Numba keeps such things, for the next process.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._run: Callable[..., Any] | None = None if COMPILED else function

    def __call__(self, *args: Any) -> Any:
        return self.prepare(*args)(*args)

    def prepare(self, *args: Any) -> Callable[..., Any]:
        """Return the function for arguments of these types, compiled or loaded by now. Any thread may call it."""
        if self._run is None:
            with _COMPILING:
                if self._run is None:
                    self._run = self._compile(args)
        return self._run

    def _compile(self, args: tuple[Any, ...]) -> Any:
        kinds = map(numba.typeof, args)
        signature = tuple(kind.copy(layout="A") if hasattr(kind, "layout") else kind for kind in kinds)
        global not_kept
        try:
            # Numba goes by the file of this function alone. Its callees and constants are in others: the name,
            # which is that of the file that Numba writes, tells their versions apart.
            self._function.__qualname__ = f"{self._function.__name__}_{_digest(self._function)}"
            compiled = numba.njit(cache=True, **_OPTIONS)(self._function)
            compiled.compile(signature)
        except Exception as error:  # no sources, no place to write, a full disk, a file cut short: do without
            not_kept = type(error).__name__
            compiled = numba.njit(**_OPTIONS)(self._function)
            compiled.compile(signature)
        # From here on other types are refused, and arrays of other strides are taken as they are.
        compiled.disable_compile()
        return compiled


@cache
def _bytes_in(folder: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*.py")))


def _digest(function: Callable[..., Any]) -> str:
    """Of all that a reference may be made of, of the function's file and, in another package, of all files there;
    and of the constants as they are now, of all operations: those imported so far differ from process to process,
    which would compile again."""
    ours, theirs = (name.partition(".")[0] for name in (__name__, function.__module__))
    folders = {str(Path(__file__).parent)}
    if ours != theirs:
        folders |= {*getattr(sys.modules.get(theirs), "__path__", ())}
    digest = hashlib.sha256(b"".join(map(_bytes_in, sorted(folders))))
    digest.update(Path(function.__code__.co_filename).read_bytes())
    digest.update(repr([(name, numbers_of(name)) for name in OPERATIONS]).encode())
    return digest.hexdigest()[:16]

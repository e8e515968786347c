"""Modules of the library with other constants and functions than their files say, for one process.

A process that measures what the drafter is without one of its mechanisms calls `install` before it imports
``gpu_align``. Each name is replaced at the moment its module binds it, by an assignment, a ``def`` or an
``import``, so that everything that the module derives from it is derived from the new value. The library knows
nothing of it.

Numba's disk cache goes by the library's sources and would return code of another process with other constants:
such a process needs an empty ``NUMBA_CACHE_DIR`` of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

#: Module → name → what it is instead. A function is compiled as the module compiles its own.
Overrides = Mapping[str, Mapping[str, Any]]


def install(overrides: Overrides) -> None:
    """Override names of modules that are imported from now on."""
    if imported := sorted(overrides.keys() & sys.modules.keys()):
        raise ValueError(
            f"overrides: expected modules that are not imported yet, found {', '.join(imported)}"
        )
    sys.meta_path.insert(0, _Finder(overrides))


class _Finder(MetaPathFinder):
    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._overrides:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._overrides[fullname])
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, overrides: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._overrides = overrides

    def exec_module(self, module: ModuleType) -> None:
        names = _Namespace(module.__dict__, self._overrides)
        code = self.get_code(module.__name__)
        assert code is not None
        exec(code, module.__dict__, names)
        if unbound := sorted(names.left):
            raise ValueError(
                f"{module.__name__}: expected the names {', '.join(unbound)}, found none of them"
            )


class _Namespace(dict[str, Any]):
    """A module's names while its file is executed. What is stored under an overridden name is the override."""

    def __init__(self, names: dict[str, Any], overrides: Mapping[str, Any]) -> None:
        super().__init__()
        self._names = names
        self._overrides = overrides
        self.left = set(overrides)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._overrides:
            self.left.discard(name)
            value = self._overrides[name]
            if isinstance(value, FunctionType):
                value = self._names["njit"](value)
        self._names[name] = value  # where it is looked up, too: nothing is held here

    def __delitem__(self, name: str) -> None:
        del self._names[name]

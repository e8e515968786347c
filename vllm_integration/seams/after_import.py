"""Calls a function as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` as soon as `module` is imported; now, if it is already.

    vLLM runs plugins in every process, also in those that never need these modules: importing them here would
    delay the start of each. `callback` must not raise unless the import is to fail.
    """
    with _lock:
        loaded = sys.modules.get(module)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            callback()
            return
        _pending.setdefault(module, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the other finders look and adds the callbacks to their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_callbacks_after(spec.loader, fullname)
                return spec
        return None


def _run_callbacks_after(loader: Any, fullname: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        with _lock:
            callbacks = _pending.pop(fullname, [])
        for callback in callbacks:
            callback()

    loader.exec_module = exec_module  # this loader serves this one import


_lock = threading.RLock()
_pending: dict[str, list[Callable[[], None]]] = {}
_finder = _AfterImport()

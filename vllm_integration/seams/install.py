"""The installer of all seams: looks a group up in vLLM's sources, then wraps all of it or nothing."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from . import source_probe
from .guard import Function, first_to_tell, logger, shown_error, strict
from .table import GROUPS, SEAMS

#: A function of vLLM's that a wrapper gets as its first argument.
Original = Callable[..., Any]
#: Set on every replacement: the name of its seam.
MARK = "__gpu_align_seam__"


def when_imported(module: str, callback: Callable[[], object]) -> None:
    """Call `callback` as soon as `module` is imported; now, if it is already. vLLM runs plugins in every
    process, also in those that never need these modules. Where `callback` raises, the import fails."""
    with _finder_lock:
        loaded = sys.modules.get(module)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            callback()
            return
        _pending.setdefault(module, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders look, and adds the callbacks to their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        for finder in others if fullname in _pending else ():
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if loader is not None:  # it serves this one import
                    loader.exec_module = functools.partial(_run_callbacks_after, loader.exec_module, fullname)
                return spec
        return None


def _run_callbacks_after(execute: Callable[[ModuleType], None], fullname: str, module: ModuleType) -> None:
    execute(module)
    with _finder_lock:
        callbacks = _pending.pop(fullname, [])
    for callback in callbacks:
        callback()


_finder_lock = threading.RLock()
_pending: dict[str, list[Callable[[], object]]] = {}
_finder = _AfterImport()


class SeamError(RuntimeError):
    """A group could not be installed."""


_lock = threading.RLock()
_off_reason: str | None = None
_watched: set[str] = set()
_installed: set[str] = set()
_wrappers: dict[str, Callable[..., Any]] = {}


def turn_off(reason: str) -> None:
    """Make every wrapper of this process a plain call of its original. One ERROR line, the first time."""
    global _off_reason
    with _lock:
        if _off_reason is None:
            _off_reason = reason
            tell(f"gpu_align is off, vLLM serves without predicted outputs: {reason}")


def off_reason() -> str | None:
    """Why the plugin is off in this process, or None while it is on."""
    return _off_reason


def tell(line: str) -> None:
    """An ERROR line, once a server: each of its processes finds the same."""
    logger.log(logging.ERROR if first_to_tell(line) else logging.DEBUG, "%s", line)


def namesakes() -> list[str]:
    """The origins of the plugins of this name, if there are several."""
    points = entry_points(group="vllm.general_plugins", name="gpu_align")
    found = sorted({f"{point.value} of {point.dist.name if point.dist else '?'}" for point in points})
    return found if len(found) > 1 else []


def seam(*names: str) -> Callable[[Function], Function]:
    """Declare `def wrapper(original, *args, **kwargs)` as what replaces the "wrap" seams of these names."""

    def declare(wrapper: Function) -> Function:
        _wrappers.update(dict.fromkeys(names, wrapper))
        return wrapper

    return declare


def wrapped_by(wrapper: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes `wrapper(original, *args, **kwargs)` of `original(*args, **kwargs)`."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return replacement

    return wrap


def watch() -> None:
    """Have each group with a vLLM module installed when vLLM imports it. Imports nothing; again is harmless."""
    for name, group in GROUPS.items():
        if group.after and name not in _watched:
            _watched.add(name)
            when_imported(group.after, functools.partial(install, name))


def install(name: str) -> str:
    """Install a group, whole or not at all; why it is not, empty when it is. Again is harmless. One ERROR line
    says what that costs: an extra itself, the core the plugin. When strict this raises `SeamError`."""
    group = GROUPS[name]
    if source_probe.too_old(version := source_probe.version_of()):
        turn_off(f"vLLM {version} is older than {source_probe.run_with()[0]}")
        return _off_reason or ""
    try:
        with _lock:
            _install(name)
            _installed.add(name)
    except Exception as error:
        if strict():
            raise
        reason = str(error) if isinstance(error, SeamError) else shown_error(error)
        if group.costs:
            tell(f"gpu_align {group.costs}: {reason}")
        else:
            turn_off(reason)
        return reason
    return ""


def is_installed(name: str) -> bool:
    """Whether `install` has installed this group in this process."""
    return name in _installed


def _install(name: str) -> None:
    for module in GROUPS[name].modules:
        importlib.import_module(module)
    if reason := missing(name):
        raise SeamError(reason)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for member in SEAMS:
            if name not in member.groups or member.kind != "wrap":
                continue
            *path, leaf = member.attribute.split(".")
            owner = functools.reduce(getattr, path, importlib.import_module(member.module))
            original = inspect.getattr_static(owner, leaf)
            if hasattr(original, MARK):
                continue
            replacement = wrapped_by(_wrappers[member.name])(original)
            setattr(replacement, MARK, member.name)
            undo.append((owner, leaf, original))
            setattr(owner, leaf, replacement)
            logger.debug("gpu_align wraps %s.%s", member.module, member.attribute)
    except Exception:
        for owner, leaf, original in reversed(undo):
            setattr(owner, leaf, original)
        raise


def missing(*groups: str) -> str:
    """The names of these groups that vLLM's sources lack or define otherwise; empty if they have all."""
    bad = [
        status
        for status in source_probe.probe_installed(source_probe.installed_root(), SEAMS)
        if status.state != "found" and not set(groups).isdisjoint(status.seam.groups)
    ]
    what = "; ".join(f"{s.seam.place} is {s.state}: {s.detail}" for s in bad)
    return f"{what} (run with vLLM {', '.join(source_probe.run_with())})" if bad else ""

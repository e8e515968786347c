"""The one function that wraps private names of vLLM, each listed in `seams`.

A seam is a name vLLM does not promise to keep. Each is probed by its signature before anything is
changed, and a group is installed whole or not at all. A seam that is missing or has changed turns the
plugin off for the process: vLLM serves as if it were not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

from vllm_integration.seams import (
    APP_MODULE,
    BATCH_MODULE,
    CHAT_MODULE,
    COMPLETION_MODULE,
    CONFIG_MODULE,
    INPUTS_MODULE,
    RESPONSES_MODULE,
    RUNNER_MODULE,
    SEAMS,
    TESTED,
    Group,
    Seam,
    SeamStatus,
    signature_difference,
    source_probe,
)

__all__ = [
    "APP_MODULE",
    "BATCH_MODULE",
    "CHAT_MODULE",
    "COMPLETION_MODULE",
    "CONFIG_MODULE",
    "INPUTS_MODULE",
    "RESPONSES_MODULE",
    "RUNNER_MODULE",
    "SEAMS",
    "TESTED",
    "Group",
    "Seam",
    "SeamError",
    "SeamStatus",
    "install",
    "off_reason",
    "probe",
    "turn_off",
    "v2_is_whole",
    "when_imported",
]

logger = logging.getLogger("vllm.gpu_align")

MARK = "__gpu_align_seam__"

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class SeamError(RuntimeError):
    """A group could not be installed; the message names each seam and what was found."""


_lock = threading.RLock()
_off_reason: str | None = None


def turn_off(reason: str) -> None:
    """Make every wrapper of this process a plain call of its original. One ERROR line, the first time."""
    global _off_reason
    with _lock:
        if _off_reason is None:
            _off_reason = reason
            logger.error("gpu_align is off, vLLM serves without predicted outputs: %s", reason)


def off_reason() -> str | None:
    """Why the plugin is off in this process, or None while it is on."""
    return _off_reason


@functools.cache
def v2_is_whole() -> bool:
    """Whether the V2 runner has every seam of ours. Read from its sources: this is asked where the
    configuration is made, long before, and maybe in another process than, the runner is imported.

    If not, one WARNING line says what is missing, and our class is left to the V1 runner (with
    `GPU_ALIGN_STRICT=1` this raises `SeamError`).
    """
    root = source_probe.installed_root()
    seams = [seam for seam in SEAMS if seam.group in ("v2", "v2_runner")]
    if root is None:
        return False
    bad = [status for status in source_probe.probe_sources(root, seams) if status.state != "found"]
    if not bad:
        return True
    if strict():
        raise SeamError(_explain(bad))
    logger.warning("gpu_align does not know this vLLM's V2 model runner: %s", _explain(bad))
    return False


def strict() -> bool:
    """Whether a missing seam shall raise. Read leniently: this must not fail while vLLM starts."""
    return os.environ.get("GPU_ALIGN_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


def _explain(bad: Sequence[SeamStatus]) -> str:
    return (
        "; ".join(f"{s.seam.module}.{s.seam.attribute} is {s.state}: {s.detail}" for s in bad)
        + f" (tested with vLLM {', '.join(TESTED)})"
    )


def probe(seams: Sequence[Seam] = SEAMS) -> list[SeamStatus]:
    """Look every seam up, importing its module; nothing is changed."""
    return [_probe_one(seam) for seam in seams]


def install(group: Group, wrappers: Mapping[str, Wrapper], seams: Sequence[Seam] = SEAMS) -> None:
    """Wrap the "wrap" seams of a group, all or none; again is harmless.

    wrappers: seam name → a function that takes the original and returns its replacement.
    Raises `SeamError` when any seam of the group is not as it was tested; then nothing was changed.
    """
    members = [seam for seam in seams if seam.group == group]
    with _lock:
        bad = [status for status in probe(members) if status.state != "found"]
        if bad:
            raise SeamError(_explain(bad))
        undo: list[tuple[Any, str, Any]] = []
        try:
            for seam in members:
                if seam.kind != "wrap":
                    continue
                owner, leaf = _owner(seam)
                original = inspect.getattr_static(owner, leaf)
                if hasattr(original, MARK):
                    continue
                replacement = wrappers[seam.name](original)
                setattr(replacement, MARK, seam.name)
                undo.append((owner, leaf, original))
                setattr(owner, leaf, replacement)
                logger.debug("gpu_align wraps %s.%s", seam.module, seam.attribute)
        except Exception:
            for owner, leaf, original in reversed(undo):
                setattr(owner, leaf, original)
            raise


def _owner(seam: Seam) -> tuple[Any, str]:
    owner: Any = importlib.import_module(seam.module)
    *path, leaf = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, leaf


def _probe_one(seam: Seam) -> SeamStatus:
    try:
        owner, leaf = _owner(seam)
    except (ImportError, AttributeError) as error:
        return SeamStatus(seam, "missing", str(error))
    if seam.kind == "field":
        if _has_field(owner, leaf):
            return SeamStatus(seam, "found")
        return SeamStatus(seam, "missing", f"{owner.__name__} sets no {leaf}")
    if seam.kind == "global":
        found = hasattr(owner, leaf)
        return SeamStatus(seam, "found" if found else "missing", "" if found else f"no name {leaf}")
    target = getattr(owner, leaf, None)
    if not callable(target):
        return SeamStatus(seam, "missing", f"no callable {leaf}")
    difference = _signature_difference(target, seam)
    return SeamStatus(seam, "changed", difference) if difference else SeamStatus(seam, "found")


def _signature_difference(target: Callable[..., Any], seam: Seam) -> str:
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        return f"no signature: {error}"
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
    }
    return signature_difference(seam, [parameter.name for parameter in parameters], needed)


def _has_field(cls: type, name: str) -> bool:
    """Whether a class declares the attribute, or any of its methods sets it on something."""
    for base in cls.__mro__:
        if name in vars(base) or name in vars(base).get("__annotations__", {}):
            return True
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if isinstance(code, CodeType) and name in code.co_names:
                return True
    return False


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` as soon as `module` is imported; now, if it is already.

    vLLM runs plugins in every process, also in those that never need these modules, so that importing
    them here would cost everybody start-up time. `callback` must not raise unless the import shall fail.
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


_pending: dict[str, list[Callable[[], None]]] = {}
_finder = _AfterImport()

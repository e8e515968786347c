"""The installer of all seams: looks a group up in vLLM's sources, then wraps all of it or nothing. And what
happens where something of ours fails."""

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
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, TypeVar

from . import source_probe
from .table import GROUPS, SEAMS, TESTED, Seam

#: Characters that are shown of an id, and of an error message.
_LONGEST_ID, _LONGEST_MESSAGE = 100, 400


def shown_id(req_id: object) -> str:
    """A request id for a log line, which a client may have chosen: what does not print becomes escapes,
    backslashes are doubled, and what is longer than 100 characters ends in "…" and its length."""
    return shown_reason(str(req_id).replace("\\", "\\\\"), _LONGEST_ID)


def shown_error(error: BaseException) -> str:
    """`Type: message` of an exception in one line, up to 400 characters of the message."""
    try:
        message = str(error)
    except Exception:  # a __str__ of somebody else's
        message = ""
    return f"{type(error).__name__}: {shown_reason(message)}"


def shown_reason(reason: object, longest: int = _LONGEST_MESSAGE) -> str:
    """The message of an error without its type, or what stands for one, in the same way."""
    text = str(reason)
    head = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text[:longest]
    )
    return head if len(text) <= longest else f"{head}… of {len(text)} characters"


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
    """Finds nothing by itself: it lets the other finders look and adds the callbacks to their loader."""

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


logger = logging.getLogger("vllm.gpu_align")

#: Set on every replacement: the name of its seam.
MARK = "__gpu_align_seam__"

Function = TypeVar("Function", bound=Callable[..., Any])


class SeamError(RuntimeError):
    """A group could not be installed; the message names each seam and what was found."""


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
            logger.error("gpu_align is off, vLLM serves without predicted outputs: %s", reason)


def off_reason() -> str | None:
    """Why the plugin is off in this process, or None while it is on."""
    return _off_reason


def strict() -> bool:
    """Whether a missing seam shall raise. Read leniently: this must not fail while vLLM starts."""
    return os.environ.get("GPU_ALIGN_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


class Guard:
    """Runs steps of ours so that none of them costs anybody an answer.

        guard = Guard("any more")
        guard.run("counts no usage", step, *args)    # what the step returns; None once that has ended

    Where a step fails, what it serves ends: one ERROR line says so, "gpu_align counts no usage any more: …", and
    steps that serve nothing else do not run again. With `GPU_ALIGN_STRICT=1` the error is raised instead.

    told: stands behind what ends in that line. spared: types of errors that are never raised. retries: steps do
    run again, only the line is not repeated. then: called behind the line.
    """

    def __init__(
        self,
        told: str,
        *,
        spared: tuple[type[Exception], ...] = (),
        retries: bool = False,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        self._told, self._spared, self._retries, self._then = told, spared, retries, then
        self.ended: set[str] = set()

    def run(self, serves: str | tuple[str, ...], step: Callable[..., Any], *args: Any) -> Any:
        if self.has_ended(serves):
            return None
        try:
            return step(*args)
        except Exception as error:
            self.fail(serves, error)
            return None

    def has_ended(self, serves: str | tuple[str, ...]) -> bool:
        return not self._retries and self.ended.issuperset(_each(serves))

    def fail(self, serves: str | tuple[str, ...], error: Exception) -> None:
        """Handle the failure of a step."""
        if self.raises(error):
            raise error
        if ending := [each for each in _each(serves) if each not in self.ended]:
            self.ended.update(ending)
            logger.error("gpu_align %s %s: %s", " and ".join(ending), self._told, shown_error(error))
            self._then()

    def raises(self, error: Exception) -> bool:
        """Whether going on would be wrong."""
        return strict() and not isinstance(error, self._spared)


def _each(serves: str | tuple[str, ...]) -> tuple[str, ...]:
    return (serves,) if isinstance(serves, str) else serves


def guarded(method: Function) -> Function:
    """A method of an object whose `run` is that of a guard: what it returns, None where it fails or has ended."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(functools.partial(method, self, *args, **kwargs))

    return run  # type: ignore[return-value]


class DraftingGuard(Guard):
    """The same where drafting itself fails: the plugin is off in this process.

    num_ranks: tensor-parallel ranks that verify the drafts which each made itself. A rank without drafts beside
    others with them would compute another sequence, and the output would be wrong. A `TypeError` or `ValueError`
    comes from arguments, which are the same on all ranks; others may come from the machine, and are raised.
    """

    def __init__(self, num_ranks: int = 1, *, then: Callable[[], object] = lambda: None) -> None:
        super().__init__("", then=then)
        self._num_ranks = num_ranks

    def has_ended(self, serves: str | tuple[str, ...]) -> bool:
        return off_reason() is not None

    def raises(self, error: Exception) -> bool:
        return strict() or (self._num_ranks > 1 and not isinstance(error, (TypeError, ValueError)))

    def fail(self, serves: str | tuple[str, ...], error: Exception) -> None:
        if self.raises(error):
            raise error
        turn_off(f"{serves}, {shown_error(error)}")
        self._then()


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

        @functools.wraps(original)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(original, *args, **kwargs)

        return coroutine if inspect.iscoroutinefunction(wrapper) else replacement

    return wrap


#: What a missing seam costs, by `Group.turns_off`. Of "plugin" and "caller" somebody else says it.
_COSTS = {
    "usage": "reports no usage",
    "dump": "does not keep draft tokens out of vLLM's crash dump",
    "parameters": "leaves min_p and logit_bias to vLLM, which refuses them",
}


def watch() -> None:
    """Have each group with a vLLM module installed when vLLM imports it. Imports nothing; again is harmless."""
    for name, group in GROUPS.items():
        if group.after and name not in _watched:
            _watched.add(name)
            when_imported(group.after, functools.partial(install, name))


def install(name: str) -> str:
    """Install a group, whole or not at all; why it is not, empty when it is. Again is harmless. A group that
    is not installed costs what its `turns_off` says; when strict this raises `SeamError`."""
    group = GROUPS[name]
    try:
        with _lock:
            _install(name)
            _installed.add(name)
    except Exception as error:
        if strict():
            raise
        reason = shown_error(error)
        if group.turns_off == "plugin":
            turn_off(reason)
        elif group.turns_off in _COSTS:
            logger.error("gpu_align %s: %s", _COSTS[group.turns_off], reason)
        return reason
    return ""


def is_installed(name: str) -> bool:
    """Whether `install` has installed this group in this process."""
    return name in _installed


def _install(name: str) -> None:
    for room in GROUPS[name].rooms:
        importlib.import_module(room)
    _check((name,))
    undo: list[tuple[Any, str, Any]] = []
    try:
        for member in SEAMS:
            if member.group != name or member.kind != "wrap":
                continue
            owner, leaf = _owner(member)
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


@functools.cache
def are_whole(groups: tuple[str, ...], otherwise: str) -> bool:
    """Whether the installed vLLM has every seam of these groups: the configuration is made long before their
    modules are imported, maybe in another process. If not, one WARNING line says `otherwise` and what is missing;
    when strict this raises `SeamError`."""
    try:
        _check(groups)
    except SeamError as error:
        if strict():
            raise
        logger.warning("%s: %s", otherwise, shown_reason(error))
        return False
    return True


def _check(groups: Collection[str]) -> None:
    """Raise `SeamError` where the sources of vLLM do not have every name of these groups as it is known."""
    statuses = source_probe.probe_sources(seams=[seam for seam in SEAMS if seam.group in groups])
    if bad := [status for status in statuses if status.state != "found"]:
        what = "; ".join(f"{s.seam.module}.{s.seam.attribute} is {s.state}: {s.detail}" for s in bad)
        raise SeamError(f"{what} (tested with vLLM {', '.join(TESTED)})")


def _owner(seam: Seam) -> tuple[Any, str]:
    owner: Any = importlib.import_module(seam.module)
    *path, leaf = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, leaf

"""Faults to inject, run inside an engine process before or after its engine starts; see `faults`."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any


def owner_of(place: str) -> tuple[Any, str]:
    """What has the attribute at `place`, "module:Class.name", and the attribute's name."""
    module, _, attribute = place.partition(":")
    owner: Any = importlib.import_module(module)
    *path, leaf = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, leaf)
    return owner, leaf


def raise_at(place: str, call: int, message: str = "injected fault") -> None:
    """`place`, "module:Class.name", raises a `RuntimeError` at its n-th call from now on, and at no other."""
    owner, leaf = owner_of(place)
    original = getattr(owner, leaf)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError(message)
        return original(*args, **kwargs)

    setattr(owner, leaf, faulty)


def fill_the_disk(call: int) -> None:
    """From the n-th file of the step log on there is no space left: the system itself says so, of /dev/full."""
    from vllm_integration.worker import step_log as debug_log

    calls = 0

    def open_full(path: Any, flags: int, mode: int = 0o777) -> int:
        nonlocal calls
        calls += 1
        descriptor = os.open(path, flags, mode)
        if calls < call:
            return descriptor
        os.close(descriptor)
        return os.open("/dev/full", os.O_WRONLY)

    debug_log.os = SimpleNamespace(**{**vars(os), "open": open_full})  # type: ignore[assignment]


def hide_numba() -> None:
    """From the library; vLLM imports it for a drafter of its own."""
    import sys

    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "numba"}
    for name in hidden:
        del sys.modules[name]
    sys.modules["numba"] = None  # type: ignore[assignment]
    from gpu_align.ops import jit as _jit

    assert not _jit.COMPILED
    del sys.modules["numba"]
    sys.modules.update(hidden)


def cache_numba_in(directory: str, alone: bool = False) -> None:
    """What is compiled is looked for, and kept, there; with `alone`, nowhere else, as beside the sources."""
    os.environ["NUMBA_CACHE_DIR"] = directory
    import numba

    from gpu_align.ops import jit as _jit  # keeps vLLM from stumbling over an object of Numba's

    assert _jit.COMPILED
    numba.config.CACHE_DIR = directory
    if alone:
        from numba.core import caching

        caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]

"""Deterministic replay of known outputs: the public name of `gpu_align.tools.simulate.replay`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By name: the core imports no tool.
    return getattr(importlib.import_module("gpu_align.tools.simulate.replay"), name)

"""Predicted outputs for LLM serving: align a prediction with what the model writes, draft from it, on the GPU.

Importing this needs torch, triton and numpy only, and loads them when one of its names is used: the command line,
which is a part of it, answers `--help` and completes a command without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DrafterConfig as DrafterConfig
    from .drafter import Drafter as Drafter
    from .memory import ResponseMemory as ResponseMemory
    from .ops.layout import Draft as Draft
    from .ops.layout import Source as Source
    from .ops.recipes.table import Recipes as Recipes
    from .recipes.pack import RecipePack as RecipePack
    from .steps import CapturedStep as CapturedStep

__version__ = "0.1.0"

_MODULES = {
    "CapturedStep": "steps",
    "Draft": "ops.layout",
    "Drafter": "drafter",
    "DrafterConfig": "config",
    "RecipePack": "recipes.pack",
    "Recipes": "ops.recipes.table",
    "ResponseMemory": "memory",
    "Source": "ops.layout",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

"""Predicted outputs for LLM serving: align a prediction with what the model writes, draft from it, on the GPU.

Importing this needs torch, triton and numpy only, and loads them when one of its names is used: the command line,
which is a part of it, answers `--help` and completes a command without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafter.arena import ArenaStats as ArenaStats
    from .drafter.config import DrafterConfig as DrafterConfig
    from .drafter.drafter import CapturedStep as CapturedStep
    from .drafter.drafter import Drafter as Drafter
    from .drafter.lists import ListDrafter as ListDrafter
    from .drafter.memory import Recalled as Recalled
    from .drafter.memory import ResponseMemory as ResponseMemory
    from .ops.layout import Draft as Draft
    from .ops.layout import Source as Source
    from .ops.layout import TextKind as TextKind
    from .ops.recipes.table import Recipes as Recipes
    from .recipes.pack import RecipePack as RecipePack

__version__ = "0.1.0"

_MODULES = {
    "ArenaStats": "drafter.arena",
    "CapturedStep": "drafter.drafter",
    "Draft": "ops.layout",
    "Drafter": "drafter.drafter",
    "DrafterConfig": "drafter.config",
    "ListDrafter": "drafter.lists",
    "Recalled": "drafter.memory",
    "RecipePack": "recipes.pack",
    "Recipes": "ops.recipes.table",
    "ResponseMemory": "drafter.memory",
    "Source": "ops.layout",
    "TextKind": "ops.layout",
}
_PACKAGES = {"hf": "predictors.hf"}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{_PACKAGES[name]}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

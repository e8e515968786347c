"""Predicted outputs for LLM serving: align a prediction with what the model writes, draft from it, on the GPU.

Importing this needs torch, triton and numpy only.
"""

from .captured_step import CapturedStep
from .config import DrafterConfig
from .drafter import Drafter
from .memory import ResponseMemory
from .ops.draft import Draft, Source
from .ops.recipe_lookup import Recipes
from .recipes import RecipePack

__all__ = [
    "CapturedStep",
    "Draft",
    "Drafter",
    "DrafterConfig",
    "RecipePack",
    "Recipes",
    "ResponseMemory",
    "Source",
    "__version__",
]

__version__ = "0.1.0"

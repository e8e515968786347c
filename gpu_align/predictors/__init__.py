"""Predictors of the next tokens of one sequence, after node-llama-cpp, and the loop's side of them.

`TokenPredictor` is the interface. Predictors run in `gpu_align.hf.generate`, in ``gpu-align simulate --policy
module:Class`` and in any loop that uses `PredictorLoop`. Those that need torch load it when their name is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .base import DisposedError, PredictorOptions, TokenPredictor, VocabularyError
from .input_lookup import InputLookupTokenPredictor
from .loop import PredictorLoop

if TYPE_CHECKING:
    from .draft_model import DraftModelTokenPredictor
    from .predicted_output import PredictedOutputTokenPredictor

__all__ = [
    "DisposedError",
    "DraftModelTokenPredictor",
    "InputLookupTokenPredictor",
    "PredictedOutputTokenPredictor",
    "PredictorLoop",
    "PredictorOptions",
    "TokenPredictor",
    "VocabularyError",
]

_MODULES = {"DraftModelTokenPredictor": "draft_model", "PredictedOutputTokenPredictor": "predicted_output"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)

"""Predicted outputs for transformers models: `generate` writes the text of ``model.generate`` in fewer passes.

Importing this needs transformers (4.56 or later, or 5): ``pip install ".[transformers]"`` in a checkout.
"""

from ...ops.errors import MissingExtraError

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("gpu_align.hf", "transformers", "transformers") from error

from .forward import CACHE_NAME, DraftForward
from .generate import PredictedOutputs, generate

__all__ = ["CACHE_NAME", "DraftForward", "PredictedOutputs", "generate"]

"""Predictors of the next tokens of one sequence, after node-llama-cpp, and the loop's side of them.

`TokenPredictor` is the interface; `InputLookupTokenPredictor`, `DraftModelTokenPredictor`,
`PredictedOutputTokenPredictor` and `FirstOf` implement it. They run in `gpu_align.hf.generate`, in
``gpu-align simulate --policy module:Class`` and in any loop that uses `PredictorLoop`.
"""

from .base import DisposedError, FirstOf, PredictorOptions, TokenPredictor, VocabularyError
from .draft_model import BackgroundTokenPredictor, DraftModelTokenPredictor
from .input_lookup import InputLookupTokenPredictor
from .loop import Predictions, PredictorLoop
from .predicted_output import PredictedOutputTokenPredictor, encode_prediction

__all__ = [
    "BackgroundTokenPredictor",
    "DisposedError",
    "DraftModelTokenPredictor",
    "FirstOf",
    "InputLookupTokenPredictor",
    "PredictedOutputTokenPredictor",
    "Predictions",
    "PredictorLoop",
    "PredictorOptions",
    "TokenPredictor",
    "VocabularyError",
    "encode_prediction",
]

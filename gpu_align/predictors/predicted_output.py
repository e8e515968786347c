"""`PredictedOutputTokenPredictor`: the `Drafter` for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..drafter.checks import check_integers
from ..drafter.config import DrafterConfig
from ..drafter.drafter import Drafter
from ..ops.choose import MAX_DRAFT_TOKENS
from ..ops.layout import FIRST_GAP, Draft
from ..ops.recipes.table import Recipes
from .base import PredictorOptions, TokenPredictor


class PredictedOutputTokenPredictor(TokenPredictor):
    """Aligns a prediction with the output and drafts from it, from the sequence itself, and from recipes; at most
    256 tokens a step.

    One slot of a `Drafter`, whose docstring says how drafts are chosen. They are a function of the prediction and
    the tokens so far, and the same on the CPU and on a GPU. An engine with a batch uses `Drafter` itself.

    Args:
        prediction: the predicted output: token ids, or text, which needs a tokenizer. None is the prediction that
            the loop has for the sequence, if any.
        tokenizer: encodes text; by default the loop's.
        config: the drafter's settings.
        recipes: the drafter's.
        device: where the drafter runs. On the CPU a step takes some 10 µs where Numba is installed.
        max_context_len: tokens of prompt and output that the drafter has room for at first; it grows.
        max_prediction_len: the same of the prediction.
        vocab_size: where the loop does not know it: a draft ends before an id that is not below it.

    `reset` raises ValueError for text without a tokenizer, or an id outside the vocabulary.
    """

    def __init__(
        self,
        prediction: str | Sequence[int] | torch.Tensor | None = None,
        *,
        tokenizer: Any = None,
        config: DrafterConfig | None = None,
        recipes: Recipes | None = None,
        device: torch.device | str = "cpu",
        max_context_len: int = 1024,
        max_prediction_len: int = 1024,
        vocab_size: int = FIRST_GAP,
    ) -> None:
        self.prediction = prediction
        self.tokenizer = tokenizer
        self._settings: dict[str, Any] = {"config": config, "recipes": recipes, "device": device}
        #: Of the drafter, as it is called with them.
        self._sizes = {"max_context_len": max_context_len, "max_prediction_len": max_prediction_len}
        self._vocab_size = vocab_size
        self._drafter: Drafter | None = None
        self._draft: Draft | None = None

    @property
    def source(self) -> int:
        """The `gpu_align.Source` of the last draft."""
        return 0 if self._draft is None else int(self._draft.source[0])

    @property
    def confidence(self) -> list[float]:
        """The drafter's confidence in each token of the last draft."""
        return [] if self._draft is None else self._draft.confidence[0, : int(self._draft.length[0])].tolist()

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        if self.prediction is None:
            self._ids = list(options.prediction)
        else:
            tokenizer = self.tokenizer if self.tokenizer is not None else options.tokenizer
            self._ids = encode_prediction(self.prediction, tokenizer)
        self._prompt_len = len(self.state_tokens)
        self._begin(options.max_len or self._prompt_len + 1)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        drafter = self._started("push_tokens")
        if len(self.state_tokens) > drafter.max_context_len:
            # A draft depends on the tokens alone: a larger drafter goes on where the smaller one was.
            self._begin(2 * len(self.state_tokens))
        else:
            self._write(drafter, tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        drafter = self._started("predict_tokens")
        self._draft = draft = drafter.propose(self._slots, self._num_sampled)
        return draft.token_ids[0, : int(draft.length[0])].tolist()

    def dispose(self) -> None:
        super().dispose()
        self._drafter = self._draft = None
        self._ids = []

    def _started(self, called: str) -> Drafter:
        if self._drafter is None:
            raise RuntimeError(f"{type(self).__name__}: reset() must be called before {called}()")
        return self._drafter

    @torch.inference_mode(False)  # as of the drafter: the next use may be outside of that mode
    def _begin(self, max_len: int) -> None:
        """Begin the sequence in a drafter that holds so many tokens, and write the tokens so far."""
        sizes: dict[str, Any] = {
            "max_context_len": max(max_len, self._sizes["max_context_len"]),
            "max_prediction_len": max(len(self._ids), self._sizes["max_prediction_len"]),
            "vocab_size": self.options.vocab_size or self._vocab_size,
            "num_draft_tokens": min(self.options.num_draft_tokens, MAX_DRAFT_TOKENS),
        }
        if self._drafter is None or sizes != self._sizes:
            self._drafter = Drafter(max_slots=1, **sizes, **self._settings)
            self._sizes, device = sizes, self._drafter.device
            self._slots = torch.zeros(1, dtype=torch.int64, device=device)
            self._num_sampled = torch.ones(1, dtype=torch.int32, device=device)  # no step is only a prefill
        about: dict[str, Any] = {"kind": self.options.kind}
        sampling = self.options.sampling  # a ``GenerationConfig``, whose fields may be None
        if (ends := getattr(sampling, "eos_token_id", None)) is not None:
            about["end_tokens"] = np.atleast_1d(np.asarray(ends, np.int64))
        if getattr(sampling, "do_sample", False):
            about["temperature"] = getattr(sampling, "temperature", None) or 0.0
        self._drafter.add(0, self._ids, self._prompt_len, **about)
        self._draft = None
        self._write(self._drafter, self.state_tokens)

    def _write(self, drafter: Drafter, tokens: Sequence[int]) -> None:
        """Write the last of `state_tokens` to the drafter's row."""
        end = len(self.state_tokens)
        drafter.token_ids[0, end - len(tokens) : end] = torch.from_numpy(np.asarray(tokens, dtype=np.int32))
        drafter.total_len.fill_(end)


def encode_prediction(prediction: Any, tokenizer: Any = None, name: str = "prediction") -> list[int]:
    """Token ids of one text, encoded without special tokens, tensor, or sequence of them; name: in errors."""
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError(f"{name}: expected token ids, or a tokenizer for the text")
        return list(tokenizer.encode(prediction, add_special_tokens=False))
    rows = (list, tuple, torch.Tensor, np.ndarray)
    if isinstance(prediction, (list, tuple)) and len(prediction) == 1 and isinstance(prediction[0], rows):
        prediction = prediction[0]
    if isinstance(prediction, (torch.Tensor, np.ndarray)):
        if prediction.ndim == 2 and prediction.shape[0] == 1:
            prediction = prediction[0]
        if prediction.ndim != 1:
            raise ValueError(f"{name}: expected one sequence, found the shape {tuple(prediction.shape)}")
        prediction = prediction.tolist()
    found: list[int] = check_integers(name, prediction).tolist()
    return found

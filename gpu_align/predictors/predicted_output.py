"""`PredictedOutputTokenPredictor`: the `Drafter` for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..config import DrafterConfig
from ..drafter import Drafter
from ..ops.recipe_lookup import Recipes
from .base import PredictorOptions, TokenPredictor

#: Where neither the loop nor the tokens say more.
_UNKNOWN_VOCAB = 2**31 - 1
_SMALLEST_ROW = 1024


class PredictedOutputTokenPredictor(TokenPredictor):
    """Aligns a prediction with the output and drafts from it, from the sequence itself, and from recipes.

    One slot of a `Drafter`, whose docstring says how drafts are chosen. They are a function of the prediction and
    the tokens so far, and the same on the CPU and on a GPU. An engine with a batch uses `Drafter` itself.

    Args:
        prediction: the predicted output: token ids, or text, which needs a tokenizer. None is the prediction that
            the loop has for the sequence, if any.
        tokenizer: encodes text; by default the loop's.
        config: the drafter's settings.
        recipes: the drafter's.
        device: where the drafter runs. On the CPU a step takes some 10 µs where Numba is installed.

    Raises:
        TypeError: a prediction of another type.
        ValueError: at `reset`: text without a tokenizer, or an id outside the vocabulary.
    """

    def __init__(
        self,
        prediction: str | Sequence[int] | torch.Tensor | None = None,
        *,
        tokenizer: Any = None,
        config: DrafterConfig | None = None,
        recipes: Recipes | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.prediction = prediction
        self.tokenizer = tokenizer
        self._settings: dict[str, Any] = {"config": config, "recipes": recipes, "device": device}
        self._drafter: Drafter | None = None
        self._drafter_size: tuple[int, ...] = ()

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        if self.prediction is None:
            self._ids = list(options.prediction)
        else:
            tokenizer = self.tokenizer if self.tokenizer is not None else options.tokenizer
            self._ids = encode_prediction(self.prediction, tokenizer)
        self._prompt_len = len(self.state_tokens)
        self._make_room(options.max_len or self._prompt_len + 1)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        if self._drafter is None:
            raise RuntimeError(f"{type(self).__name__}: reset() must be called before push_tokens()")
        if len(self.state_tokens) > self._token_ids.shape[1]:
            # A draft depends on the tokens alone: a larger drafter goes on where the smaller one was.
            self._make_room(2 * len(self.state_tokens))
            return
        self._write(tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        if self._drafter is None:
            raise RuntimeError(f"{type(self).__name__}: reset() must be called before predict_tokens()")
        draft = self._drafter.propose(self._token_ids, self._total_len, self._slots, self._num_sampled)
        tokens: list[int] = draft.token_ids[0, : int(draft.length[0])].tolist()
        return tokens

    def dispose(self) -> None:
        super().dispose()
        self._drafter = None
        self._ids = []

    def _make_room(self, max_len: int) -> None:
        """Begin the sequence in a drafter that holds so many tokens, and write the tokens so far."""
        options = self.options
        vocab_size = options.vocab_size or _UNKNOWN_VOCAB
        needed = max_len, max(len(self._ids), 1)
        *room, vocab, drafts = self._drafter_size or (0, 0, 0, 0)
        fits = all(n <= r for n, r in zip(needed, room, strict=True))
        if not fits or (vocab, drafts) != (vocab_size, options.num_draft_tokens):
            sizes = [max(n, r, _SMALLEST_ROW) for n, r in zip(needed, room, strict=True)]
            self._drafter_size = (*sizes, vocab_size, options.num_draft_tokens)
            self._drafter = Drafter(
                max_slots=1,
                max_context_len=sizes[0],
                max_prediction_len=sizes[1],
                num_draft_tokens=options.num_draft_tokens,
                vocab_size=vocab_size,
                **self._settings,
            )
            device = self._drafter.device
            self._token_ids = torch.zeros((1, sizes[0]), dtype=torch.int32, device=device)
            self._total_len = torch.zeros(1, dtype=torch.int32, device=device)
            self._slots = torch.zeros(1, dtype=torch.int64, device=device)
            self._num_sampled = torch.ones(1, dtype=torch.int32, device=device)
        assert self._drafter is not None
        self._drafter.add(0, self._ids, self._prompt_len)
        self._length = 0
        self._total_len.zero_()
        self._write(self.state_tokens)
        self._num_sampled.fill_(1)  # drafts are wanted in the prefill step, too

    def _write(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        new = torch.from_numpy(np.asarray(tokens, dtype=np.int32))
        self._token_ids[0, self._length : end].copy_(new)
        self._length = end
        self._total_len.fill_(end)
        self._num_sampled.fill_(max(len(tokens), 1))


def encode_prediction(prediction: Any, tokenizer: Any = None) -> list[int]:
    """Token ids of a prediction that is text, a tensor or a sequence of token ids.

    Text is encoded without special tokens.

    Raises:
        TypeError: it is none of these.
        ValueError: it is text, and there is no tokenizer; a tensor of more than one sequence.
    """
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError("prediction: expected token ids, or a tokenizer for the text")
        return list(tokenizer.encode(prediction, add_special_tokens=False))
    if isinstance(prediction, (torch.Tensor, np.ndarray)):
        if prediction.ndim == 2 and prediction.shape[0] == 1:
            prediction = prediction[0]
        if prediction.ndim != 1:
            raise ValueError(f"prediction: expected one sequence, found the shape {tuple(prediction.shape)}")
        return [int(token) for token in prediction.tolist()]
    if not isinstance(prediction, Sequence) or isinstance(prediction, bytes):
        raise TypeError(f"prediction: expected text or token ids, found {type(prediction).__name__}")
    return [int(token) for token in prediction]

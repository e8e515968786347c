"""`DraftModelTokenPredictor`: a small model drafts for a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu_align.errors import MissingExtraError

from .background import BackgroundTokenPredictor
from .base import PredictorOptions, VocabularyError


class DraftModelTokenPredictor(BackgroundTokenPredictor):
    """The likeliest continuation by a causal model of transformers, for as long as the model is confident.

    ::

        while len(draft) < max_tokens:
            p = softmax(model(tokens + draft)[-1])
            if max(p) < min_confidence: break
            draft.append(argmax(p)), and stop behind an end token

    The model has a KV cache of its own: a step feeds the tokens that it has not seen, and a refuted draft is cut
    off the cache. Where the draft ends for lack of confidence, or at the end token, the model is not run again
    until the draft was used up or refuted. Behind ``max_position_embeddings`` tokens nothing is drafted.

    Args:
        model: a causal language model with the target's tokens, or what ``from_pretrained`` takes.
        min_tokens: in the background, how many tokens `predict_tokens` waits for; see `BackgroundTokenPredictor`.
        max_tokens: longest draft, ``>= 1``.
        min_confidence: the probability below which a token is not drafted, 0 to 1; 0 drafts `max_tokens` always.
        tokenizer: the draft model's. Vocabularies are compared token by token where the loop has a tokenizer, too.
        background: draft while the target verifies. By default drafts are made when they are asked for, and do
            not depend on timing.

    Raises:
        ValueError: a setting outside its domain, or a model that is no decoder-only one.
        MissingExtraError: transformers is not installed.

    `reset` raises `VocabularyError` where tokenizers differ, or, without two tokenizers, where the sizes of the
    vocabularies differ. The model runs on its own device, in evaluation mode.

    Source: ``tokenPredictors/DraftSequenceTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self,
        model: Any,
        min_tokens: int = 0,
        max_tokens: int = 16,
        min_confidence: float = 0.6,
        *,
        tokenizer: Any = None,
        background: bool = False,
    ) -> None:
        super().__init__(min_tokens, max_tokens, background)
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence: expected 0 <= p <= 1, found {min_confidence}")
        try:
            import transformers
        except ImportError as error:
            raise MissingExtraError("DraftModelTokenPredictor", "transformers", "transformers") from error
        if isinstance(model, str):
            model = transformers.AutoModelForCausalLM.from_pretrained(model)
        config = model.config.get_text_config()
        if config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise ValueError(f"model: expected a decoder with a KV cache, found {type(model).__name__}")
        self.model = model.eval()
        self.min_confidence = min_confidence
        self.tokenizer = tokenizer
        self._vocab_size: int = config.vocab_size
        self._longest: int = getattr(config, "max_position_embeddings", None) or 1 << 62
        ends = model.generation_config.eos_token_id
        self._end_tokens = frozenset(ends if isinstance(ends, list) else [ends])
        # Full attention for every layer: a window would lose what a refuted draft pushed out of it.
        self._new_cache = transformers.DynamicCache
        self._cache: Any = None
        #: The tokens whose keys and values the cache holds.
        self._cached: list[int] = []

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        self._check_vocabulary(options)
        super().reset(state_tokens, options)

    @torch.no_grad()
    def continue_from(self, tokens: list[int]) -> Iterator[int]:
        kept = _common_prefix(self._cached, tokens[:-1])
        if self._cache is None or kept == 0:
            self._cache, self._cached, kept = self._new_cache(), [], 0
        elif kept < len(self._cached):
            self._cache.crop(kept - len(self._cached))  # negative: so many tokens less
            del self._cached[kept:]
        feed = tokens[kept:]
        while feed and len(self._cached) + len(feed) < self._longest:
            ids = torch.tensor([feed], device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True).logits[0, -1]
            self._cached += feed
            confidence, token = logits.float().softmax(-1).max(-1)
            if confidence.item() < self.min_confidence:
                return
            feed = [int(token)]
            yield feed[0]
            if feed[0] in self._end_tokens:
                return

    def dispose(self) -> None:
        super().dispose()
        if not self.background:  # else the thread may be at it; it goes with the predictor
            self._cache, self._cached = None, []

    def _check_vocabulary(self, options: PredictorOptions) -> None:
        if self.tokenizer is not None and options.tokenizer is not None:
            if self.tokenizer.get_vocab() != options.tokenizer.get_vocab():
                raise VocabularyError("draft model: its tokenizer has other tokens than the target's")
        elif options.vocab_size not in (None, self._vocab_size):
            raise VocabularyError(
                f"draft model: expected a vocabulary of {options.vocab_size} tokens, as the target has, "
                f"found {self._vocab_size}"
            )


def _common_prefix(a: list[int], b: list[int]) -> int:
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])

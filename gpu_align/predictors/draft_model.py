"""`DraftModelTokenPredictor`: a small model drafts for a large one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.errors import MissingExtraError, check_int, check_probability
from .base import PredictorOptions, TokenPredictor, VocabularyError, count_accepted


class DraftModelTokenPredictor(TokenPredictor):
    """The likeliest continuation by a causal model of transformers, for as long as the model is confident.

    ::

        while len(draft) < max_tokens:
            p = softmax(model(tokens + draft)[-1])
            if max(p) < min_confidence: break
            draft.append(argmax(p)), and stop after an end token

    The model has a KV cache of its own: a step feeds the tokens that it has not seen, and a refuted draft is cut
    off the cache. Where the draft ends for lack of confidence, or at the end token, the model is not run again
    until the draft was used up or refuted. Nothing is drafted after ``max_position_embeddings`` tokens, or
    `max_context_len`.

    Args:
        model: a causal language model with the target's tokens, or what ``from_pretrained`` takes.
        max_tokens: longest draft, ``>= 1``.
        min_confidence: the probability below which a token is not drafted, 0 to 1; 0 drafts `max_tokens` always.
        tokenizer: the draft model's. Vocabularies are compared token by token where the loop has a tokenizer, too.
        max_context_len: bounds the cache, ``>= 1``: the tokens that prompt, output and draft have together.

    ValueError: a setting outside its domain, or a model that is no decoder-only one. `reset` raises
    `VocabularyError` where tokenizers differ, or, without two tokenizers, where the sizes of the vocabularies
    differ. The model runs on its own device, in evaluation mode.

    Source: ``tokenPredictors/DraftSequenceTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self,
        model: Any,
        max_tokens: int = 16,
        min_confidence: float = 0.6,
        *,
        tokenizer: Any = None,
        max_context_len: int | None = None,
    ) -> None:
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        check_probability("min_confidence", min_confidence)
        longest = 1 << 62 if max_context_len is None else check_int("max_context_len", max_context_len, 1)
        try:
            import transformers
        except ImportError as error:
            raise MissingExtraError("DraftModelTokenPredictor", "transformers", "transformers") from error
        if isinstance(model, str):
            model = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        config = model.config.get_text_config()
        if config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise ValueError(f"model: expected a decoder with a KV cache, found {type(model).__name__}")
        self.model = model.eval()
        self.min_confidence = min_confidence
        self.tokenizer = tokenizer
        self._vocab_size: int = config.vocab_size
        self._longest: int = min(longest, getattr(config, "max_position_embeddings", None) or longest)
        ends = model.generation_config.eos_token_id
        self._end_tokens = frozenset(ends if isinstance(ends, list) else [ends])
        # Full attention for every layer: a window would lose what a refuted draft pushed out of it.
        self._new_cache = transformers.DynamicCache
        #: "past_key_values", since transformers 5.24 "cache".
        self._cache_name = transformers.generation.utils.ALL_CACHE_NAMES[0]
        self._cache: Any = None
        #: The tokens whose keys and values the cache holds.
        self._cached: list[int] = []
        #: Drafted tokens that no step has verified yet, and whether the model has no more to say after them.
        self._draft: list[int] = []
        self._ended = False

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        if self.tokenizer is not None and options.tokenizer is not None:
            if self.tokenizer.get_vocab() != options.tokenizer.get_vocab():
                raise VocabularyError("draft model: its tokenizer has other tokens than the target's")
        elif options.vocab_size not in (None, self._vocab_size):
            expected = f"a vocabulary of {options.vocab_size} tokens, as the target has"
            raise VocabularyError(f"draft model: expected {expected}, found {self._vocab_size}")
        super().reset(state_tokens, options)
        self._draft, self._ended = [], False

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        came_true = self._draft[: len(tokens)] == list(tokens)
        self._draft = self._draft[len(tokens) :] if came_true else []
        self._ended = self._ended and bool(self._draft)

    @torch.no_grad()
    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        tokens = [*self.state_tokens, *self._draft]
        kept = count_accepted(self._cached, tokens[:-1])
        if kept == 0:
            self._cache, self._cached = self._new_cache(), []
        elif kept < len(self._cached):
            self._cache.crop(kept - len(self._cached))  # negative: so many tokens less
            del self._cached[kept:]
        feed = tokens[kept:]
        while feed and not self._ended and len(self._draft) < self.max_tokens:
            if len(self._cached) + len(feed) >= self._longest:
                break
            ids = torch.tensor([feed], device=self.model.device)
            cache = {self._cache_name: self._cache}
            logits = self.model(input_ids=ids, use_cache=True, **cache).logits[0, -1]
            self._cached += feed
            confidence, token = logits.float().softmax(-1).max(-1)
            if confidence.item() < self.min_confidence:
                self._ended = True
            else:
                feed = [int(token)]
                self._draft += feed
                self._ended = feed[0] in self._end_tokens
        return list(self._draft)

    def dispose(self) -> None:
        super().dispose()
        self._cache, self._cached, self._draft = None, [], []

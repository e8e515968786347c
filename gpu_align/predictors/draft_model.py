"""`DraftModelTokenPredictor`: a small model drafts for a large one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import MissingExtraError, check_int
from .base import PredictorOptions, TokenPredictor, VocabularyError, count_accepted


class BackgroundTokenPredictor(TokenPredictor):
    """Predicts token by token, ahead of what was asked for. Subclass it and write `continue_from`.

    A thread keeps up to `max_prediction_tokens` predicted tokens that no step has verified yet. `push_tokens`
    removes those that came true and lets the thread go on after them; at the first token that was predicted
    otherwise, all of them are discarded, and it begins again from the new state. `predict_tokens` returns what is
    there. Where `continue_from` ends by itself, nothing more is predicted until that was used up or refuted; the
    next `predict_tokens` raises an error of it. A predictor with a thread must be disposed of, which ends it.

    Args:
        min_prediction_tokens: what `predict_tokens` waits for; ``0 <= min <= max``.
        max_prediction_tokens: how far ahead to predict; ``>= 1``.
        background: False uses no thread: `predict_tokens` predicts up to `max_prediction_tokens`, and drafts do
            not depend on timing.
    """

    def __init__(
        self, min_prediction_tokens: int = 0, max_prediction_tokens: int = 16, background: bool = True
    ) -> None:
        most = self.max_prediction_tokens = check_int("max_prediction_tokens", max_prediction_tokens, 1)
        self.min_prediction_tokens = check_int("min_prediction_tokens", min_prediction_tokens, 0, most)
        self.background = background
        #: Guards what follows and tells of every change of it.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Grows whenever what is being predicted has become worthless.
        self._epoch = 0
        self._predicted: list[int] = []
        #: Whether nothing more is to be predicted before `_predicted` is used up.
        self._ended = False
        self._stopped = True
        self._error: Exception | None = None

    @abstractmethod
    def continue_from(self, tokens: list[int]) -> Iterator[int]:
        """Yield the tokens expected after `tokens`, its own list of prompt, output and predicted tokens.

        Called by one thread at a time. The iterator is closed when its tokens are no longer wanted.
        """

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        with self._changed:
            super().reset(state_tokens, options)
            self._discard()
            self._stopped = True

    def push_tokens(self, tokens: Sequence[int]) -> None:
        with self._changed:
            super().push_tokens(tokens)
            came_true = self._predicted[: len(tokens)] == list(tokens)
            if came_true and self._error is None:
                del self._predicted[: len(tokens)]
                self._ended = self._ended and bool(self._predicted)
            else:
                self._discard()
            self._changed.notify_all()

    def predict_tokens(self) -> list[int]:
        with self._changed:
            self._check_disposed()
            self._stopped = False
            if self.background:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: (
                        len(self._predicted) >= self.min_prediction_tokens or self.disposed or self._is_idle()
                    )
                )
                self._check_disposed()
        if not self.background and self._wants_more():
            self._predict_once()
        with self._changed:
            if self._error is not None:
                raise self._error
            return list(self._predicted)

    def stop(self, until_predictions_exhausted: bool = False) -> None:
        with self._changed:
            self._epoch += 1
            self._stopped = True
            self._ended = self._ended or (until_predictions_exhausted and bool(self._predicted))
            self._changed.notify_all()

    def dispose(self) -> None:
        with self._changed:
            super().dispose()
            self._discard()
            self._changed.notify_all()

    def _discard(self) -> None:
        self._epoch += 1
        self._predicted, self._ended, self._error = [], False, None

    def _is_idle(self) -> bool:
        return self._stopped or self._ended or self._error is not None

    def _is_full(self) -> bool:
        return len(self._predicted) >= self.max_prediction_tokens

    def _wants_more(self) -> bool:
        return not self._is_idle() and not self._is_full()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.disposed or self._wants_more())
                if self.disposed:
                    return
            self._predict_once()

    def _predict_once(self) -> None:
        """Run one `continue_from` until it ends or is out of date; or, without a thread, until there is enough."""
        with self._changed:
            epoch, tokens = self._epoch, [*self.state_tokens, *self._predicted]
        iterator: Iterator[int] | None = None
        error = None
        try:
            iterator = self.continue_from(tokens)
            for token in iterator:
                with self._changed:
                    if epoch != self._epoch:
                        return  # too late
                    self._predicted.append(int(token))
                    self._changed.notify_all()
                    if self._is_full():
                        if not self.background:
                            return
                        self._changed.wait_for(lambda: epoch != self._epoch or not self._is_full())
                    if epoch != self._epoch:
                        return
        except Exception as raised:
            error = raised
        finally:
            close = getattr(iterator, "close", None)  # a generator has one
            if close is not None:
                close()
        with self._changed:
            if epoch == self._epoch:
                self._ended, self._error = error is None, error
                self._changed.notify_all()


class DraftModelTokenPredictor(BackgroundTokenPredictor):
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
        min_tokens: in the background, how many tokens `predict_tokens` waits for; see `BackgroundTokenPredictor`.
        max_tokens: longest draft, ``>= 1``.
        min_confidence: the probability below which a token is not drafted, 0 to 1; 0 drafts `max_tokens` always.
        tokenizer: the draft model's. Vocabularies are compared token by token where the loop has a tokenizer, too.
        max_context_len: bounds the cache, ``>= 1``: the tokens that prompt, output and draft have together.
        background: draft while the target verifies. By default drafts are made when they are asked for, and do
            not depend on timing.

    ValueError: a setting outside its domain, or a model that is no decoder-only one. `reset` raises
    `VocabularyError` where tokenizers differ, or, without two tokenizers, where the sizes of the vocabularies
    differ. The model runs on its own device, in evaluation mode.

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
        max_context_len: int | None = None,
        background: bool = False,
    ) -> None:
        super().__init__(min_tokens, max_tokens, background)
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence: expected 0 <= p <= 1, found {min_confidence}")
        if max_context_len is not None:
            check_int("max_context_len", max_context_len, 1)
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
        positions: int = getattr(config, "max_position_embeddings", None) or 1 << 62
        self._longest = positions if max_context_len is None else min(positions, max_context_len)
        ends = model.generation_config.eos_token_id
        self._end_tokens = frozenset(ends if isinstance(ends, list) else [ends])
        # Full attention for every layer: a window would lose what a refuted draft pushed out of it.
        self._new_cache = transformers.DynamicCache
        #: "past_key_values", since transformers 5.24 "cache".
        self._cache_name = transformers.generation.utils.ALL_CACHE_NAMES[0]
        self._cache: Any = None
        #: The tokens whose keys and values the cache holds.
        self._cached: list[int] = []

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        if self.tokenizer is not None and options.tokenizer is not None:
            if self.tokenizer.get_vocab() != options.tokenizer.get_vocab():
                raise VocabularyError("draft model: its tokenizer has other tokens than the target's")
        elif options.vocab_size not in (None, self._vocab_size):
            raise VocabularyError(
                f"draft model: expected a vocabulary of {options.vocab_size} tokens, as the target has, "
                f"found {self._vocab_size}"
            )
        super().reset(state_tokens, options)

    @torch.no_grad()
    def continue_from(self, tokens: list[int]) -> Iterator[int]:
        kept = count_accepted(self._cached, tokens[:-1])
        if self._cache is None or kept == 0:
            self._cache, self._cached, kept = self._new_cache(), [], 0
        elif kept < len(self._cached):
            self._cache.crop(kept - len(self._cached))  # negative: so many tokens less
            del self._cached[kept:]
        feed = tokens[kept:]
        while feed and len(self._cached) + len(feed) < self._longest:
            ids = torch.tensor([feed], device=self.model.device)
            cache = {self._cache_name: self._cache}
            logits = self.model(input_ids=ids, use_cache=True, **cache).logits[0, -1]
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

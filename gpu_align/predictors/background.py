"""`BackgroundTokenPredictor`: predicts while the model verifies."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from .base import PredictorOptions, TokenPredictor


class BackgroundTokenPredictor(TokenPredictor):
    """Predicts token by token, ahead of what was asked for. Subclass it and write `continue_from`.

    A thread keeps up to `max_prediction_tokens` predicted tokens that no step has verified yet. `push_tokens`
    removes those that came true and lets the thread go on behind them; at the first token that was predicted
    otherwise, all of them are discarded, with what the thread is at, and it begins again from the new state.
    `predict_tokens` returns what is there and waits only for `min_prediction_tokens`. Where `continue_from` ends
    by itself, nothing more is predicted until what is there was used up or refuted.

    Args:
        min_prediction_tokens: what `predict_tokens` waits for; ``0 <= min <= max``.
        max_prediction_tokens: how far ahead to predict; ``>= 1``.
        background: False uses no thread: `predict_tokens` predicts up to `max_prediction_tokens`, and drafts do
            not depend on timing.

    Raises:
        ValueError: a count outside its domain.

    An error of `continue_from` is raised by the next `predict_tokens`. A predictor with a thread must be disposed
    of, which ends it.
    """

    def __init__(
        self, min_prediction_tokens: int = 0, max_prediction_tokens: int = 16, background: bool = True
    ) -> None:
        if max_prediction_tokens < 1:
            raise ValueError(f"max_prediction_tokens: expected at least 1, found {max_prediction_tokens}")
        if not 0 <= min_prediction_tokens <= max_prediction_tokens:
            raise ValueError(
                f"min_prediction_tokens: expected 0 to {max_prediction_tokens}, found {min_prediction_tokens}"
            )
        self.min_prediction_tokens = min_prediction_tokens
        self.max_prediction_tokens = max_prediction_tokens
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
        """Yield the tokens that are expected behind `tokens`, for as long as it is worth it.

        Called by one thread at a time. The iterator is closed when its tokens are no longer wanted.

        Args:
            tokens: prompt and output so far, and what was predicted behind them. Its own list.
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
                self._start_thread()
                self._changed.notify_all()
                self._changed.wait_for(self._is_enough)
                self._check_disposed()
                return self._result()
        if self._wants_more():
            self._predict_once(lambda: False)
        return self._result()

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

    def _result(self) -> list[int]:
        if self._error is not None:
            raise self._error
        return list(self._predicted)

    def _is_enough(self) -> bool:
        return (
            len(self._predicted) >= self.min_prediction_tokens
            or self._ended
            or self._stopped
            or self.disposed
            or self._error is not None
        )

    def _wants_more(self) -> bool:
        idle = self._stopped or self._ended or self._error is not None
        return not idle and len(self._predicted) < self.max_prediction_tokens

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.disposed or self._wants_more())
                if self.disposed:
                    return
            self._predict_once(self._wait_for_demand)

    def _predict_once(self, more: Callable[[], bool]) -> None:
        """Run one `continue_from` until it ends, is out of date, or there is enough and no `more`."""
        with self._changed:
            epoch, tokens = self._epoch, [*self.state_tokens, *self._predicted]
        iterator: Iterator[int] | None = None
        try:
            iterator = self.continue_from(tokens)
            for token in iterator:
                with self._changed:
                    if epoch != self._epoch:
                        return  # too late
                    self._predicted.append(int(token))
                    self._changed.notify_all()
                    if len(self._predicted) >= self.max_prediction_tokens and not more():
                        return
                    if epoch != self._epoch:
                        return
            error = None
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

    def _wait_for_demand(self) -> bool:
        """Wait until tokens were used up, or all of them are out of date."""
        epoch = self._epoch
        self._changed.wait_for(
            lambda: epoch != self._epoch or len(self._predicted) < self.max_prediction_tokens
        )
        return epoch == self._epoch

"""`FirstOf`: several predictors, in order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from .base import PredictorOptions, TokenPredictor


class FirstOf(TokenPredictor):
    """The first predictor that has something drafts the whole draft::

        for predictor in predictors:
            if tokens := predictor.predict_tokens():
                return tokens
        return []

    A draft is never a mixture of two. All of them see all tokens, so that any of them can draft the next step.

    Args:
        predictors: at least one, each of them once.

    Raises:
        TypeError: one of them is no `TokenPredictor`.
        ValueError: there is none.
    """

    def __init__(self, *predictors: TokenPredictor) -> None:
        if not predictors:
            raise ValueError("predictors: expected at least one, found none")
        for i, predictor in enumerate(predictors):
            if not isinstance(predictor, TokenPredictor):
                raise TypeError(
                    f"predictors[{i}]: expected a TokenPredictor, found {type(predictor).__name__}"
                )
        self.predictors = predictors

    def update_input_tokens(self, tokens: Sequence[int]) -> None:
        super().update_input_tokens(tokens)
        for predictor in self.predictors:
            predictor.update_input_tokens(tokens)

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        for predictor in self.predictors:
            predictor.reset(state_tokens, options)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        self._check_disposed()  # the others keep the state
        for predictor in self.predictors:
            predictor.push_tokens(tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        for predictor in self.predictors:
            if len(tokens := predictor.predict_tokens()):
                return tokens
        return []

    def stop(self, until_predictions_exhausted: bool = False) -> None:
        for predictor in self.predictors:
            predictor.stop(until_predictions_exhausted)

    def dispose(self) -> None:
        super().dispose()
        for predictor in self.predictors:
            predictor.dispose()

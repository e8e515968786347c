"""`InputLookupTokenPredictor`: drafts what followed the last tokens in the input."""

from __future__ import annotations

from collections.abc import Sequence

from ..tools.policies.lookup import InputLookup
from .base import PredictorOptions, TokenPredictor


class InputLookupTokenPredictor(TokenPredictor):
    """Finds the last tokens of the sequence in the input tokens and drafts what follows there.

    ::

        if the last match still holds:                       # all tokens since then continued it
            return input[end : end + prediction_max]         # unless the input is used up
        length(e) = min(pattern_max, longest common suffix of input[:e] and the state)
        end = the smallest e <= len(input) - prediction_min + 1 with the largest length(e)
        return input[end : end + prediction_max] if length(end) >= pattern_min else []

    The rule is that of `gpu_align.policies.InputLookup`, which has the ties and the cost. Where the state does not
    begin with the input, it is compared as if it followed the input.

    Args:
        pattern_length: (min, max) tokens of a match; ``1 <= min``; a max of 0 compares without limit. As in
            node-llama-cpp, a max below min counts as min: its default of 0 does too, so (1, 0) is (1, 1).
        prediction_length: (min, max) tokens of a draft; a max below the pattern's min counts as that.

    Example: with the input ``[5, 6, 7, 8]`` and a state that ends in 6, the draft is ``[7, 8]``.

    Source: ``tokenPredictors/InputLookupTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self, pattern_length: tuple[int, int] = (1, 0), prediction_length: tuple[int, int] = (1, 3)
    ) -> None:
        self.pattern_length, self.prediction_length = pattern_length, prediction_length
        shortest, longest = pattern_length
        fewest, most = prediction_length
        self._lookup = InputLookup(shortest, max(shortest, longest), fewest, most)

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        most = max(self.pattern_length[0], self.prediction_length[1])
        self._lookup.start(self.input_tokens, [], most)
        begins = self.state_tokens[: len(self.input_tokens)] == self.input_tokens
        self._extend(self.state_tokens[len(self.input_tokens) :] if begins else self.state_tokens)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        self._extend(tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        if not self.input_tokens or not self.state_tokens:
            return []
        return self._lookup.propose()

    def dispose(self) -> None:
        super().dispose()
        self._lookup = InputLookup()

    def _extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._lookup.extend(tokens)

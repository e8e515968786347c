"""`InputLookupTokenPredictor`: drafts what followed the last tokens in the input."""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.errors import check_int
from .base import PredictorOptions, TokenPredictor


class InputLookupTokenPredictor(TokenPredictor):
    """Finds the last tokens of the sequence in the input tokens and drafts what follows there.

    ::

        if the last match still holds:                       # all tokens since then continued it
            return input[end : end + prediction_max]         # unless the input is used up
        length(e) = min(pattern_max, longest common suffix of input[:e] and the state)
        end = the smallest e <= len(input) - prediction_min + 1 with the largest length(e)
        return input[end : end + prediction_max] if length(end) >= pattern_min else []

    A draft of fewer than ``prediction_min`` tokens is not made. The bound on e is one larger than it should be, as
    in the original: a match at the very end of the input can win and then have nothing to offer. Where the state
    does not begin with the input, it is compared as if it followed the input. `predict_tokens` sets the match and
    `push_tokens` follows it, so tokens of a step without a draft start no match, as in the original.

    Args:
        pattern_length: (min, max) tokens of a match; ``1 <= min``. As in node-llama-cpp, a max below min counts as
            min: its default of 0, which it documents as no limit, does too, so (1, 0) is (1, 1).
        prediction_length: (min, max) tokens of a draft; a max below the pattern's min counts as that.

    Cost: a search compares at most `pattern_max` tokens back from each place of the last token in the input.

    Example: with the input ``[5, 6, 7, 8]`` and a state that ends in 6, the draft is ``[7, 8]``.

    Source: ``tokenPredictors/InputLookupTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self, pattern_length: tuple[int, int] = (1, 0), prediction_length: tuple[int, int] = (1, 3)
    ) -> None:
        self._pattern_min = check_int("pattern_min", pattern_length[0], 1)
        self._pattern_max = max(pattern_length)
        self._prediction_min = check_int("prediction_min", prediction_length[0], 1)
        self._prediction_max = max(self._pattern_min, check_int("prediction_max", prediction_length[1], 1))
        #: The state, after the input; and of each token the places in the input after it, rising.
        self._written: list[int] = []
        self._ends: dict[int, list[int]] = {}
        self._match_end: int | None = None

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        known, state = self.input_tokens, self.state_tokens
        self._written = list(state) if state[: len(known)] == known else known + state
        self._match_end, self._ends = None, {}
        for end, token in enumerate(known, start=1):
            self._ends.setdefault(token, []).append(end)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        self._written += tokens
        if self._match_end is not None:
            end = self._match_end + len(tokens)
            self._match_end = end if self.input_tokens[self._match_end : end] == list(tokens) else None

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        if not self.state_tokens:
            return []
        if self._match_end is None or self._match_end >= len(self.input_tokens):
            self._match_end = self._find()
        return [] if self._match_end is None else self.input_tokens[self._match_end :][: self._prediction_max]

    def _find(self) -> int | None:
        """The end of the best match, or None if there is none or nothing follows it."""
        num_input, best, longest = len(self.input_tokens), -1, self._pattern_min - 1
        for end in self._ends.get(self._written[-1], ()):
            if longest >= self._pattern_max or end > num_input - self._prediction_min + 1:
                break
            if (length := self._match_length(end)) > longest:
                best, longest = end, length
        enough = min(self._prediction_max, num_input - best) >= self._prediction_min
        return best if best >= 0 and enough else None

    def _match_length(self, end: int) -> int:
        """Of the last tokens, how many are before a place in the input; at most the longest pattern."""
        most = min(end, len(self._written), self._pattern_max)
        pairs = zip(range(end - 1, end - 1 - most, -1), reversed(self._written), strict=False)
        return next((n for n, (i, token) in enumerate(pairs) if self.input_tokens[i] != token), most)

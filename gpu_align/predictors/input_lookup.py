"""`InputLookupTokenPredictor`: drafts what followed the last tokens in the input."""

from __future__ import annotations

from collections.abc import Sequence

from .base import PredictorOptions, TokenPredictor, check_count


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

    Cost: O(occurrences of the token in the input) a token.

    Example: with the input ``[5, 6, 7, 8]`` and a state that ends in 6, the draft is ``[7, 8]``.

    Source: ``tokenPredictors/InputLookupTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self, pattern_length: tuple[int, int] = (1, 0), prediction_length: tuple[int, int] = (1, 3)
    ) -> None:
        self.pattern_length, self.prediction_length = pattern_length, prediction_length
        self._pattern_min = check_count("pattern_min", pattern_length[0])
        self._pattern_max = max(pattern_length)
        self._prediction_min = check_count("prediction_min", prediction_length[0])
        self._prediction_max = max(self._pattern_min, check_count("prediction_max", prediction_length[1]))
        self._positions: dict[int, list[int]] = {}
        # End position in the input -> length of the common suffix of input[:end] and the state, where > 0.
        self._lengths: dict[int, int] = {}
        self._match_end: int | None = None

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        known, state = self.input_tokens, self.state_tokens
        self._positions = {}
        for position, token in enumerate(known):
            self._positions.setdefault(token, []).append(position)
        self._lengths = {end: n for end, n in enumerate(_suffix_lengths(known)) if n > 0}
        self._match_end = None
        self._follow(state[len(known) :] if state[: len(known)] == known else state)

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        self._follow(list(tokens))

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        if not self.state_tokens:
            return []
        if self._match_end is None or self._match_end >= len(self.input_tokens):
            self._match_end = self._find()
        if self._match_end is None:
            return []
        return self.input_tokens[self._match_end : self._match_end + self._prediction_max]

    def _find(self) -> int | None:
        """Where the best match ends, or None if there is none or nothing follows it."""
        num_input = len(self.input_tokens)
        best, best_length = -1, self._pattern_min - 1
        for end, common in self._lengths.items():  # ascending ends, so that a tie keeps the earliest
            length = min(common, self._pattern_max)
            if length > best_length and end <= num_input - self._prediction_min + 1:
                best, best_length = end, length
        if best < 0 or min(self._prediction_max, num_input - best) < self._prediction_min:
            return None
        return best

    def _follow(self, tokens: list[int]) -> None:
        if self._match_end is not None:
            end = self._match_end + len(tokens)
            self._match_end = end if self.input_tokens[self._match_end : end] == tokens else None
        for token in tokens:
            before = self._lengths
            self._lengths = {end + 1: before.get(end, 0) + 1 for end in self._positions.get(token, ())}


def _suffix_lengths(tokens: list[int]) -> list[int]:
    """For every end e in 0..N, the longest common suffix of ``tokens[:e]`` and ``tokens``. O(N).

    The Z-function of the reversed sequence (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1.3).
    """
    n = len(tokens)
    reverse = tokens[::-1]
    z = [n] + [0] * n
    left = right = 0
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and reverse[length] == reverse[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z[::-1]

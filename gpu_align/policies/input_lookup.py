"""node-llama-cpp's ``InputLookupTokenPredictor``."""

from __future__ import annotations

from gpu_align.policies._sequence import SequencePolicy, check_count, follow


class InputLookup(SequencePolicy):
    """Longest-suffix lookup in the input, and then along the match as long as it holds.

    The input is ``prompt + prediction`` and never grows; the state is the input followed by the output::

        if the last match still holds:                       # all tokens since then continued it
            return input[end : end + prediction_max]         # unless the input is used up
        length(e) = min(pattern_max, longest common suffix of input[:e] and the state)
        end = the smallest e <= len(input) - prediction_min + 1 with the largest length(e)
        return input[end : end + prediction_max] if length(end) >= pattern_min else []

    A draft of fewer than ``prediction_min`` tokens is not made. The bound on e is one larger than it should
    be, as in the original: a match at the very end of the input can win and then have nothing to offer.

    Args:
        pattern_min: shortest suffix that counts as a match; ``>= 1``.
        pattern_max: longest suffix that is told apart; ``None`` compares without limit. The original
            documents 0 as "no limit" and as its default, but its constructor raises it to ``pattern_min``,
            so that what runs by default is 1. The default here is what runs.
        prediction_min: fewest tokens a new match must be able to draft; ``>= 1``.
        prediction_max: most tokens drafted a step; raised to ``pattern_min``, as in the original.

    The match is set by `propose` and followed by `extend`, so tokens of a step that was not preceded by
    `propose` (a plain prefill) start no match, as in the original.

    Cost: O(occurrences of the token in the input) a token.

    Source: https://github.com/withcatai/node-llama-cpp,
    ``src/evaluator/LlamaContext/tokenPredictors/InputLookupTokenPredictor.ts``.
    """

    def __init__(
        self,
        pattern_min: int = 1,
        pattern_max: int | None = 1,
        prediction_min: int = 1,
        prediction_max: int = 3,
        name: str = "input_lookup_node_llama_cpp",
    ) -> None:
        super().__init__(name)
        self._pattern_min = check_count("pattern_min", pattern_min)
        self._pattern_max: int | None = None
        if pattern_max is not None:
            self._pattern_max = check_count("pattern_max", pattern_max, minimum=self._pattern_min)
        self._prediction_min = check_count("prediction_min", prediction_min)
        self._prediction_max = max(self._pattern_min, check_count("prediction_max", prediction_max))

    def _begin(self) -> None:
        self._input = self._prompt + self._prediction
        self._positions: dict[int, list[int]] = {}
        for position, token in enumerate(self._input):
            self._positions.setdefault(token, []).append(position)
        # End position in the input -> length of the common suffix of input[:end] and the state, where > 0.
        self._lengths = {end: n for end, n in enumerate(_suffix_lengths(self._input)) if n > 0}
        self._match_end: int | None = None

    def _draft(self) -> list[int]:
        if self._match_end is None or self._match_end >= len(self._input):
            self._match_end = self._find()
        if self._match_end is None:
            return []
        return self._input[self._match_end : self._match_end + self._prediction_max]

    def _find(self) -> int | None:
        """Where the best match ends, or None if there is none or nothing follows it."""
        last_end = len(self._input) - self._prediction_min + 1
        best, best_length = -1, self._pattern_min - 1
        for end, common in self._lengths.items():  # ascending ends, so that a tie keeps the earliest
            length = common if self._pattern_max is None else min(common, self._pattern_max)
            if length > best_length and end <= last_end:
                best, best_length = end, length
        if best < 0 or min(self._prediction_max, len(self._input) - best) < self._prediction_min:
            return None
        return best

    def _advance(self, tokens: list[int]) -> None:
        self._match_end = follow(self._input, self._match_end, tokens)
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

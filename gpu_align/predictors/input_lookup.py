"""`InputLookupTokenPredictor`: drafts what followed the last tokens in the input."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import check_int
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

    Cost: O(1) a token, amortized, whatever the input repeats: its suffix automaton knows where a match ends first.

    Example: with the input ``[5, 6, 7, 8]`` and a state that ends in 6, the draft is ``[7, 8]``.

    Source: ``tokenPredictors/InputLookupTokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    def __init__(
        self, pattern_length: tuple[int, int] = (1, 0), prediction_length: tuple[int, int] = (1, 3)
    ) -> None:
        self.pattern_length, self.prediction_length = pattern_length, prediction_length
        self._pattern_min = check_int("pattern_min", pattern_length[0], 1)
        self._pattern_max = max(pattern_length)
        self._prediction_min = check_int("prediction_min", prediction_length[0], 1)
        self._prediction_max = max(self._pattern_min, check_int("prediction_max", prediction_length[1], 1))
        self._text = SuffixAutomaton([])
        # The longest suffix of the state that the input has: its state in the automaton, and its length.
        self._state = self._length = 0
        self._match_end: int | None = None

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        known, state = self.input_tokens, self.state_tokens
        self._text = SuffixAutomaton(known)
        self._state, self._length = self._text.last, len(known)
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
        """The end of the best match, or None if there is none or nothing follows it."""
        num_input, text = len(self.input_tokens), self._text
        state, length = self._state, self._length
        while text.length[text.link[state]] >= self._pattern_max:  # longer matches count as this one
            state = text.link[state]
        while state and text.first_end[state] > num_input - self._prediction_min + 1:
            state = text.link[state]
            length = text.length[state]
        best = text.first_end[state] if min(length, self._pattern_max) >= self._pattern_min else -1
        if best < 0 or min(self._prediction_max, num_input - best) < self._prediction_min:
            return None
        return best

    def _follow(self, tokens: list[int]) -> None:
        if self._match_end is not None:
            end = self._match_end + len(tokens)
            self._match_end = end if self.input_tokens[self._match_end : end] == tokens else None
        for token in tokens:
            self._state, self._length = self._text.follow(self._state, self._length, token)


class SuffixAutomaton:
    """All substrings of a text: a state stands for those that end at the same positions. O(N) to build.

    A. Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self.link = [0]  #: of a state, that of its longest suffix in another; the root, 0, has itself
        self.length = [0]  #: of a state, its longest substring
        self.first_end = [0]  #: of a state, the first position at which it ends
        self.last = 0  #: the state of the whole text
        for end, token in enumerate(tokens, start=1):
            self._append(token, end)

    def _append(self, token: int, end: int) -> None:
        before, self.last = self.last, self._new({}, end, end)
        follows = self._redirect(before, token, None, self.last)
        if follows is None:
            return
        parent, known = follows, self._next[follows][token]
        if self.length[parent] + 1 < self.length[known]:
            clone = self._new(dict(self._next[known]), self.length[parent] + 1, self.first_end[known])
            self.link[clone] = self.link[known]
            self._redirect(parent, token, known, clone)
            self.link[known] = known = clone
        self.link[self.last] = known

    def _new(self, following: dict[int, int], length: int, first_end: int) -> int:
        self._next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.first_end.append(first_end)
        return len(self.link) - 1

    def _redirect(self, state: int, token: int, old: int | None, new: int) -> int | None:
        """Lead `token` to `new` from a state and its suffixes that lead to `old`; the first other, or None."""
        while self._next[state].get(token) == old:
            self._next[state][token] = new
            if state == 0:
                return None
            state = self.link[state]
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix that the text has, one token further."""
        while token not in self._next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self._next[state][token], length + 1

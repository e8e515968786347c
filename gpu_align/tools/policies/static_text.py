"""Drafters with a cursor in the prediction: how each finds it again is what they differ in."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...predictors.base import check_count, count_accepted
from .base import CursorPolicy, Policy


class Cursor(CursorPolicy):
    """The simplest predicted output: one cursor, no realignment.

    ::

        cursor = 0
        each step:  draft = prediction[cursor : cursor + K]
                    cursor += 1 for each new token that equals prediction[cursor]
                    at the first that does not: stop drafting for the rest of the sequence

    A token beyond the end of the prediction counts as a mismatch. O(1) a token.

    Source: this is the floor that every published scheme improves on; vLLM's pull request 23450 ("Add
    Predicted Outputs API", 2025) and a static draft without realignment behave like it.
    """

    name = "cursor"

    def _advance(self, tokens: list[int]) -> None:
        self._follow(tokens)


Aligner = Literal["auto", "rapidfuzz", "difflib"]

#: Mean tokens a line that `guess_line_end` aims at: Python source in Tekken tokens has 10.0.
GUESSED_LINE_LENGTH = 10


class StaticText(CursorPolicy):
    """Follow the prediction; when diverged, align whole lines each time a line is completed.

    A line is a run of tokens up to and including one for which ``ends_line`` is true. ::

        cursor = 0
        each step:
            if the new tokens are prediction[cursor : cursor + n]: cursor += n
            else: diverged, until an attempt succeeds
            if diverged and a line was completed since the last attempt:
                align all completed output lines with the lines of the prediction
                if the last completed line is matched, to prediction line i,
                and the tokens since then are a prefix of line i + 1 without its line end:
                    cursor = that position in line i + 1
            draft = prediction[cursor : cursor + K] unless diverged

    Args:
        ends_line: says of a token id whether its text contains a newline, see `line_end_test`; asked once
            for each distinct token. ``None``, when no tokenizer is known, stands for `guess_line_end`.
        aligner: ``"rapidfuzz"`` (longest common subsequence of lines), ``"difflib"`` (longest matching
            blocks) or ``"auto"``: RapidFuzz where it is installed. The attribute is the one in use.

    Cost: O(1) a token while aligned. An attempt costs O(P·L / 64) with RapidFuzz for P prediction and L
    output lines, O(P·L) or worse with difflib.

    Source: https://github.com/cascade-tech-ai/vllmx, ``vllm/v1/spec_decode/static_text_proposer.py``; its
    switch between CR/LF and LF predictions is left out because token ids do not say which is which.
    """

    def __init__(
        self,
        ends_line: Callable[[int], bool] | None = None,
        aligner: Aligner = "auto",
        name: str = "static_text",
    ) -> None:
        super().__init__(name)
        if ends_line is not None and not callable(ends_line):
            raise TypeError(f"ends_line: expected a callable or None, got {type(ends_line).__name__}")
        if aligner not in ("auto", "rapidfuzz", "difflib"):
            raise ValueError(f"aligner: expected 'auto', 'rapidfuzz' or 'difflib', got {aligner!r}")
        installed = importlib.util.find_spec("rapidfuzz") is not None
        if aligner == "rapidfuzz" and not installed:
            raise ImportError('aligner="rapidfuzz" needs RapidFuzz: pip install rapidfuzz')
        self.aligner = "rapidfuzz" if installed and aligner != "difflib" else "difflib"
        self._align = last_match_rapidfuzz if self.aligner == "rapidfuzz" else last_match_difflib
        self._is_line_end = functools.cache(guess_line_end if ends_line is None else ends_line)

    def _begin(self) -> None:
        super()._begin()
        # A small int for each distinct line: both aligners then compare lines exactly, and fast.
        self._line_ids: dict[tuple[int, ...], int] = {}
        self._lines: list[list[int]] = [[]]
        self._line_starts = [0]
        for position, token in enumerate(self._prediction):
            self._lines[-1].append(token)
            if self._is_line_end(token):
                self._lines.append([])
                self._line_starts.append(position + 1)
        self._predicted_ids = [self._line_id(line) for line in self._lines]
        self._completed_ids: list[int] = []
        self._current: list[int] = []
        self._may_attempt = False

    def _line_id(self, line: list[int]) -> int:
        return self._line_ids.setdefault(tuple(line), len(self._line_ids))

    def _advance(self, tokens: list[int]) -> None:
        for token in tokens:
            self._current.append(token)
            if self._is_line_end(token):
                self._completed_ids.append(self._line_id(self._current))
                self._current = []
                self._may_attempt = True
        self._follow(tokens)
        if self._cursor is None and self._completed_ids and self._may_attempt:
            self._cursor = self._attempt()
            self._may_attempt = False

    def _attempt(self) -> int | None:
        line = self._align(self._predicted_ids, self._completed_ids)
        if line is None or line + 1 >= len(self._lines):
            return None
        following = self._lines[line + 1]
        body = following[:-1] if following and self._is_line_end(following[-1]) else following
        if body[: len(self._current)] != self._current:
            return None
        return self._line_starts[line + 1] + len(self._current)


def line_end_test(token_bytes: Callable[[int], bytes]) -> Callable[[int], bool]:
    """The `StaticText` argument ``ends_line`` for a tokenizer: do a token's bytes contain a newline anywhere?"""
    return lambda token: b"\n" in token_bytes(token)


def guess_line_end(token: int) -> bool:
    """Stands in for `line_end_test`: one token id in `GUESSED_LINE_LENGTH` ends a "line", by Knuth's hash.

    Equal stretches of prediction and output are then cut alike, which is all that the alignment needs.
    """
    return ((token * 2654435761) & 0xFFFFFFFF) * GUESSED_LINE_LENGTH < 1 << 32


def last_match_rapidfuzz(predicted: list[int], completed: list[int]) -> int | None:
    """The prediction line that a longest common subsequence matches to the last completed line, or None."""
    from rapidfuzz.distance import LCSseq

    for tag, _, predicted_end, _, completed_end in LCSseq.opcodes(predicted, completed).as_list():
        if tag == "equal" and completed_end == len(completed):
            return int(predicted_end) - 1
    return None


def last_match_difflib(predicted: list[int], completed: list[int]) -> int | None:
    """The same question to difflib, whose blocks are the longest first and not always an LCS."""
    matcher = difflib.SequenceMatcher(None, predicted, completed, autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.size and block.b + block.size == len(completed):
            return block.a + block.size - 1
    return None


class OpenAI(Policy):
    """Short lookahead, and a long wait after each divergence.

    ::

        aligned:   draft = prediction[cursor : cursor + min(lookahead, K)]
        diverged:  draft nothing until the last `resume_after` output tokens, all of them generated after
                   the token that diverged, occur in the prediction; cursor = where that occurrence ends,
                   and drafts begin `resume_delay` tokens later

    Several occurrences: the first that ends after the cursor's position at the divergence, else the last before.

    Args:
        lookahead: most tokens drafted a step; one divergence rejects at most so many.
        resume_after: matching tokens needed to draft again. Published are about 32, and counts that 35 gives; see
            docs/published.md.
        resume_delay: tokens that then still pass without a draft, each of which must continue the match.

    Attributes:
        accepted, rejected: of the drafted tokens since `start`. Those that the model adds are in neither.

    Cost: O(1) a token while aligned; O(resume_after) while diverged, after indexing the prediction once.

    Source: https://vamvas.ch/openai-predicted-outputs (lookahead, resumption and the 58-token example).
    """

    def __init__(
        self, lookahead: int = 16, resume_after: int = 32, resume_delay: int = 0, name: str = "openai"
    ) -> None:
        super().__init__(name)
        self._lookahead = check_count("lookahead", lookahead)
        self._resume_after = check_count("resume_after", resume_after)
        self._resume_delay = check_count("resume_delay", resume_delay, minimum=0)
        self._begin()

    def _begin(self) -> None:
        self.accepted = self.rejected = 0
        self._cursor = 0
        self._aligned = True
        self._delay = 0  # tokens that have to pass before the next draft
        self._since_divergence = 0
        self._window_ends: dict[tuple[int, ...], list[int]] | None = None
        self._offered: list[int] = []

    def _draft(self) -> list[int]:
        draft: list[int] = []
        if self._aligned and not self._delay:
            length = min(self._lookahead, self._num_draft_tokens)
            draft = self._prediction[self._cursor : self._cursor + length]
        self._offered = draft  # for the counters only; no draft depends on it
        return list(draft)

    def _advance(self, tokens: list[int]) -> None:
        matched = count_accepted(self._offered, tokens)
        self.accepted += matched
        self.rejected += len(self._offered) - matched
        self._offered = []
        for position in range(len(self._output) - len(tokens), len(self._output)):
            self._pass(position)

    def _pass(self, position: int) -> None:
        """Move past the output token at `position`."""
        if self._aligned:
            if self._prediction[self._cursor : self._cursor + 1] == [self._output[position]]:
                self._cursor += 1
                self._delay = max(0, self._delay - 1)
            else:
                self._aligned = False
                self._since_divergence = 0
            return
        self._since_divergence += 1
        if self._since_divergence < self._resume_after:
            return
        ends = self._ends_of(self._output[position + 1 - self._resume_after : position + 1])
        if ends:
            self._cursor = next((end for end in ends if end > self._cursor), ends[-1])
            self._aligned = True
            self._delay = self._resume_delay

    def _ends_of(self, window: list[int]) -> list[int]:
        """Ascending positions of the prediction right after each occurrence of ``window``."""
        if self._window_ends is None:
            self._window_ends = {}
            for end in range(self._resume_after, len(self._prediction) + 1):
                key = tuple(self._prediction[end - self._resume_after : end])
                self._window_ends.setdefault(key, []).append(end)
        return self._window_ends.get(tuple(window), [])


_Int = npt.NDArray[np.int64]

#: Stands for "no path reaches this diagonal"; far enough from overflow to be incremented.
_UNREACHED = np.int64(-(1 << 40))


class MyersFrontier:
    """Furthest-reaching paths between a fixed sequence and one that grows.

    With ``a`` the fixed sequence, ``b`` the tokens given so far and ``dist`` the number of insertions and
    deletions that turn one sequence into another (a substitution costs 2)::

        edits == min(dist(a[:x], b) for x in range(len(a) + 1))
        ends() == [x for x in range(len(a) + 1) if dist(a[:x], b) == edits]

    Only the last layer of paths is kept: no path of an earlier one had come to the end of ``b``. All appends
    together take O((len(a) + len(b)) · edits) comparisons and O(edits) memory.

    Source: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986).
    """

    def __init__(self, a: list[int]) -> None:
        self._a: _Int = np.asarray(a, dtype=np.int64)
        self._b: _Int = np.empty(64, dtype=np.int64)
        self._length = 0
        self.edits = 0
        # [edits + 1] furthest x on diagonals k = x - y in -edits, -edits + 2, …, edits.
        self._furthest: _Int = np.zeros(1, dtype=np.int64)

    def append(self, tokens: list[int]) -> None:
        """Grow ``b``; the result does not depend on how its tokens are grouped into calls."""
        grown = self._length + len(tokens)
        if grown > len(self._b):
            self._b = np.concatenate([self._b, np.empty(max(grown, len(self._b)), dtype=np.int64)])
        self._b[self._length : grown] = tokens
        self._length = grown
        self._slide()
        while not len(self.ends()):
            # One more edit: from k - 1 by skipping a token of a, from k + 1 by inserting one of b.
            deleted = np.concatenate([[_UNREACHED], self._furthest + 1])
            inserted = np.concatenate([self._furthest, [_UNREACHED]])
            deleted[deleted > len(self._a)] = _UNREACHED
            self.edits += 1
            self._furthest = np.maximum(deleted, inserted)
            self._slide()

    def ends(self) -> _Int:
        """Ascending x at which a shortest script that uses up all of ``b`` ends."""
        x = self._furthest
        ends: _Int = x[(x >= 0) & (x - self._diagonals() == self._length)]
        return ends

    def _diagonals(self) -> _Int:
        return np.arange(-self.edits, self.edits + 1, 2, dtype=np.int64)

    def _slide(self) -> None:
        """Move every path along its diagonal while the tokens are equal."""
        k = self._diagonals()
        moving = np.flatnonzero(self._furthest >= 0)
        while len(moving):
            x = self._furthest[moving]
            y = x - k[moving]
            inside = (x < len(self._a)) & (y < self._length)
            moving, x, y = moving[inside], x[inside], y[inside]
            moving = moving[self._a[x] == self._b[y]]
            self._furthest[moving] += 1


class Myers(CursorPolicy):
    """Cursor at the end of the shortest edit script from the prediction to the output so far.

    ::

        d      = min over x of dist(prediction[:x], output)        # insertions + deletions
        cursor = the largest x with dist(prediction[:x], output) == d
                 and prediction[x - 1] == output[-1]               # the script ends in a match
        draft  = prediction[cursor : cursor + K], or nothing if there is no such x

    Before any output the cursor is 0. Coming back after an insertion or a substitution needs one matching token,
    after a deletion of L tokens about L: only then is the jump cheaper than calling all of them inserted.

    Cost: see `MyersFrontier`. An unrelated output of 8,000 tokens takes about a second in all.

    Source: https://cascadetech.ai/blog/vllm-predicted-outputs ("we use the Myers diff algorithm to
    realign") and the token-level prototype in https://github.com/cascade-tech-ai/vllmx
    (``cascade/src/smart_prediction/algorithms/myers_streaming.py``), which goes on to longer scripts when
    no shortest one ends in a match; see ``docs/developer/policies.md`` for the differences.
    """

    name = "myers"

    def _begin(self) -> None:
        super()._begin()
        self._frontier = MyersFrontier(self._prediction)

    def _advance(self, tokens: list[int]) -> None:
        self._frontier.append(tokens)
        last = tokens[-1]
        ends = (int(x) for x in self._frontier.ends()[::-1])
        self._cursor = next((x for x in ends if x > 0 and self._prediction[x - 1] == last), None)

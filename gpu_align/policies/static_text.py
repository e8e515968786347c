"""Cascade's static text: a cursor, and line-level alignment at completed lines after a divergence."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from typing import Literal

from gpu_align.policies._sequence import CursorPolicy, follow

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
            blocks, from the standard library) or ``"auto"``: RapidFuzz where it is installed.
        name: the name in reports.

    Attributes:
        aligner: ``"rapidfuzz"`` or ``"difflib"``, the one in use.

    Errors: ``ImportError`` for ``aligner="rapidfuzz"`` without RapidFuzz, ``ValueError`` for another name.

    The two aligners agree where the longest common subsequence is also made of longest common blocks; on
    texts with moved blocks difflib prefers one long block to several short ones, and may then place the
    last line elsewhere or not at all.

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
        self._align = _last_match_rapidfuzz if self.aligner == "rapidfuzz" else _last_match_difflib
        self._ends_line = guess_line_end if ends_line is None else ends_line
        self._is_end: dict[int, bool] = {}

    def _begin(self) -> None:
        super()._begin()
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

    def _is_line_end(self, token: int) -> bool:
        if token not in self._is_end:
            self._is_end[token] = bool(self._ends_line(token))
        return self._is_end[token]

    def _line_id(self, line: list[int]) -> int:
        """A small int for each distinct line: both aligners then compare lines exactly, and fast."""
        return self._line_ids.setdefault(tuple(line), len(self._line_ids))

    def _advance(self, tokens: list[int]) -> None:
        for token in tokens:
            self._current.append(token)
            if self._is_line_end(token):
                self._completed_ids.append(self._line_id(self._current))
                self._current = []
                self._may_attempt = True
        self._cursor = follow(self._prediction, self._cursor, tokens)
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
    """The `StaticText` argument ``ends_line`` for a tokenizer: do a token's bytes contain a newline?

    Many tokens of code hold a newline among other characters (``":\\n"``, ``"\\n\\n"``); all of them end a
    line, as in the original. Example: ``StaticText(line_end_test(tokenizer.token_bytes))``.
    """
    return lambda token: b"\n" in token_bytes(token)


def guess_line_end(token: int) -> bool:
    """Stands in for `line_end_test` when nothing is known of the tokenizer.

    Cuts where the content says so, not where lines end: one token id in `GUESSED_LINE_LENGTH`, chosen by
    the high bits of ``token * 2654435761 mod 2**32`` (Knuth's multiplicative hash), ends a "line". Equal
    stretches of prediction and output are then cut alike, which is all that the alignment needs.
    """
    return ((token * 2654435761) & 0xFFFFFFFF) * GUESSED_LINE_LENGTH < 1 << 32


def _last_match_rapidfuzz(predicted: list[int], completed: list[int]) -> int | None:
    """The prediction line that a longest common subsequence matches to the last completed line, or None."""
    from rapidfuzz.distance import LCSseq

    for tag, _, predicted_end, _, completed_end in LCSseq.opcodes(predicted, completed).as_list():
        if tag == "equal" and completed_end == len(completed):
            return int(predicted_end) - 1
    return None


def _last_match_difflib(predicted: list[int], completed: list[int]) -> int | None:
    """The same question to difflib, whose blocks are the longest first and not always an LCS."""
    matcher = difflib.SequenceMatcher(None, predicted, completed, autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.size and block.b + block.size == len(completed):
            return block.a + block.size - 1
    return None

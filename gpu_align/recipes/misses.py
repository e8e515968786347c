"""Misses: recipe tokens that a model refuted, and what it wrote instead; what a merge makes a better pack of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops.constants import MAX_CONTEXT, SHAPE_WINDOW
from . import files
from .files import Miss, MissContent
from .tokenize import shape_of_output

#: Different misses that are held; of further ones only the number is.
MAX_MISSES = 100_000


class Misses:
    """How often which recipe token was refuted, or accepted, behind which contexts.

    Args:
        tokenizer: `fingerprint` of the tokenizer that the ids are of.
        shapes_only: hold no literal contexts, so that no text of a request is.
        made_by: the command.

    Attributes:
        left_out: misses that were not held, because `MAX_MISSES` others are.
    """

    def __init__(self, tokenizer: str = "", shapes_only: bool = False, made_by: str = "") -> None:
        self.tokenizer = tokenizer
        self.shapes_only = shapes_only
        self.made_by = made_by
        self.left_out = 0
        self._counts: Counter[Miss] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def content(self) -> MissContent:
        """All that its file holds."""
        return MissContent(self.tokenizer, self._counts, self.made_by)

    @property
    def num_refuted(self) -> int:
        """Tokens that were refuted."""
        return sum(count for miss, count in self._counts.items() if miss.said != miss.expected)

    def refuted(
        self,
        context_tokens: Sequence[int],
        shape_items: Sequence[int],
        expected: int,
        said: int,
        count: int = 1,
        *,
        start_tokens: Sequence[int] = (),
        start_items: Sequence[int] = (),
        first: int = -1,
    ) -> None:
        """Count that behind this context `expected` was drafted and `said` was written.

        Args:
            context_tokens: the tokens before it, in reading order; the last 8 count.
            shape_items: `shape_of_output` of them, the newest first; may be empty.
            expected, said: token ids.
            count: how often.
            start_tokens, start_items, first: the same contexts at the beginning of the draft and its first token,
                where this token is not the first: from there a run must know enough to end before it.
        """
        literal = () if self.shapes_only else _last(context_tokens)
        literal_start = () if self.shapes_only else _last(start_tokens)
        shape, shape_start = _last(shape_items[::-1]), _last(start_items[::-1])
        miss = Miss(literal, shape, int(expected), int(said), literal_start, shape_start, int(first))
        self._add(miss, count)

    def accepted(
        self, context_tokens: Sequence[int], shape_items: Sequence[int], token: int, count: int = 1
    ) -> None:
        """Count that behind this context a recipe's token was accepted."""
        self.refuted(context_tokens, shape_items, token, token, count)

    def add(self, other: Misses) -> None:
        """Count what the other one has, too."""
        for miss, count in other._counts.items():
            self._add(miss, count)

    def _add(self, miss: Miss, count: int) -> None:
        if count < 1 or not (miss.literal or miss.shape):
            return
        if miss not in self._counts and len(self._counts) >= MAX_MISSES:
            self.left_out += count
            return
        self._counts[miss] += count

    def save(self, path: Path | str) -> None:
        """Write them, at once or not at all; gzipped if the name ends in ``.gz``."""
        files.write(Path(path), files.misses_data(self.content))

    @classmethod
    def load(cls, path: Path | str) -> Misses:
        """Read a file of misses.

        Raises:
            PackError: it is none; the message says why.
            OSError: it cannot be read.
        """
        return cls.of(files.read_misses(Path(path)))

    @classmethod
    def of(cls, content: MissContent) -> Misses:
        """Misses with this content."""
        misses = cls(content.tokenizer, made_by=content.made_by)
        misses._counts.update(content.counts)
        return misses


def count_misses(
    misses: Misses,
    before: Sequence[int],
    num_output: int,
    draft: Sequence[int],
    wrote: Sequence[int],
    shape_of: npt.NDArray[np.signedinteger[Any]] | None,
    accepted_count: int = 1,
) -> None:
    """Count a recipe's draft that was verified.

    ::

        for k, token in enumerate(draft):
            refuted(tokens before it, token, wrote[k])    if wrote[k] != token, and no more
            accepted(tokens before it, token)             otherwise, `accepted_count` times

    Args:
        misses: counts it.
        before: the tokens before the draft, prompt and output; the last `SHAPE_WINDOW` + 1 of them are enough.
        num_output: how many of the output's tokens are before the draft.
        draft: what was drafted.
        wrote: what the model wrote from there on: the accepted tokens and its own.
        shape_of: [V], `Recipes.shape_of`; None where there are no shapes.
        accepted_count: 0 leaves accepted tokens out. To count one draft in n, give n for it and 0 for the others.

    On the host, about 10 µs for each token that is counted.
    """
    checked = min(len(draft), len(wrote))
    accepted = next((k for k in range(checked) if draft[k] != wrote[k]), checked)
    tokens = [int(token) for token in before[-(SHAPE_WINDOW + 1) :]]
    end, output = len(tokens), min(num_output, len(tokens))
    tokens += [int(token) for token in draft[:accepted]]

    def context(k: int) -> tuple[list[int], list[int]]:
        """The tokens before draft token k, and their shape."""
        behind = tokens[: end + k]
        return behind, [] if shape_of is None else shape_of_output(behind[end - output :], shape_of)

    for k in range(accepted if accepted_count else 0):
        misses.accepted(*context(k), tokens[end + k], accepted_count)
    if accepted < checked:
        start = context(0) if accepted else ([], [])
        first = int(draft[0]) if accepted else -1
        misses.refuted(
            *context(accepted),
            int(draft[accepted]),
            int(wrote[accepted]),
            start_tokens=start[0],
            start_items=start[1],
            first=first,
        )


def _last(items: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(item) for item in items[-MAX_CONTEXT:])

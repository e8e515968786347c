"""Misses: recipe tokens that a model refuted, and what it wrote instead; what a merge makes a better pack of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.constants import MAX_CONTEXT, SHAPE_WINDOW
from .pack import (
    LINES_FORMAT,
    count_of,
    expect,
    is_token,
    items_of,
    json_text,
    list_of,
    read_file,
    text_of,
    with_hash,
    write_file,
)
from .tokenize import shape_of_output

#: Different misses that are held; of further ones only the number is.
MAX_MISSES = 100_000


class Miss(NamedTuple):
    """Where a recipe's token was checked. Contexts are in reading order, of `MAX_CONTEXT` items at most.

    The last three say the same of the beginning of the draft; empty and -1 where this token was its first.
    """

    literal: tuple[int, ...]  # the last tokens, prompt included; none where only shapes are kept
    shape: tuple[int, ...]
    expected: int  # the token that was drafted
    said: int  # what the model wrote; `expected` where the token was accepted
    literal_start: tuple[int, ...] = ()
    shape_start: tuple[int, ...] = ()
    first: int = -1


class Misses:
    """How often which recipe token was refuted, or accepted, behind which contexts.

    Args:
        tokenizer: `fingerprint` of the tokenizer that the ids are of.
        shapes_only: hold no literal contexts, so that no text of a request is.
        made_by: the command.
        counts: how often each was counted before.

    Attributes:
        counts: how often each was counted.
        left_out: misses that were not held, because `MAX_MISSES` others are.
    """

    def __init__(
        self,
        tokenizer: str = "",
        shapes_only: bool = False,
        made_by: str = "",
        counts: Mapping[Miss, int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.shapes_only = shapes_only
        self.made_by = made_by
        self.left_out = 0
        self.counts: Counter[Miss] = Counter(counts)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_refuted(self) -> int:
        """Tokens that were refuted."""
        return sum(count for miss, count in self.counts.items() if miss.said != miss.expected)

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
        literals = (() if self.shapes_only else _last(tokens) for tokens in (context_tokens, start_tokens))
        shapes = (_last(items[::-1]) for items in (shape_items, start_items))
        (literal, literal_start), (shape, shape_start) = literals, shapes
        miss = Miss(literal, shape, int(expected), int(said), literal_start, shape_start, int(first))
        self.count(miss, count)

    def accepted(
        self, context_tokens: Sequence[int], shape_items: Sequence[int], token: int, count: int = 1
    ) -> None:
        """Count that behind this context a recipe's token was accepted."""
        self.refuted(context_tokens, shape_items, token, token, count)

    def add(self, other: Misses) -> None:
        """Count what the other one has, too."""
        for miss, count in other.counts.items():
            self.count(miss, count)

    def count(self, miss: Miss, count: int) -> bool:
        """Count it so often. Returns whether it is held."""
        if count < 1 or not (miss.literal or miss.shape):
            return False
        if miss not in self.counts and len(self.counts) >= MAX_MISSES:
            self.left_out += count
            return False
        self.counts[miss] += count
        return True

    def head(self) -> bytes:
        """The first line of a file that grows; behind it `line_of` each miss, as often as it is counted."""
        about = {"kind": "misses", "tokenizer": self.tokenizer, "made_by": self.made_by}
        return json_text({"format": LINES_FORMAT, **about}) + b"\n"

    def save(self, path: Path | str) -> None:
        """Write them for this user alone, at once or not at all; gzipped if the name ends in ``.gz``."""
        rows = sorted((*miss, count) for miss, count in self.counts.items())
        data = {"tokenizer": self.tokenizer, "made_by": self.made_by, "misses": rows}
        write_file(Path(path), with_hash("misses", data), 0o600)

    @classmethod
    def load(cls, path: Path | str) -> Misses:
        """Read a file of misses.

        Raises:
            PackError: it is none; the message says why.
            OSError: it cannot be read.
        """
        misses: Misses = read_file(Path(path), misses=parse_misses)
        return misses


def line_of(miss: Miss, count: int) -> bytes:
    """A line of a file that grows."""
    return json_text((*miss, count)) + b"\n"


def parse_misses(data: dict[str, Any]) -> Misses:
    """A file of misses; the counts of one that stands there again add up."""
    counts: dict[Miss, int] = {}
    kind = "lines" if data["format"] == LINES_FORMAT else "misses"
    for i, row in enumerate(list_of(data, kind)):
        name = f"{kind}[{i}]"
        expect(type(row) is list and len(row) == 8, name, "8 values", row)
        literal, shape, expected, said, literal_start, shape_start, first, count = row
        literal, shape, literal_start, shape_start = (
            items_of(name, context, is_shape, least=0)
            for context, is_shape in ((literal, 0), (shape, 1), (literal_start, 0), (shape_start, 1))
        )
        is_known = is_token(expected) and is_token(said) and is_token(first, -1)
        expect(is_known, name, "token ids", [expected, said, first])
        miss = Miss(literal, shape, expected, said, literal_start, shape_start, first)
        counts[miss] = count_of(name, counts.get(miss, 0) + count_of(name, count))
    return Misses(text_of(data, "tokenizer"), made_by=text_of(data, "made_by"), counts=counts)


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

    Its first tokens are accepted, `accepted_count` times, up to the one that is refuted; no more are counted.

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
        start_tokens, start_items = context(0) if accepted else ([], [])
        misses.refuted(
            *context(accepted),
            int(draft[accepted]),
            int(wrote[accepted]),
            start_tokens=start_tokens,
            start_items=start_items,
            first=int(draft[0]) if accepted else -1,
        )


def _last(items: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(item) for item in items[-MAX_CONTEXT:])

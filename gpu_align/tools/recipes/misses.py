"""Misses: tokens of recipes that were refuted or accepted, counted, and kept in files that a merge reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...files import MAX_COUNT, MAX_TOKEN, Count, Domain, Text, TokenId, checked, expect
from ...ops.recipes import MAX_CONTEXT, SHAPE_WINDOW
from ...recipes.pack import context_of, read_file, write_file
from ...recipes.tokenize import shape_of_output

#: Different misses that are held; of further ones only the number is.
MAX_MISSES = 100_000


class Miss(NamedTuple):
    """A recipe's token that was checked. Contexts are in reading order, of `MAX_CONTEXT` items at most.

    The last three say the same of the beginning of the draft; empty and -1 where this token was its first.
    """

    literal: tuple[int, ...]  # the last tokens, prompt included; none where only shapes are kept
    shape: tuple[int, ...]
    expected: int  # the token that was drafted
    said: int  # what the model wrote; `expected` where the token was accepted
    literal_start: tuple[int, ...] = ()
    shape_start: tuple[int, ...] = ()
    first: int = -1


@dataclass(eq=False, repr=False)
class Misses:
    """How often which recipe token was refuted, or accepted, after which contexts."""

    tokenizer: str = ""  # `fingerprint` of the one that the ids are of
    shapes_only: bool = False  # hold no literal contexts, so that no text of a request is
    made_by: str = ""
    counts: Counter[Miss] = field(default_factory=Counter)
    left_out: int = 0  # misses that were not held, because `MAX_MISSES` others are

    def __len__(self) -> int:
        return len(self.counts)

    def count(self, miss: Miss, count: int = 1) -> bool:
        """Count it so often. Returns whether it is held."""
        if self.shapes_only:
            miss = miss._replace(literal=(), literal_start=())
        if count < 1 or not (miss.literal or miss.shape):
            return False
        if miss not in self.counts and len(self.counts) >= MAX_MISSES:
            self.left_out += count
            return False
        self.counts[miss] += count
        return True

    def save(self, path: Path | str) -> None:
        """Write them for this user alone, whole or not at all; gzipped if the name ends in ``.gz``."""
        rows = sorted((*miss, count) for miss, count in self.counts.items())
        data = {"tokenizer": self.tokenizer, "made_by": self.made_by, "misses": rows}
        write_file(Path(path), "misses", data, 0o600)

    @classmethod
    def load(cls, path: Path | str) -> Misses:
        """Read a file of misses; PackError where it is none."""
        misses: Misses = read_file(Path(path), misses=parse_misses)
        return misses


def count_misses(
    misses: Misses,
    before: Sequence[int],
    num_output: int,
    draft: Sequence[int],
    wrote: Sequence[int],
    shape_of: npt.NDArray[np.signedinteger[Any]] | None,
) -> None:
    """Count a recipe's draft that was verified.

    Its first tokens are accepted, up to the one that is refuted; no more are counted.

    Args:
        before: the tokens before the draft, prompt and output; the last `SHAPE_WINDOW` + 1 of them are enough.
        num_output: how many of the output's tokens are before the draft.
        draft, wrote: what was drafted, and what the model wrote from there on, accepted tokens and its own.
        shape_of: [V], `Recipes.shape_of`; None where there are no shapes.

    On the host, about 10 µs for each token that is counted.
    """
    checked = min(len(draft), len(wrote))
    accepted = next((k for k in range(checked) if draft[k] != wrote[k]), checked)
    tokens = [int(token) for token in before[-(SHAPE_WINDOW + 1) :]]
    end, output = len(tokens), min(num_output, len(tokens))
    tokens += [int(token) for token in draft[:accepted]]

    def contexts(k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The last tokens before draft token k, and their shape."""
        known = tokens[: end + k]
        shape = [] if shape_of is None else shape_of_output(known[end - output :], shape_of)
        return tuple(known[-MAX_CONTEXT:]), tuple(shape[::-1])

    for k in range(accepted):
        misses.count(Miss(*contexts(k), tokens[end + k], tokens[end + k]))
    if accepted < checked:
        start = (*contexts(0), int(draft[0])) if accepted else ()
        misses.count(Miss(*contexts(accepted), int(draft[accepted]), int(wrote[accepted]), *start))


_TokenOrNone = Annotated[int, Domain("a token id or -1", lambda token: -1 <= token < MAX_TOKEN)]


class MissRow(NamedTuple):
    """A miss and its count, as a file has them."""

    literal: list[int]
    shape: list[int]
    expected: TokenId
    said: TokenId
    literal_start: list[int]
    shape_start: list[int]
    first: _TokenOrNone
    times: Count


def parse_misses(data: dict[str, Any]) -> Misses:
    """The misses of a file's data; the counts of a miss that stands there again add up."""
    counts: Counter[Miss] = Counter()
    for i, one in enumerate(checked(list[MissRow], data.get("misses"), "misses")):
        where, count = f"misses[{i}]", one.times
        contexts = {
            name: context_of(where, getattr(one, name), name.startswith("shape"), least=0)
            for name in ("literal", "shape", "literal_start", "shape_start")
        }
        miss = Miss(**contexts, expected=one.expected, said=one.said, first=one.first)
        counts[miss] += count
        expect(counts[miss] <= MAX_COUNT, where, "a count", counts[miss])
    tokenizer, made_by = (checked(Text, data.get(name), name) for name in ("tokenizer", "made_by"))
    return Misses(tokenizer, made_by=made_by, counts=counts)

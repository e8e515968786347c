"""What a pack and a file of misses hold, apart from what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .chains import Observed
from .words import Recipe

#: The calibration has one offset for each of so many bins of equal width, by the probability that the counts give.
NUM_BINS = 20


class PackError(ValueError):
    """A file is not a recipe pack, or a pack does not fit."""


class Content(NamedTuple):
    """The fields of a `RecipePack`."""

    words: Mapping[str, int]
    recipes: Sequence[Recipe]
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""
    task: str = ""
    tokenizer: str = ""
    observed: Sequence[Observed] = ()
    kept: Sequence[int] = ()


class Miss(NamedTuple):
    """Where a recipe's token was checked: behind `literal` and `shape` the recipes said `expected`.

    Attributes:
        literal: the last tokens, prompt included; none where only shapes are kept.
        shape: the last items of the shape. Both in reading order, with `MAX_CONTEXT` of them at most.
        expected: the token that was drafted.
        said: what the model wrote; `expected` where the token was accepted.
        literal_start, shape_start, first: the same contexts at the beginning of the draft, and its first token;
            empty and -1 where this token was the first.
    """

    literal: tuple[int, ...]
    shape: tuple[int, ...]
    expected: int
    said: int
    literal_start: tuple[int, ...] = ()
    shape_start: tuple[int, ...] = ()
    first: int = -1


class MissContent(NamedTuple):
    """What a file of misses holds: how often each was counted."""

    tokenizer: str
    counts: Mapping[Miss, int]
    made_by: str = ""

"""Groups of samples, outputs, and choices that depend on a key alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
#: Samples of a prompt.
NUM_SAMPLES = 5


class Group(NamedTuple):
    """What `RecipePack.observe` learns from: one prompt and its samples."""

    task: str
    prompt: str
    samples: tuple[str, ...]


class Output(NamedTuple):
    """What is replayed: one prompt and what the model writes."""

    task: str
    prompt: str
    output: str


class Task(NamedTuple):
    """The data of one task."""

    groups: list[Group]
    outputs: list[Output]


def number_of(*key: object) -> int:
    """A number in ``[0, 2**64)`` that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def choice(options: Sequence[T], *key: object) -> T:
    """One of `options`."""
    return options[number_of(*key) % len(options)]


def happens(probability: float, *key: object) -> bool:
    """True for a share of the keys."""
    return number_of(*key) < probability * 2**64


def shuffled(items: Iterable[T], *key: object) -> list[T]:
    """`items` in an order that depends on the key and on their representation alone."""
    return sorted(items, key=lambda item: (number_of(*key, item), repr(item)))


def fives(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Consecutive groups of `NUM_SAMPLES`; what is left over is dropped."""
    for begin in range(0, len(items) - NUM_SAMPLES + 1, NUM_SAMPLES):
        yield tuple(items[begin : begin + NUM_SAMPLES])

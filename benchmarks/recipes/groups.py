"""Groups of samples, outputs, and choices that depend on a key alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

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


#: Shares of records with two keys swapped, and with other whitespace.
REORDERED, RESPACED = 0.03, 0.03


def rendered(record: dict[str, Any], *key: object) -> str:
    """`record` with two spaces of indentation; a few, by their key, with swapped keys or other whitespace."""
    if happens(REORDERED, "reorder", key):
        record = _swapped(record, *key)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    if happens(RESPACED, "respace", key):
        text = _respaced(record, text, *key)
    return text + "\n"


def _swapped(record: dict[str, Any], *key: object) -> dict[str, Any]:
    """Two neighbouring keys in the other order, at the top or one level below."""
    inner = [name for name, value in record.items() if isinstance(value, dict) and len(value) > 1]
    if inner and happens(0.5, "level", key):
        name = choice(inner, "object", key)
        return {**record, name: _swapped_here(record[name], *key)}
    return _swapped_here(record, *key)


def _swapped_here(record: dict[str, Any], *key: object) -> dict[str, Any]:
    names = list(record)
    at = number_of("swap", key) % (len(names) - 1)
    names[at], names[at + 1] = names[at + 1], names[at]
    return {name: record[name] for name in names}


def _respaced(record: dict[str, Any], text: str, *key: object) -> str:
    style = number_of("style", key) % 3
    if style == 0:
        return json.dumps(record, indent=4, ensure_ascii=False)
    if style == 1:
        return json.dumps(record, ensure_ascii=False)
    lines = text.split("\n")
    at = 1 + number_of("line", key) % max(len(lines) - 2, 1)
    return "\n".join([*lines[:at], "", *lines[at:]])

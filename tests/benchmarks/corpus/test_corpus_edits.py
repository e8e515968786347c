"""Edits made for the corpus: each is of its kind, and the same seed gives the same edit."""

from __future__ import annotations

import random

import pytest

from benchmarks.corpus.edits import EDITS
from benchmarks.corpus.files import Edit
from benchmarks.corpus.mix import synthetic_pairs

TEXT = "".join(
    f"def function_{i}(argument):\n    value = argument + {i}\n    return compute(value, {i})\n\n"
    for i in range(20)
)
DONOR = "".join(f"class Holder{i}:\n    limit = {i}\n    name = 'holder'\n\n" for i in range(20))


def edited(kind: str, seed: int) -> str:
    """The first edit that changes something, counting up from a seed: one in many comes to nothing."""
    found = (EDITS[kind](TEXT, DONOR, random.Random(1000 * seed + i)) for i in range(5))
    return next(after for after in found if after is not None)


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_repeats_and_changes_something(kind: str) -> None:
    for seed in range(20):
        assert edited(kind, seed) == edited(kind, seed) != TEXT
    assert len({edited(kind, seed) for seed in range(20)}) > 5


def texts() -> list[Edit]:
    sorts = ("python", "document", "json", "config", "sql")
    return [
        Edit(
            f"{package}/{sort}/{i}", sort, sort, package, TEXT, f"{package} {i}\n{(DONOR, TEXT)[i % 2]}", 900
        )
        for package in ("a", "b")
        for sort in sorts
        for i in range(6)
    ]


def test_the_mix_has_every_kind_and_repeats() -> None:
    made = synthetic_pairs(texts(), "test")
    assert {edit.kind for edit in made} == {*EDITS, "unrelated", "state"}
    assert made == synthetic_pairs(list(reversed(texts())), "test")
    assert len({edit.id for edit in made}) == len(made)
    after = {text.after: text.package for text in texts()}
    for edit in made:
        if edit.kind == "unrelated":
            assert after[edit.before] != after[edit.after]

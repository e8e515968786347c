"""Edits made for the corpus: each is of its kind, and the same seed gives the same edit."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.corpus.edits import EDITS, one_line_edit
from benchmarks.corpus.files import Edit
from benchmarks.corpus.mix import ByteTokenizer, other_tokens, synthetic_pairs, trained_bpe
from benchmarks.corpus.states import state_pair

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


def lines_in_common(after: str) -> float:
    before, new = Counter(TEXT.splitlines()), Counter(after.splitlines())
    return sum((before & new).values()) / sum(before.values())


def test_what_each_kind_leaves() -> None:
    for seed in range(20):
        assert lines_in_common(edited("near_verbatim", seed)) > 0.9
        assert 0.1 < lines_in_common(edited("heavy_rewrite", seed)) < 0.85
        moved = edited("moved_blocks", seed)
        assert sorted(moved.split("\n\n")) == sorted(TEXT.split("\n\n")) or lines_in_common(moved) == 1
        grown = edited("large_insertions", seed)
        assert lines_in_common(grown) == 1
        assert len(grown.splitlines()) >= len(TEXT.splitlines()) + 15
        renamed = edited("rename", seed)
        assert len(renamed.splitlines()) == len(TEXT.splitlines())
        gone = {w for w in ("argument", "value", "compute") if w not in renamed.replace("_", " ").split()}
        assert len(gone) <= 3


def test_a_text_without_room_for_an_edit() -> None:
    assert EDITS["moved_blocks"]("one block\n", DONOR, random.Random(1)) is None
    assert EDITS["rename"]("a b c\n", DONOR, random.Random(1)) is None
    assert one_line_edit("\n\n", DONOR, random.Random(1)) is None


def test_one_line_edits_change_one_line() -> None:
    for seed in range(30):
        after = one_line_edit(TEXT, DONOR, random.Random(seed))
        assert after is not None
        changed = [a != b for a, b in zip(TEXT.splitlines(), after.splitlines(), strict=True)]
        assert sum(changed) == 1


@pytest.mark.parametrize("form", ["json", "json_compact"])
def test_states_are_json(form: str) -> None:
    before, after = state_pair(form, random.Random(3))
    old, new = json.loads(before), json.loads(after)
    assert new["version"] == old["version"] + 1
    assert sum(task in old["tasks"] for task in new["tasks"]) >= len(new["tasks"]) - 6


def test_states_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    as_yaml, _ = state_pair("yaml", random.Random(3))
    as_json, _ = state_pair("json", random.Random(3))
    expected, found = json.loads(as_json), yaml.load(as_yaml, yaml.BaseLoader)
    assert [task["title"] for task in found["tasks"]] == [task["title"] for task in expected["tasks"]]
    assert found["settings"]["regions"] == expected["settings"]["regions"]
    with pytest.raises(ValueError, match="form"):
        state_pair("toml", random.Random(3))


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


def test_other_tokenizers(tmp_path: Path) -> None:
    found = {
        name: (encode, edits)
        for name, encode, edits in other_tokens(texts(), "test", [TEXT, DONOR], tmp_path)
    }
    assert set(found) == {"bpe", "bytes"}
    assert all(edits for _, edits in found.values())
    assert found["bytes"][0]("é\n") == [0xC3, 0xA9, 10]
    assert ByteTokenizer().token_bytes(10) == b"\n"


def test_the_trained_tokenizer_repeats(tmp_path: Path) -> None:
    first = trained_bpe([TEXT, DONOR], tmp_path / "a", vocab_size=400)
    second = trained_bpe([DONOR, TEXT], tmp_path / "b", vocab_size=400)
    assert first.encode(TEXT) == second.encode(TEXT)
    assert len(first.encode(TEXT)) < len(TEXT) / 2
    assert b"".join(first.token_bytes(token) for token in first.encode(TEXT)) == TEXT.encode()

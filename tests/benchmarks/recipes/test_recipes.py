"""Recipe tasks and their measurement: data by hashes alone, structure, tables, and a small run of each part."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("mistral_common")

from benchmarks import tables
from benchmarks.recipes import page, tasks
from benchmarks.recipes.groups import Group, Output, Task, choice, happens, number_of, shuffled
from benchmarks.recipes.main import learn
from benchmarks.recipes.packages import CLIENTS, CODE
from benchmarks.recipes.runs import counts_of, encode, merged, ours, records_of, token_texts

CITIES = ["Lima", "Quito", "Bern", "Rome", "Oslo", "Cork", "Graz", "Lyon", "Bath", "York", "Kyiv"]


def record(city: str, number: int) -> str:
    return json.dumps({"type": "city", "name": city, "people": number}, indent=2) + "\n"


def small_task() -> Task:
    texts = [record(city, number_of(city) % 1_000) for city in CITIES]
    return Task(
        [Group("city", "As JSON.\n", tuple(texts[:5])), Group("city", "As JSON.\n", tuple(texts[5:10]))],
        [Output("city", "As JSON.\n", text) for text in (texts[10], texts[10].replace("people", "souls"))],
    )


def test_choices_depend_on_the_key_alone() -> None:
    # These may never change: what is learned from and what is replayed would.
    assert number_of("a", 1) == 4_115_538_386_074_285_390
    assert choice("abc", "key") == "abc"[number_of("key") % 3]
    assert shuffled(["x", "y", "z"], 1) == shuffled(["z", "x", "y"], 1)
    assert sum(happens(0.03, n) for n in range(10_000)) == pytest.approx(300, abs=60)


def test_no_package_is_learned_from_and_replayed() -> None:
    for sides in (CODE, CLIENTS):
        train, test = ({package.name for package in sides[split]} for split in ("train", "test"))
        assert train
        assert test
        assert train.isdisjoint(test)


def test_a_pack_saves_steps_and_is_merged_with_the_misses_of_other_outputs() -> None:
    task = small_task()
    pack = learn("city", task)
    records = records_of(task.outputs)
    recipes = pack.tokenize(encode, token_texts)
    with_pack, without = (counts_of(ours(r)(records)) for r in (recipes, None))
    assert with_pack["steps"] < without["steps"]
    assert with_pack["accepted_from"]["recipe"] > 0
    found = merged(pack, task.outputs)
    assert counts_of(ours(recipes, alone=True)(records))["steps"] == found["learned"]["steps"]
    assert with_pack["rejected"] == sum(with_pack["rejected_from"].values()) > 0
    # Only the second output refutes a token, and only the first is replayed with what it taught.
    assert found["learned"]["rejected"] == found["merged"]["rejected"] == 1
    assert found["entries"][0] == len(pack.observed)


def test_the_page_is_made_from_the_results() -> None:
    found: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    text = page.PAGE.read_text(encoding="utf-8")
    assert tables.fill(text, page.BLOCKS, found) == text, "run: python -m benchmarks.recipes --write"
    assert list(found["tasks"]) == list(tasks.TASKS)
    assert list(found["memory"]) == list(page.CASES)
    assert all(block(found).startswith("| ") for block in page.PRINTED.values())
    with pytest.raises(ValueError, match="tasks:begin"):
        tables.fill("no markers", page.BLOCKS, found)

"""Recipe tasks and their measurement: data by hashes alone, structure, tables, and a small run of each part."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("mistral_common")

from benchmarks.quality.runs import Entry
from benchmarks.recipes import (
    changelogs,
    maths,
    memory,
    page,
    python_client,
    python_code,
    reference_pages,
    tasks,
    triage,
)
from benchmarks.recipes.groups import (
    Group,
    Output,
    Task,
    choice,
    happens,
    number_of,
    rendered,
    shuffled,
)
from benchmarks.recipes.main import learn, structure_of
from benchmarks.recipes.packages import CLIENTS, CODE, Package, Shelf
from benchmarks.recipes.runs import (
    counts_of,
    encode,
    merged,
    ours,
    records_of,
    structural_tokens,
    token_texts,
)
from gpu_align.simulate import Record

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


def test_noise_is_rare_and_keeps_the_record() -> None:
    plain = {"a": 1, "b": {"c": None, "d": [1, 2]}, "e": "x"}
    texts = [rendered(plain, n) for n in range(1_000)]
    assert {json.dumps(json.loads(text), sort_keys=True) for text in texts} == {
        json.dumps(plain, sort_keys=True)
    }
    usual = json.dumps(plain, indent=2) + "\n"
    assert 0.9 < sum(text == usual for text in texts) / len(texts) < 0.98


@pytest.mark.parametrize(
    ("text", "free"),
    [("if x:\n    return 1\n", "x1"), ("def f(a, *b): pass\n", "fab"), ("y = 'no'  # why\n", "y'no'# why")],
)
def test_structure_is_what_is_no_name_number_string_or_comment(text: str, free: str) -> None:
    structural = structural_tokens(text, [c.encode() for c in text])
    found = "".join(c for c, s in zip(text, structural.tolist(), strict=True) if not s)
    assert found == free


def test_a_token_is_structural_if_all_of_it_is() -> None:
    pieces = [b"def", b" f", b"(x", b"):", b"\n"]
    assert structural_tokens("def f(x):\n", pieces).tolist() == [True, False, False, True, True]
    with pytest.raises(ValueError, match="token_bytes"):
        structural_tokens("def f(x):\n", pieces[:2])
    assert not structural_tokens("no ' python", [b"no ' python"]).any()


@pytest.mark.parametrize(
    "text",
    [
        "Add.\n\nArgs:\n    x: the first,\n        or so.\nReturns:\n    The sum.\nRaises:\n    ValueError: no.",
        "Add.\n\n:param int x: the first,\n    or so.\n:returns: The sum.\n:raises ValueError: no.",
    ],
)
def test_docstrings_of_both_styles(text: str) -> None:
    doc = reference_pages.doc_of(text)
    assert doc == ("Add.", {"x": "the first, or so."}, "The sum.", {"ValueError": "no."})
    node = ast.parse("def add(x: int, y=2) -> int: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    shown = reference_pages.page_of(python_code.Function("m", "add", "", "", node), doc)
    assert "| `x` | `int` | required | the first, or so. |" in shown
    assert "| `y` | any | `2` | – |" in shown


CLIENT = """
class Client:
    def get_queue(self, request=None, *, name=None):
        return send(request or Get(name), {padding!r})

    def list_queues(self, request=None):
        return send(request or List(), {padding!r})

    def get_iam(self, request: iam_policy_pb2.Get):
        return send(request, {padding!r})

    def parse_path(path):
        return match(path, {padding!r})
"""


class _Clients(Shelf):
    """Packages of one client each; of the second one there are two versions of the service."""

    def __init__(self) -> None:
        pass

    def texts(self, package: Package, sort: str) -> dict[str, str]:
        text = CLIENT.format(padding=f"{package.name} " * 40)
        versions = ("v1", "v1beta1") if package.name.endswith("scheduler") else ("v1",)
        return {f"g/{version}/services/s/client.py": text for version in versions}


def test_methods_of_a_client_are_asked_for_by_kind() -> None:
    found = [(m.name, m.module) for m in python_client.methods(_Clients(), Package("scheduler", "1"))]
    assert found == [(name, "g.v1.services.s.client") for name in ("get_queue", "list_queues")]
    task = python_client.task(_Clients())
    prompts = {group.prompt for group in task.groups}
    assert len(prompts) == 2
    assert {output.prompt for output in task.outputs} == prompts
    known = {sample for group in task.groups for sample in group.samples}
    assert known.isdisjoint(output.output for output in task.outputs)
    assert {len(group.samples) for group in task.groups} == {5}
    assert all("iam" not in sample and "parse_path" not in sample for sample in known)


def test_no_package_is_learned_from_and_replayed() -> None:
    for sides in (CODE, CLIENTS):
        train, test = ({package.name for package in sides[split]} for split in ("train", "test"))
        assert train
        assert test
        assert train.isdisjoint(test)


def test_triage_is_decided_by_the_summary() -> None:
    found = triage.record_of("Fix a crash")
    assert found == triage.record_of("Fix a crash")
    team = triage.CATEGORIES[found["classification"]["category"]][0]
    assert found["next_action"]["assignee"] == team


def test_sums_of_a_group_answer_one_prompt_in_other_words() -> None:
    trio = (("A", 100), ("B", 202), ("C", 301))
    texts = [maths.solved(trio, maths.PEOPLE, number) for number in range(5)]
    assert len(set(texts)) > 1
    assert len({text.split()[-2] for text in texts}) == 1  # the answer
    for line in texts[0].replace(",", "").splitlines():
        if "=" in line:
            left, right = line.rstrip(".").split(": ")[-1].split(" = ")
            assert int(eval(left)) == int(right)


def test_links_are_taken_out_of_prose() -> None:
    assert (
        changelogs._unlinked("Fix `#12 <https://x.y/12>`_, see [docs](https://x.y).") == "Fix #12, see docs."
    )


def test_files_of_a_task_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = (tasks.write("city", small_task(), tmp_path / name) for name in "ab")
    assert list(first.values()) == list(second.values())
    assert tasks.read("city", tmp_path / "a") == small_task()


def test_a_pack_saves_steps_and_is_merged_with_the_misses_of_other_outputs() -> None:
    task = small_task()
    pack = learn("city", task)
    records = records_of(task.outputs)
    recipes = pack.tokenize(encode, token_texts)
    with_pack, without = (counts_of(ours(r)(records)) for r in (recipes, None))
    assert with_pack["steps"] < without["steps"]
    assert with_pack["accepted_from"]["recipe"] > 0
    found = merged(pack, task.outputs)
    alone = ours(recipes, alone=True)(records)
    assert counts_of(alone)["steps"] == found["learned"]["steps"]
    assert with_pack["rejected"] == sum(with_pack["rejected_from"].values()) > 0
    # Only the second output refutes a token, and only the first is replayed with what it taught.
    assert found["learned"]["rejected"] == found["merged"]["rejected"] == 1
    assert sum(refuted for _, refuted in found["evidence"].values()) == 1
    assert found["entries"][0] == len(pack.observed)
    parts = structure_of(records, alone)
    assert (
        parts["structural"]["tokens"] + parts["free"]["tokens"]
        == parts["tokens"]
        == sum(len(r.output) for r in records)
    )


def entries() -> list[Entry]:
    found = []
    for number in range(4):
        rng = np.random.default_rng(number // 2)
        old = rng.integers(1, 900, 300).tolist()
        new = [*old[:100], 901 + number, *old[100:]]
        kind, package = ("python", "a") if number < 2 else ("document", "b")
        record = Record(str(number), [], old, new, "tekken")
        found.append(Entry(record, kind, kind, package, "test", "tekken"))
    return found


def test_what_is_remembered() -> None:
    files = entries()
    cases = {case.name: case for case in (memory.next_version(files), memory.written("same_package", files))}
    for entry, recalled in zip(entries(), cases["next_version"].recalled, strict=True):
        assert _holds(recalled.token_ids, entry.record.prediction)
    for entry, recalled in zip(entries(), cases["same_package"].recalled, strict=True):
        assert not _holds(recalled.token_ids, entry.record.output)
        assert recalled.related
    for alike in (False, True):
        for entry, recalled in zip(
            entries(), memory.written("unrelated", entries(), alike).recalled, strict=True
        ):
            others = [e for e in entries() if e.package != entry.package]
            assert all(_holds(recalled.token_ids, other.record.output) for other in others)
            assert recalled.related == alike
    for entry, recalled in zip(entries(), memory.written("all_packages", entries()).recalled, strict=True):
        package = [e.record.output for e in entries() if e.package == entry.package]
        assert recalled.related
        assert recalled.token_ids.tolist() in package


def test_a_prompt_of_a_file_says_nothing_of_its_content() -> None:
    prompts = memory._prompts(entries())
    assert "".join(token_texts(prompts["1"])) == "Package: a\nFiles:\n- 0\n- 1\n\nWrite the file 1.\n"


def test_memory_of_the_earlier_version_is_worth_the_prediction() -> None:
    case = memory.next_version(entries())
    found = memory.replayed(case, 16, None)
    assert found["memory"]["steps"] < 0.3 * found["without"]["steps"]
    assert found["memory"]["accepted_from"].keys() == {"memory"}
    assert found["prediction"]["accepted_from"].keys() == {"prediction"}


def test_records_of_one_form_remember_those_before() -> None:
    outputs = [Output("city", "", record(city, 7)) for city in CITIES[:3]]
    case = memory.one_form("form", outputs)
    lengths = [len(recalled.token_ids) for recalled in case.recalled]
    assert lengths == [0, *accumulate(len(r.output) for r in case.records[:-1])]


def _holds(text: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def test_the_page_is_made_from_the_results() -> None:
    found: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.fill(text, found) == text, "run: python -m benchmarks.recipes --write"
    assert list(found["tasks"]) == list(tasks.TASKS)
    assert list(found["memory"]) == list(page.CASES)
    with pytest.raises(ValueError, match="checks:begin"):
        page.fill("no markers", found)

"""Readers of made-up collections, the forms of an edit and their inverses, and the command on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("mistral_common")

from benchmarks import tables
from benchmarks.agents import readers
from benchmarks.agents.forms import WRITE, Exchange, exchanges, hunks, numbered
from benchmarks.agents.main import ROWS, TOKENIZER, Row, knowledge, main, measure, records_of
from benchmarks.agents.readers import HALVES, LAST_OBSERVATIONS, Change, Edit, Message
from gpu_align import views
from gpu_align.simulate import load_tokenizer

BEFORE = "\n".join(f'def step_{n}():\n    return "{n}"\n' for n in range(8))
AFTER = BEFORE.replace('return "5"', 'return "five"')


def listing(text: str) -> str:
    lines = text.splitlines()
    body = "".join(f"{n}:{line}\n" for n, line in enumerate(lines, 1))
    return f"[File: /repo/steps.py ({len(lines)} lines total)]\n{body}(Open file: /repo/steps.py)\nbash-$"


def trajectory(edit: str) -> dict[str, object]:
    said = [
        ("system", "You edit."), ("user", "ISSUE: spell five out."),
        ("assistant", "I look.\n\n```\nls\n```"), ("user", "steps.py"),
        *((role, text) for n in range(LAST_OBSERVATIONS)
          for role, text in (("assistant", f"Look {n}.\n```\nls {n}\n```"), ("user", f"seen {n}\nand more"))),
        ("assistant", "Open it.\n\n```\nopen steps.py\n```"), ("user", listing(BEFORE)),
        ("assistant", f"I change it.\n\n```\n{edit}```"), ("user", "done"),
        ("assistant", f"I change it.\n\n```\n{edit}```"),
    ]  # fmt: skip
    return {"history": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture
def collections(tmp_path: Path) -> Path:
    """The formats but aider's, with tasks in both halves."""
    for n in range(4):
        path = tmp_path / "results" / f"task-{n}.traj"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(trajectory('edit 17:17\n    return "five"\nend_of_edit\n')))
        patch = tmp_path / f"task-{n}_2024-01-02_03" / "debug_agent_write_patch_1.json"
        patch.parent.mkdir()
        change = "<file>steps.py</file>\n<original>\nx = 1\n</original>\n<patched>\nx = 2\n</patched>"
        told = [{"role": "user", "content": f"Here is the code:\n<code>{BEFORE}</code>"},
                {"role": "assistant", "content": f"So.\n\n# modification 1\n```\n{change}\n```"}]  # fmt: skip
        patch.write_text(json.dumps(told))
    tasks = tmp_path / "CanItEdit" / "test.jsonl"
    tasks.parent.mkdir()
    fields = {"name": "steps", "before": BEFORE, "after": AFTER, "instruction_descriptive": "Spell five out."}
    tasks.write_text("".join(json.dumps({**fields, "full_name": f"{n}_steps"}) + "\n" for n in range(8)))
    asked = tmp_path / "spec_bench" / "question.jsonl"
    asked.parent.mkdir()
    kinds = {"translation": ["Hello."], "writing": ["No answer."]}
    asked.write_text("".join(json.dumps({"question_id": number, "category": kind, "turns": ["Hallo."],
                                         "reference": answer}) + "\n"
                             for number in range(8) for kind, answer in kinds.items()))  # fmt: skip
    return tmp_path


def test_a_trajectory_gives_its_edit_once_with_the_lines_that_were_shown(collections: Path) -> None:
    *_, last = (edit for edit in readers.trajectories(collections) if edit.name == "task-0")
    assert (last.call, last.said) == ((17, 17, '    return "five"\n'), "I change it.")
    assert last.changes == (Change("repo/steps.py", BEFORE, AFTER),)
    # Of the observations before the last five there is a number of lines; its own answers stay.
    said = [("I look.\n\n```\nls\n```", False), ("Old output omitted (1 lines)", True),
            ("Look 0.\n```\nls 0\n```", False), ("Old output omitted (2 lines)", True)]  # fmt: skip
    assert last.shown[1:6] == (("ISSUE: spell five out.", False), *said)


def test_a_task_is_in_one_half_of_all_collections(collections: Path) -> None:
    halves = {half: readers.read([collections], half, 99, 0) for half in HALVES}
    names = {half: {e.name for edits in found.values() for e in edits} for half, found in halves.items()}
    assert not names["seen"] & names["held-out"]
    assert len(names["seen"] | names["held-out"]) == 20
    [question] = {edit[2:6] for found in halves.values() for edit in found["Spec-Bench, no edit"]}
    assert question == ((("Hallo.", False),), "Hello.", "Hello.", ())
    few = readers.read([collections], "seen", 2, 0)
    assert all(len(edits) == 2 for edits in few.values())
    assert few == {name: edits[:2] for name, edits in halves["seen"].items()}


LINES = ("tool call", "only the call")
EDIT = Edit("c", "n", (Message("Spell five out."),), "I will.", "", (Change("a.py", BEFORE, AFTER),), BEFORE)


def test_old_and_new_text_of_the_forms_make_the_file() -> None:
    answers = {written: x.answer for (_, written), x in exchanges(EDIT).items()}
    assert set(answers) == set(WRITE) - {
        "as written",
        "thoughts",
        *(f"edit by lines, {end}" for end in LINES),
    }
    call = json.loads(answers["old and new text, tool call"].partition("\n\n")[2])["arguments"]
    assert BEFORE.count(call["old_str"]) == 1
    assert BEFORE.replace(call["old_str"], call["new_str"]) == AFTER
    block = answers["SEARCH/REPLACE"].split("\n", 4)[4]
    old, new = block.split("<<<<<<< SEARCH\n")[1].split(">>>>>>> REPLACE")[0].split("=======\n")
    assert BEFORE.replace(old, new) == AFTER
    [(body, old, new)] = hunks(EDIT.changes[0])
    assert [line[0] for line in body.splitlines()].count("-") == 1
    assert BEFORE.replace(old, new) == AFTER
    patch = json.loads(answers["apply_patch, tool call"].partition("\n\n")[2])["arguments"]["input"]
    assert patch in answers["apply_patch"]
    assert body in patch
    assert body in answers["unified diff"]
    content = json.loads(answers["whole file, tool call"].partition("\n\n")[2])["arguments"]["content"]
    assert content == AFTER
    assert f"```\n{AFTER}```" in answers["whole file"]


def test_the_files_are_shown_so_that_their_views_are_the_file() -> None:
    shown = {read: x.messages[-1].text for (read, _), x in exchanges(EDIT).items()}
    assert views.make(numbered(BEFORE), ["unnumbered"]) == [BEFORE]
    assert views.make(shown["numbered"], ["unnumbered"]) == [BEFORE]
    assert views.make(shown["JSON"], ["unescaped"]) == [BEFORE]
    assert views.make(shown["raw"], ["unfenced"]) == [BEFORE]


def test_the_command(collections: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([str(collections), "--edits", "1", "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    cases = {(c["collection"], c["read"], c["written"]): c["rows"] for c in results["cases"]}
    rows = cases["CanItEdit", "numbered", "whole file, tool call"]
    assert rows["gpu_align, views"]["steps"] < rows["gpu_align"]["steps"]
    tokens = {counts["output_tokens"] for counts in rows.values()}
    assert len(tokens) == 1
    assert BEFORE.splitlines()[0] not in out.read_text()
    assert "| CanItEdit | numbered | whole file, tool call | 1 |" in capsys.readouterr().out
    only = ("--written", "whole file, tool call")
    assert main([str(collections), "--edits", "1", "--bound", *only, "--json", str(out)]) == 0
    bounds = {
        (c["collection"], c["read"], c["written"]): c["rows"] for c in json.loads(out.read_text())["cases"]
    }
    assert {written for _, _, written in bounds} == {"whole file, tool call"}
    best = bounds["CanItEdit", "numbered", "whole file, tool call"]["bound, views"]
    assert (best["rejected"], best["output_tokens"]) == (0, *tokens)
    assert best["steps"] < bounds["CanItEdit", "numbered", "whole file, tool call"]["bound"]["steps"]
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])


def test_answers_of_other_tasks_are_learned_from() -> None:
    encode = load_tokenizer(TOKENIZER).encode
    answers = [Exchange((), "Let me relocate vermilion lanterns.", False, task) for task in "abcd"]
    known = knowledge(answers[1:], encode)
    steps = [
        measure(Row("gpu_align", True, it), records_of(answers[:1], encode), known).steps
        for it in (True, False)
    ]
    assert steps[0] < steps[1]


def test_the_stored_results_are_of_the_half_that_was_held_out() -> None:
    results = tables.read("agents")
    assert results["half"] == "held-out"
    for each in results["cases"]:
        assert {row.name for row in ROWS} == set(each["rows"])
        assert len({counts["output_tokens"] for counts in each["rows"].values()}) == 1

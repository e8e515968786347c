"""Step logs: their layout stays, what is written is read with care, and `gpu-align report` shows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("yaml")
pytest.importorskip("typer")
import yaml

from gpu_align import Source
from gpu_align.drafter.step_log import (
    MAX_PREFIX,
    SOURCES,
    Line,
    Step,
    StepLog,
    StepLogError,
    Texts,
    dump,
    read_step_log,
)
from gpu_align.tools import report
from gpu_align.tools.html import Origin
from tests.modules import command

#: A file as the plugin writes it.
FILE = Path(__file__).with_name("step_log.yaml")

PIECES = {0: "\0", 1: "a", 2: " b", 3: " c", 4: " d", 5: "\n", 6: "é", 7: "x", 8: "?", 9: "!"}


def candidate(source: str) -> dict[str, Any]:
    why = "it continues what was copied: ‘é’"
    return {"source": source, "position": 1, "matched": 4, "expected": 2.5, "why": why}


STEPS = [
    Step(0, 5, "none", [], [], 0, 0, 0, [1], 0, 1, None, 0),
    Step(
        1, 6, "prediction", [2, 3, 4], [0.9, 0.8125, 0.7], 12, 3, 2, [2, 3, 9], 1, 3, candidate("prediction"), 2
    ),
    Step(2, 9, "recipe", [6, 0], [1.0, 0.25], 1234, 2, 2, [6, 0, 5], 3, 4, candidate("recipe"), 1),
]  # fmt: skip
LOG = StepLog("chatcmpl-1", 8, 5, 4, STEPS, prediction_lines=[Line([1, 2, 5, 4])])


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def test_a_written_file_is_byte_for_byte_the_same() -> None:
    assert dump(LOG.with_texts(decode, [8] * 5)) == FILE.read_text(encoding="utf-8")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(dump(LOG), encoding="utf-8")
    assert read_step_log(tmp_path / "bare.yaml") == LOG
    assert read_step_log(FILE) == LOG.with_texts(decode, [8] * 5)
    assert [*(source.name.lower() for source in Source), "draft_model"] == list(SOURCES)
    assert read_step_log(FILE).usage() == yaml.safe_load(FILE.read_text(encoding="utf-8"))["usage"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=400),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.data(),
)
def test_lines_are_those_of_the_text_however_it_is_cut_into_steps(
    tokens: list[int], widths: list[int], data: st.DataObject
) -> None:
    texts, at, lines = Texts(decode, [5, 8]), 0, []
    while at < len(tokens):
        new = tokens[at : at + data.draw(st.sampled_from(widths))]
        step = texts.of(Step(at, 5 + at, "none", [], [], 0, 0, 0, new))
        at += len(new)
        assert step.new_lines is not None
        assert step.prefix is not None
        lines += step.new_lines
        done = max((i + 1 for i, token in enumerate(tokens[:at]) if token == 5), default=0)
        assert [token for line in lines for token in line.tokens] == tokens[:done]
        assert step.prefix.tokens == tokens[done:at][-MAX_PREFIX:]
        assert step.prefix.text == decode(step.prefix.tokens)
    assert [line.text for line in lines] == decode(tokens).splitlines(keepends=True)[: tokens.count(5)]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    step = replace(STEPS[1], own_text=text, new_lines=[Line([1], text)], prefix=Line([], text))
    written = dump(replace(LOG, steps=[step]))
    (read,) = yaml.safe_load(written)["steps"]
    assert read["own_text"] == read["new_lines"][0]["text"] == read["prefix"]["text"] == text


def written(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "log.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


def test_the_table_and_the_page_show_every_step(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    document = changed("steps.1.candidate.why", "because <b>")
    document["steps"].insert(1, {**document["steps"][0], "own_text": " <x>"})
    result = command("report", written(tmp_path, document), "--html", page)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    for words in (
        "8 tokens in 4 steps, 2.0 a step; 4 drafts accepted, 1 rejected",
        "1 3 prediction 3 3 2 1 → 3 12 because <b> (expected 2.5)",
    ):  # fmt: skip
        assert words in told
    text = page.read_text()
    assert f'<span class="o o{Origin.PREDICTION:d}" title="step 3"> b c</span>' in text
    assert "a &lt;x&gt;</span>" in text  # the model's own tokens of neighbouring steps share a colour
    assert "<b>" not in text


def changed(path: str, value: Any) -> dict[str, Any]:
    """The file, with another value in one place."""
    whole = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    target: Any = whole
    *way, last = path.split(".")
    for name in way:
        target = target[int(name) if name.isdigit() else name]
    if value is KeyError:
        del target[last]
    else:
        target[int(last) if last.isdigit() else last] = value
    return whole


#: File → the place that the error names.
REFUSED: list[tuple[Any, str]] = [
    ("", "expected an object"), ("just words", "expected an object"),
    ("a: [1, 2", "line 2, column 1: expected YAML"),
    ("a: &a [*a, *a]\nb: }", "expected YAML"), ("[" * 5000, "expected"),
    ("!!python/object/apply:os.getcwd []", "expected YAML"), ({"format": "gpu-align-steps/9"}, "format"),
    (changed("steps", KeyError), "steps"), (changed("steps.1.new", [2]), "steps[1]"),
    (changed("steps.1.verified", 4), "steps[1]"), (changed("steps.1.accepted", -1), "steps[1].accepted"),
    (changed("steps.1.source", "guess"), "steps[1].source"), (changed("prompt_tokens", True), "prompt_tokens"),
    (changed("prediction_lines", [{"tokens": [-1]}]), "prediction_lines[0].tokens[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "place"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, content: Any, place: str) -> None:
    with pytest.raises(StepLogError, match=re.escape(place)):
        read_step_log(written(tmp_path, content))


def step(new: int, source: str = "none", counts: tuple[int, int, int] = (0, 0, 0), why: str = "") -> Step:
    """counts: of tokens that were proposed, verified and accepted."""
    proposed, verified, accepted = counts
    reason = {**candidate(source), "why": why} if why else None
    return Step(
        0, 5, source, [7] * proposed, [0.5] * proposed, 0, verified, accepted, [7] * new, candidate=reason
    )


AT_2, AT_31 = "the last 2 tokens occur in the prediction", "the last 31 tokens occur in the prediction"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    (folder / "day").mkdir(parents=True)
    good = [step(1), step(5, "prediction", (4, 4, 4))]
    bad = [
        step(1), step(2, "prediction", (4, 4, 1), AT_2), step(1, "prediction", (4, 3, 0), AT_31),
        step(1, "context", (2, 2, 0)), step(1),
    ]  # fmt: skip
    for path, name, steps in (("a", "good", good), ("day/b", "bad", bad), ("c", "empty", [])):
        (folder / f"{path}.yaml").write_text(dump(StepLog(name, 4, 5, 4, steps)))
    (folder / "torn.yaml").write_text("format: gpu-align-steps/1\nsteps:\n")
    (folder / "notes.txt").write_text("not a log")
    return folder


def test_sums_sources_and_reasons(folder: Path) -> None:
    requests, _ = report.read_folder(folder)
    assert [request.file for request in requests] == ["a.yaml", "c.yaml", "day/b.yaml"]
    found = report.figures_of(requests, 10)
    assert found["by_source"] == {
        "prediction": {"steps": 3, "drafted": 11, "accepted": 5},
        "context": {"steps": 1, "drafted": 2, "accepted": 0},
    }
    assert list(found["by_source"]) == ["prediction", "context"]
    assert [tuple(loss.values()) for loss in found["losses"]] == [
        ("prediction", "the last N tokens occur in the prediction", 6, 2),
        ("context", report.UNKNOWN, 2, 1),
        ("prediction", report.NOT_VERIFIED, 1, 1),
    ]
    # Nothing is lost twice or forgotten: rejected, and proposed without being verified.
    assert sum(loss["tokens"] for loss in found["losses"]) == found["rejected"] + 1
    # The sums are those of the single reports.
    logs = [read_step_log(folder / request.file) for request in requests]
    for name in ("output_tokens", "accepted", "rejected"):
        assert found[name] == sum(getattr(log, name) for log in logs)
    # K = 4: a perfect prediction writes 6 tokens in 1 + 1 steps, and 6 in 2.
    worst = [(request["request_id"], request["steps_lost"]) for request in found["worst"]]
    assert worst == [("bad", 3), ("good", 0), ("empty", 0)]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    result = command("report", folder, "--json", out, "--html", page, "--top", 1)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("note: torn.yaml: ")
    assert "3 requests, 12 tokens in 7 steps, 1.7 a step; 5 drafts accepted, 8 rejected;" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["prediction", "3", "11", "5", "6", "45%"] in rows
    assert ["1", "4", "6", "5", "1.2", "3", "1", "8", "prediction:"] in [row[:9] for row in rows]
    found = json.loads(out.read_text())
    assert (found["requests"], found["accepted"], found["rejected"], found["steps_lost"]) == (3, 5, 8, 3)
    assert [request["request_id"] for request in found["worst"]] == ["bad"]
    assert (len(found["losses"]), [skipped["file"] for skipped in found["skipped"]]) == (1, ["torn.yaml"])
    text = page.read_text()
    assert "day/b.yaml" in text
    assert "the last N tokens occur in the prediction" in text


def test_a_file_has_json_too(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    assert command("report", folder / "a.yaml", "--json", out).exit_code == 0
    found = json.loads(out.read_text())
    assert (found["request_id"], found["steps"], found["accepted"]) == ("good", 2, 4)
    assert found["by_source"] == {"prediction": {"drafted": 4, "accepted": 4}}

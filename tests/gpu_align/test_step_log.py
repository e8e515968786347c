"""The step log's file: its keys, their order and its layout stay, and what is written can be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import Source
from gpu_align.tools import report as step_report
from gpu_align.tools.step_log import (
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

#: A file as the plugin writes it, and as it wrote it before there were lines in it.
FILE, REVISION_1 = (Path(__file__).with_name(f"step_log{name}.yaml") for name in ("", "_revision_1"))

PIECES = {0: "\0", 1: "a", 2: " b", 3: " c", 4: " d", 5: "\n", 6: "é", 7: "x", 8: "?", 9: "!"}


def candidate(source: str) -> dict[str, Any]:
    why = "it continues what was copied: ‘é’"
    return {"source": source, "position": 1, "matched": 4, "expected": 2.5, "why": why}


STEPS = [
    Step(0, 5, "none", [], [], 0, 0, 0, [1], 0, 1, None, 0),
    Step(
        1, 6, "prediction", [2, 3, 4], [0.9, 0.8125, 0.7], 12, 3, 2, [2, 3, 9], 1, 3, candidate("prediction"), 2
    ),
    Step(2, 9, "none", [7], [0.5], 3, 0, 0, [5], 3, 3, candidate("context"), 0),
    Step(3, 10, "recipe", [6, 0], [1.0, 0.25], 1234, 2, 2, [6, 0], 3, 4, candidate("recipe"), 1),
]  # fmt: skip
LOG = StepLog("chatcmpl-1", 8, 5, 4, STEPS, prediction_lines=[Line([1, 2, 5, 4])])
TEXT_FIELDS = ("proposed_text", "accepted_text", "own_text", "new_lines", "prefix")


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def pairs(node: Any) -> Any:
    """A document with its keys in order."""
    if isinstance(node, dict):
        return [(key, pairs(value)) for key, value in node.items()]
    return list(map(pairs, node)) if isinstance(node, list) else node


def test_a_written_file_is_byte_for_byte_the_same() -> None:
    assert dump(LOG.with_texts(decode, [8] * 5)) == FILE.read_text(encoding="utf-8")


def test_a_file_without_texts_lacks_their_keys_and_no_others() -> None:
    whole = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for step in whole["steps"]:
        for name in TEXT_FIELDS:
            del step[name]
    whole["prediction_lines"] = [{"tokens": [1, 2, 5, 4]}]
    assert pairs(yaml.safe_load(dump(LOG))) == pairs(whole)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(dump(LOG), encoding="utf-8")
    assert read_step_log(tmp_path / "bare.yaml") == LOG
    assert read_step_log(FILE) == LOG.with_texts(decode, [8] * 5)
    assert [*(source.name.lower() for source in Source), "draft_model"] == list(SOURCES)
    assert read_step_log(FILE).usage() == yaml.safe_load(FILE.read_text(encoding="utf-8"))["usage"]


def test_a_file_of_the_first_revision_is_read_and_shown_as_before() -> None:
    """It lacks the lines, and nothing else is another."""
    old, new = read_step_log(REVISION_1), read_step_log(FILE)
    steps = [replace(step, new_lines=None, prefix=None) for step in new.steps]
    assert old == replace(new, steps=steps, prediction_lines=None)
    assert step_report.summary(old) == step_report.summary(new)
    assert step_report.table_rows(old.steps) == step_report.table_rows(new.steps)
    assert "Prediction" not in step_report.page(old)
    # Whoever has the tokenizer gets the lines of the output; those of the prediction are not in the file.
    assert old.with_texts(decode, [8] * 5) == replace(new, prediction_lines=None)


def test_a_field_of_a_later_revision_is_no_error(tmp_path: Path) -> None:
    later = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    later |= {"revision": 99, "more": 1}
    later["steps"][1]["more"] = 1
    (tmp_path / "later.yaml").write_text(yaml.safe_dump(later))
    assert read_step_log(tmp_path / "later.yaml") == read_step_log(FILE)


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


@pytest.mark.parametrize("length", [MAX_PREFIX - 1, MAX_PREFIX, MAX_PREFIX + 1, 3 * MAX_PREFIX])
def test_a_long_line_that_is_not_complete_is_shown_by_its_end(length: int) -> None:
    tokens = [1 + i % 3 for i in range(length)]
    prefix = Texts(decode).of(Step(0, 5, "none", [], [], 0, 0, 0, tokens)).prefix
    assert prefix == Line(tokens[-MAX_PREFIX:], decode(tokens[-MAX_PREFIX:]))


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    step = replace(STEPS[1], own_text=text, new_lines=[Line([1], text)], prefix=Line([], text))
    written = dump(replace(LOG, steps=[step]))
    (read,) = yaml.safe_load(written)["steps"]
    assert read["own_text"] == read["new_lines"][0]["text"] == read["prefix"]["text"] == text


@pytest.mark.parametrize("text", ["[" * 30_000, "{a: " * 30_000, "- " * 30_000])
def test_a_file_that_nests_too_deeply_is_refused(text: str, tmp_path: Path) -> None:
    """libyaml's recursion would end the process."""
    file = tmp_path / "deep.yaml"
    file.write_text(text)
    with pytest.raises(StepLogError, match=r"expected at most 50 levels|maximum nesting depth"):
        read_step_log(file)

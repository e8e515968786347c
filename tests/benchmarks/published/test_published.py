"""The published experiments: OpenAI's counts, the texts, the page beside its results, and the command, reduced."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("mistral_common")

from benchmarks import tables
from benchmarks.published import letters, lookup, page, pictures, texts
from benchmarks.published.main import main
from gpu_align.policies import OpenAI
from gpu_align.predictors import InputLookupTokenPredictor

STORED: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))


def test_the_long_text_is_that_of_two_letters() -> None:
    assert letters.letters_of(5) == letters.tokenize("abcde") == [0, 1, 2, 3, 4]
    assert letters.letters_of(58)[-6:] == letters.tokenize("babbbc")


@pytest.mark.parametrize("task", letters.TASKS, ids=lambda task: task.name)
def test_three_rules_give_every_published_count_and_the_published_one_the_short_ones(
    task: letters.Task,
) -> None:
    for rule in ("threshold_35", "delay_3", "55_letters_discard_delay_1"):
        assert letters.counts_of(task, letters.RULES[rule]) == task.published
    # Of the long drafts 2, 4 and 3 letters are left after the edit at 22 and 32 matching tokens.
    resumed = {"added": (23, 11), "missing": (25, 11), "replaced": (24, 11)}
    found = letters.counts_of(task)
    assert found == (task.published if task.size == letters.SHORT else resumed.get(task.kind, (55, 0)))


def test_delayed_drafts_begin_three_tokens_after_the_match() -> None:
    policy = OpenAI(resume_delay=3)
    policy.start([], list(range(100)), 64)
    policy.extend([0, 1, 99])
    for token in range(10, 45):
        assert policy.propose() == []
        policy.extend([token])
    assert policy.propose() == list(range(45, 61))


def test_a_divergence_within_the_delay_starts_the_wait_anew() -> None:
    policy = OpenAI(resume_after=4, resume_delay=2)
    policy.start([], list(range(50)), 64)
    policy.extend([99, 10, 11, 12, 13, 14, 99, 20, 21, 22, 23, 24])
    assert policy.propose() == []
    policy.extend([25])
    assert policy.propose() == list(range(26, 42))
    assert policy.rejected == 0


def test_no_position_rejects_more_than_a_lookahead() -> None:
    found = letters.bifurcations(40)
    assert max(max(row) for row in found["rejected"].values()) == found["most_rejected"] == 16
    for position in range(40):  # the rest of the lookahead that the position is in, 17 tokens apart
        left = 40 - position // 17 * 17
        assert found["rejected"]["for good"][position] == max(0, min(16, left) - position % 17)


def test_an_insertion_costs_a_step_a_token() -> None:
    found = letters.insertions([0, 2, 6], every=29)
    assert found["positions"] == [0, 29, 58]
    assert found["accepted"][0] == [55] * 3
    assert found["accepted"][1] == found["accepted"][2]
    assert [b - a for a, b in zip(found["steps"][1], found["steps"][2], strict=True)] == [4, 4, 4]
    assert all(ours <= steps for a, b in zip(found["our_steps"], found["steps"], strict=True)
               for ours, steps in zip(a, b, strict=True))  # fmt: skip


def test_texts() -> None:
    assert texts.without_stanza("a\nb\n\nc\n\nd\n", 1) == "a\nb\n\nd\n"
    assert texts.renamed("data = metadata(data)", "data", "orders") == "orders = metadata(orders)"
    assert texts.equal_lines("a\nb\n", "a\n\nc\na\nb\n") == 0.75
    for name in ("snake", "snake_multiplayer", "report", "report_helper"):
        compile(texts.read(name), name, "exec")


@pytest.mark.parametrize("in_one_block", [True, False])
@pytest.mark.parametrize("share", [0, 0.2, 1])
def test_a_share_of_the_lines_changes(share: float, in_one_block: bool) -> None:
    lines = texts.made_lines(random.Random(1), 50)
    changed = texts.changed(lines, share, in_one_block, random.Random(2))
    different = [n for n, (a, b) in enumerate(zip(lines, changed, strict=True)) if a != b]
    assert len(different) == share * 50
    assert not in_one_block or not different or different == list(range(different[0], different[-1] + 1))


def test_lookup_counts_validated_and_refuted_tokens() -> None:
    predictor = InputLookupTokenPredictor((2, 0), (1, 2))
    # 5 matches no pattern of two; after 5, 6 the draft is 7, 8, of which the model writes the first.
    assert lookup.run(predictor, [5, 6, 7, 8], [5, 6, 7, 9]) == {"steps": 3, "validated": 1, "refuted": 1}
    # A draft is cut where the output ends.
    assert lookup.run(predictor, [5, 6, 7, 8], [5, 6, 7]) == {"steps": 3, "validated": 1, "refuted": 0}


def test_the_page_is_made_from_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert tables.fill(text, page.BLOCKS, STORED) == text
    assert tables.as_json(STORED) == page.RESULTS.read_text(encoding="utf-8")


def test_the_pictures_have_no_background(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = pictures.draw_all(STORED, tmp_path)
    shown = re.findall(r"\]\(img/([^)]+)\)", page.PAGE.read_text(encoding="utf-8"))
    assert sorted(path.name for path in drawn) == sorted(shown)
    for path in drawn:
        root = ElementTree.parse(path).getroot()
        background = root.find(".//*[@id='patch_1']/*")
        assert background is not None
        assert "fill: none" in background.attrib["style"] or "opacity: 0" in background.attrib["style"]


def test_the_command_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "published.json"
    assert main(["--quick", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    for block in (*page.BLOCKS.values(), *page.MORE):
        assert block(found) in printed
    # What the reduced run has in common with the stored one.
    assert found["openai"]["tasks"] == STORED["openai"]["tasks"]
    assert found["openai"]["bifurcations"] == STORED["openai"]["bifurcations"]
    assert found["cascade"]["tasks"] == STORED["cascade"]["tasks"]
    assert found["node_llama_cpp"] == STORED["node_llama_cpp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--write"], "expected no --quick"),
        (["--json", "missing/out.json"], "no such folder: missing"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err

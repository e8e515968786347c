"""The published experiments: OpenAI's counts, the texts, the page beside its results, and the command, reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("mistral_common")

from benchmarks import tables
from benchmarks.published import letters, page
from benchmarks.published.main import main
from gpu_align.policies import OpenAI

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


def test_a_divergence_within_the_delay_starts_the_wait_anew() -> None:
    policy = OpenAI(resume_after=4, resume_delay=2)
    policy.start([], list(range(50)), 64)
    policy.extend([99, 10, 11, 12, 13, 14, 99, 20, 21, 22, 23, 24])
    assert policy.propose() == []
    policy.extend([25])
    assert policy.propose() == list(range(26, 42))


def test_the_page_is_made_from_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert tables.fill(text, page.BLOCKS, STORED) == text
    assert tables.as_json(STORED) == page.RESULTS.read_text(encoding="utf-8")


def test_the_command_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "published.json"
    assert main(["--quick", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    for block in page.BLOCKS.values():
        assert block(found) in printed
    # What the reduced run has in common with the stored one.
    assert found["openai"]["tasks"] == STORED["openai"]["tasks"]
    assert found["openai"]["bifurcations"] == STORED["openai"]["bifurcations"]
    assert found["cascade"]["tasks"] == STORED["cascade"]["tasks"]
    assert found["node_llama_cpp"] == STORED["node_llama_cpp"]

"""What bench is made of: where edits come from, predictions of outputs, near ties, and what `/metrics` counts."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
from gpu_align.tools.bench import client as module
from gpu_align.tools.bench.client import Alternatives, Client, Counts, is_near_tie
from gpu_align.tools.bench.data import (
    MAX_FILE_BYTES,
    Pair,
    edited,
    make_predictions,
    pair_of_files,
    pairs_from_git,
    read_pairs,
    resemblance,
    shipped_pairs,
    unrelated_text,
)
from gpu_align.tools.inputs import EditError

GOOD = {"id": "a", "instruction": "rename x", "before": "x = 1\n", "after": "y = 1\n"}


def test_pairs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(gzip.compress(line() + b"\n\n" + line(after=None, id=7, more=1)))
    first, second = read_pairs(path)
    assert (first.id, first.instruction, first.before, first.after) == tuple(GOOD.values())
    assert (second.id, second.after) == ("7", None)
    assert first.messages()[0]["content"].startswith("rename x\n\n")
    assert first.messages()[0]["content"].endswith("\n\nx = 1\n")
    path.write_text(json.dumps({**GOOD, "prompt": "Now!"}))
    assert read_pairs(path)[0].messages() == [{"role": "user", "content": "Now!"}]


def line(**changed: object) -> bytes:
    """A good line, with these fields; None: without the field."""
    return json.dumps(
        {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    ).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "line 3: expected one JSON object"),
        (line(id=None), "line 3: id: "),
        (line(before=None), "line 3: before: "),
        (line(before=" \n"), "line 3: before: "),
        (line(after=3), "line 3: after: "),
        (line(prompt=[]), "line 3: prompt: "),
        (b'{"id": 3, "prediction_text": "x", "output_text": "y"}', "line 3: instruction: "),
        (b'{"id": 3, "prediction_text": [1], "prompt_text": "y"}', "line 3: before: "),
        (line(), "line 3: \"id\": 'a' is also that of line 1"),
        (None, "expected at least one pair, found none"),
    ],
)
def test_a_bad_line_or_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"" if content is None else line() + b"\n\n" + content)
    with pytest.raises(EditError) as error:
        read_pairs(path)
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_the_shipped_pairs_are_edits() -> None:
    pairs = shipped_pairs()
    assert len({pair.id for pair in pairs}) == len(pairs) >= 8
    for pair in pairs:
        assert pair.after is not None
        assert pair.after != pair.before
        assert resemblance(pair.after, pair.before) > 0.6, pair.id


def git(repo: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(repo), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    long = b"x" * MAX_FILE_BYTES
    for message, files in (
        ("begin", {"a b.py": b"one\ntwo\n", "long.txt": long, "image.bin": b"\0\1", "latin.txt": b"\xe9"}),
        (
            "count in digits",
            {
                "a b.py": b"one\n2\n", "long.txt": long + b"y", "image.bin": b"\0\2", "latin.txt": b"\xe8",
                "new.py": b"new\n",
            },
        ),
        ("more", {"new.py": b"newer\n"}),
    ):  # fmt: skip
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", message)
    return tmp_path


def test_commits_are_edits_newest_first(repo: Path) -> None:
    pairs = pairs_from_git(repo, "HEAD", 9)
    assert [(p.before, p.after) for p in pairs] == [("new\n", "newer\n"), ("one\ntwo\n", "one\n2\n")]
    assert pairs[1].instruction == "Change the file a b.py: count in digits"
    assert pairs[1].id.endswith(":a b.py")
    assert len(pairs_from_git(repo, "HEAD", 1)) == 1


def test_two_files_are_an_edit(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("one\ntwo\n")
    new.write_text("one\n2\n")
    pair = pair_of_files(old, new, None)
    assert (pair.before, pair.after) == ("one\ntwo\n", "one\n2\n")
    assert "-two" in pair.instruction
    assert "+2" in pair.instruction
    assert pair_of_files(old, None, "count").after is None
    for arguments, words in (
        ((old, None, None), "needs --instruction"),
        ((old, old, None), "there is no edit"),
    ):
        with pytest.raises(EditError, match=words):
            pair_of_files(*arguments)


LINES = [f"line {i} of the answer\n" for i in range(40)]
OUTPUT = "".join(LINES)


def test_the_diff_of_the_pair_is_undone_in_the_output() -> None:
    after = [f"{i}\n" for i in range(20)]
    before = [*after[:5], "five\n", *after[6:15], *after[16:]]
    changed = edited(OUTPUT, Pair("a", "i", "".join(before), "".join(after))).splitlines(keepends=True)
    assert changed == [*LINES[:10], "five\n", *LINES[11:30], *LINES[31:]]


def test_an_output_that_the_model_really_edited_is_predicted_by_the_text_before() -> None:
    pair = shipped_pairs()[0]
    assert pair.after is not None
    found = make_predictions([pair, pair], [pair.after, OUTPUT], "auto")
    assert found.sources == ["before", "output"]
    assert found.texts["prediction"][0] == pair.before
    assert "1 of 2 predictions are the text before the edit. 1 are the output" in found.sentence()
    assert make_predictions([pair], [OUTPUT], "before").sources == ["before"]
    assert make_predictions([pair], [pair.after], "output").sources == ["output"]


@pytest.mark.parametrize("output", ["", "w", "word " * 300, OUTPUT, "a\n" * 9], ids=len)
@pytest.mark.parametrize("pair", [*shipped_pairs(), Pair("t", "i", "text")], ids=lambda pair: pair.id)
def test_an_edited_output_differs_and_is_the_same_each_time(output: str, pair: Pair) -> None:
    changed = edited(output, pair)
    assert changed
    assert changed != output
    assert changed == edited(output, pair)


def test_a_useless_prediction_has_the_length_and_none_of_the_words() -> None:
    text = unrelated_text(1000, "a")
    assert 1000 <= len(text) <= 1030
    assert resemblance(OUTPUT, text) == 0
    assert text == unrelated_text(1000, "a") != unrelated_text(1000, "b")


def places(*tokens: tuple[str, dict[str, float]]) -> list[Alternatives]:
    found, start = [], 0
    for text, others in tokens:
        found.append(Alternatives(start, text, [(text, -0.5), *others.items()]))
        start += len(text)
    return found


ONE = [("The", {}), (" cat", {" dog": -0.6, " cow": -0.52}), (" sat", {})]


@pytest.mark.parametrize(
    ("a", "b", "tokens", "tie"),
    [
        ("The cat sat", "The dog sat", ONE, True),
        ("The cat sat", "The pig sat", ONE, False),  # not among the likeliest
        ("A cat sat", "A dog sat", ONE, False),  # the third answer is of another kind
        ("The cat", "The cat sat", [*ONE[:2], (" sat", {"</s>": -0.55})], True),  # one ends
        ("The cat", "The cat sat", [*ONE[:2], (" sat", {"</s>": -3.0})], False),
        ("abc", "abd", [("ab", {"a": -0.6}), ("c", {})], True),  # the tie is a token earlier
        ("abc", "abd", [("ab", {"a": -2.0}), ("c", {})], False),
        ("xy", "xz", [("xy", {"xz": -0.7})], True),  # within one token
        ("xy", "xz", [("xy", {"xz": -0.9})], False),
    ],
)
def test_near_ties(a: str, b: str, tokens: list[tuple[str, dict[str, float]]], tie: bool) -> None:
    assert is_near_tie(a, b, places(*tokens), 0.25) is tie
    assert is_near_tie(b, a, places(*tokens), 0.25) is tie


PLUGIN = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="1"} 20.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 1600.0
# TYPE gpu_align_steps counter
gpu_align_steps_total 40.0
# TYPE gpu_align_draft_tokens counter
gpu_align_draft_tokens_total{source="prediction",verdict="accepted"} 60.0
gpu_align_draft_tokens_total{source="prediction",verdict="rejected"} 7.0
gpu_align_draft_tokens_total{source="context",verdict="accepted"} 20.0
gpu_align_draft_tokens_total{source="context",verdict="rejected"} 1.0
# TYPE gpu_align_acceptance_ratio summary
gpu_align_acceptance_ratio_sum NaN
"""
NGRAM = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total 120.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total 30.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total 150.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total 80.0
"""


def counts(text: str) -> Counts:
    found = Counts.read(text)
    assert found is not None
    return found


def test_the_plugin_counts_what_was_verified() -> None:
    """vLLM's own counters count draft slots, not drafts."""
    before = counts(PLUGIN)
    found = before.since(Counts())
    assert (found.generated, found.steps(), found.accepted, found.rejected) == (120, 40, 80, 8)
    assert found.by_source() == {
        "context": {"accepted": 20, "rejected": 1},
        "prediction": {"accepted": 60, "rejected": 7},
    }
    # Requests without drafts get one token a step.
    found = counts(PLUGIN.replace('{engine="1"} 20.0', '{engine="1"} 50.0')).since(before)
    assert (found.generated, found.steps(9), found.accepted, found.rejected) == (30, 30, 0, 0)
    assert found.by_source() == {}


def test_ngram_is_counted_by_vllm() -> None:
    found = counts(NGRAM)
    assert (found.steps(), found.steps(41), found.accepted, found.rejected) == (40, 41, 80, 70)
    assert (found.has_plugin, "vllm_drafts" in found.numbers) == (False, True)
    # Two answers of 64 tokens: 2 prefills, and 4 steps of which the last ones accept beyond the end.
    page = {"generation_tokens": 128, "request_success": 2, "spec_decode_num_drafts": 4}
    page |= {"spec_decode_num_draft_tokens": 128, "spec_decode_num_accepted_tokens": 128}
    text = "".join(f"# TYPE vllm:{name} counter\nvllm:{name}_total {n}\n" for name, n in page.items())
    assert counts(text).steps() == 6


@pytest.mark.parametrize("text", ["", "<html>", "a 1\n", "vllm:generation_tokens_total x\n"])
def test_what_is_no_page_of_vllm_counts_nothing(text: str) -> None:
    assert Counts.read(text) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([20, 20, 20, 40], [30]),
        ([40, 41, 42, 42], [32]),  # of other requests
        ([20], [10]),  # never all: another replica counted them
        (range(40, 100_000), range(30, 99_991)),  # other clients do not stop
        ([None], [None]),
    ],
)
def test_late_counters_are_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, values: list[int | None], expected: list[int | None]
) -> None:
    """Each look sees the next value; the last one stays."""
    waiting, looks = list(values), []

    async def root_text(client: Client, path: str) -> str:
        looks.append(path)
        value = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return "" if value is None else f"vllm:generation_tokens_total {value}\n"

    async def counted() -> Counts | None:
        client = Client("http://127.0.0.1:9/v1", None, 9.0)
        async with contextlib.aclosing(client):
            return await client.counted(Counts(Counter(generated=10)), 30)

    monkeypatch.setattr(Client, "root_text", root_text)
    for name, seconds in (("POLL_S", 0.001), ("SETTLE_S", 0.2), ("REST_S", 0.05)):
        monkeypatch.setattr(module, name, seconds)
    found = asyncio.run(counted())
    assert (found and found.generated) in expected
    assert len(looks) == 5 or expected != [30]

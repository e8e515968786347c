"""Where edits come from, and what is said of a line, a file or a range that is none."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from gpu_align.tools.bench.client import BenchError
from gpu_align.tools.bench.data import (
    MAX_FILE_BYTES,
    pair_of_files,
    pairs_from_git,
    read_pairs,
    resemblance,
    shipped_pairs,
)

GOOD = {"id": "a", "instruction": "rename x", "before": "x = 1\n", "after": "y = 1\n"}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_pairs_are_read(tmp_path: Path, packed: bool, bom: bytes) -> None:
    path = tmp_path / "pairs.jsonl"
    raw = bom + "\n\n".join(json.dumps(p) for p in (GOOD, {**without("after"), "id": 7, "more": 1})).encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    first, second = read_pairs(path)
    assert (first.id, first.instruction, first.before, first.after) == tuple(GOOD.values())
    assert (second.id, second.after) == ("7", None)
    assert first.messages()[0]["content"].startswith("rename x\n\n")
    assert first.messages()[0]["content"].endswith("\n\nx = 1\n")
    path.write_text(json.dumps({**GOOD, "prompt": "Now!"}))
    assert read_pairs(path)[0].messages() == [{"role": "user", "content": "Now!"}]


BAD_LINES = {
    "{": "expected one JSON object",
    "[1]": "expected a JSON object, found a list",
    json.dumps(without("id")): 'field "id" is missing',
    json.dumps({**GOOD, "id": True}): '"id": expected a string or an integer, found true',
    json.dumps(without("before")): 'field "before" is missing',
    json.dumps({**GOOD, "before": " \n"}): '"before": expected a text, found an empty one',
    json.dumps({**GOOD, "after": 3}): '"after": expected a string, found the number 3',
    json.dumps({**GOOD, "instruction": None}): '"instruction": expected a string, found null',
    json.dumps(GOOD): "'a' is also that of line 1",
    "[" * 100_000: "expected one JSON object, found brackets nested too deeply",
}


@pytest.mark.parametrize(("line", "words"), BAD_LINES.items(), ids=lambda text: text[:24])
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(BenchError) as error:
        read_pairs(path)
    assert str(error.value).startswith(f"--dataset: {path}: line 3: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected at least one pair, found none"),
        (b"\xff\n", "line 1: expected UTF-8, found byte 0xff"),
        (gzip.compress(b"{}", mtime=0)[:-4], "damaged gzip data"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(content)
    with pytest.raises(BenchError, match=words):
        read_pairs(path)


def test_the_shipped_pairs_are_edits() -> None:
    pairs = shipped_pairs()
    assert len({pair.id for pair in pairs}) == len(pairs) >= 8
    for pair in pairs:
        assert pair.after is not None
        assert pair.after != pair.before
        assert resemblance(pair.after, pair.before) > 0.6, pair.id


def git(repo: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "a b.py").write_text("one\ntwo\n")
    (tmp_path / "long.txt").write_text("x" * MAX_FILE_BYTES)
    (tmp_path / "image.bin").write_bytes(b"\0\1")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "begin")
    (tmp_path / "a b.py").write_text("one\n2\n")
    (tmp_path / "long.txt").write_text("y" * (MAX_FILE_BYTES + 1))
    (tmp_path / "image.bin").write_bytes(b"\0\2")
    (tmp_path / "latin.txt").write_bytes(b"\xe8")
    (tmp_path / "new.py").write_text("new\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "count in digits")
    (tmp_path / "new.py").write_text("newer\n")
    git(tmp_path, "commit", "-qam", "more")
    return tmp_path


def test_commits_are_edits_newest_first(repo: Path) -> None:
    pairs = pairs_from_git(repo, "HEAD", 9)
    assert [(p.before, p.after) for p in pairs] == [("new\n", "newer\n"), ("one\ntwo\n", "one\n2\n")]
    assert pairs[1].instruction == "Change the file a b.py: count in digits"
    assert pairs[1].id.endswith(":a b.py")
    assert len(pairs_from_git(repo, "HEAD", 1)) == 1


@pytest.mark.parametrize(
    ("revisions", "words"),
    [("v9..v10", "v9..v10"), ("--output=x", "expected a range"), ("HEAD~2", "has no modified text file")],
)
def test_a_bad_range_is_one_line(repo: Path, revisions: str, words: str) -> None:
    with pytest.raises(BenchError, match="--from-git") as error:
        pairs_from_git(repo, revisions, 9)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (repo / "x").exists()


def test_a_folder_without_git_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not a git repository"):
        pairs_from_git(tmp_path, "HEAD", 9)


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
        with pytest.raises(BenchError, match=words):
            pair_of_files(*arguments)

"""Records from two files and from a Git history; tokenizers that cannot be reached."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu_align.simulate import EditError, records_of_files, records_of_git
from gpu_align.tools.simulate import tokenizers
from tests.gpu_align.bench.test_bench_data import git


@pytest.fixture(autouse=True)
def bytes_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that makes a token of each byte."""

    class Bytes:
        name = "bytes"
        vocab_size = 256

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    monkeypatch.setattr("gpu_align.tools.simulate.records.load_tokenizer", lambda name: Bytes())


def commit(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "--short=10", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, a_py=b"a = 1\r\n", b_txt=b"one", c_bin=b"\0\1", e_py=b"")
    return folder


def test_two_files(tmp_path: Path) -> None:
    before, after = tmp_path / "old.py", tmp_path / "new.py"
    before.write_bytes(b"\xef\xbb\xbf" + b"a = 1\r\n")
    after.write_bytes(b"a = 2\n")
    [record] = records_of_files(before, after, "bytes")
    assert (record.id, record.prompt, record.tokenizer) == ("new.py", [], "bytes")
    assert bytes(record.prediction) == b"a = 1\n"
    assert bytes(record.output) == b"a = 2\n"
    before.write_bytes(b"")
    assert records_of_files(before, after, "bytes")[0].prediction == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a\0b"])
def test_a_file_without_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "old").write_bytes(b"a")
    (tmp_path / "new").write_bytes(content)
    with pytest.raises(EditError, match="new: expected"):
        records_of_files(tmp_path / "old", tmp_path / "new", "bytes")


def test_the_edits_of_commits_newest_first(repo: Path) -> None:
    second = commit(repo, a_py=b"a = 2\r\n", c_bin=b"\0\2", d_py=b"new")
    third = commit(repo, a_py=b"a = 3\n", b_txt=b"two", e_py=b"no longer empty")
    found = records_of_git("HEAD~2..HEAD", repo, "bytes")
    assert [record.id for record in found] == [f"{third}:a.py", f"{third}:b.txt", f"{second}:a.py"]
    assert [bytes(r.prediction) for r in found] == [b"a = 2\n", b"one", b"a = 1\n"]
    assert [bytes(r.output) for r in found] == [b"a = 3\n", b"two", b"a = 2\n"]
    assert [r.id for r in records_of_git("HEAD~2..", repo, "bytes", [".txt"])] == [f"{third}:b.txt"]
    assert len(records_of_git("HEAD", repo, "bytes", limit=2)) == 2


def test_links_and_large_files_are_left_out(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "link.py").symlink_to("a.py")
    commit(repo)
    (repo / "link.py").unlink()
    (repo / "link.py").symlink_to("b.txt")
    commit(repo, a_py=b"a = 2222\n")
    assert len(records_of_git("HEAD~1..", repo, "bytes")) == 1
    monkeypatch.setattr("gpu_align.tools.simulate.records.MAX_FILE_BYTES", 7)
    with pytest.raises(EditError, match=r"--git: HEAD~1\.\. changes no text file"):
        records_of_git("HEAD~1..", repo, "bytes")


def test_a_range_that_there_is_not(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [("no..where", "bad revision"), ("-p", "expected a range"), ("", "expected a range")]
    for revisions, message in [*refused, ("HEAD", "--git needs git")]:
        if revisions == "HEAD":
            monkeypatch.setenv("PATH", str(repo))
        with pytest.raises(EditError, match=message):
            records_of_git(revisions, repo, "bytes")


def test_an_unreachable_hub_is_one_line_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    from transformers import AutoTokenizer  # its import is not what is timed  # noqa: F401

    started = time.monotonic()
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9 is out of reach: \w+, and it is not in the cache"):
        tokenizers.TransformersTokenizer("some-organisation/no-model")
    assert time.monotonic() - started < 30  # less than a second; the library would try again for a minute


def test_a_folder_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tokenizers, "hub_is_out_of_reach", lambda: pytest.fail("the hub is asked"))
    for name in ("/no/such/folder", "./folder", "a/b/c"):
        with pytest.raises(ValueError, match=r"\(no such folder\)"):
            tokenizers.TransformersTokenizer(name)
    with pytest.raises(ValueError, match=r"\(\S+ \w+ .*\)$"):  # what transformers says
        tokenizers.TransformersTokenizer(str(tmp_path))

"""The corpus command, on packages made here: selection, order, and the same bytes every time."""

from __future__ import annotations

import gzip
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.corpus import build, files
from benchmarks.corpus.build import EditPair, source_pairs, write_pairs
from benchmarks.corpus.files import Releases, texts_in
from gpu_align.simulate import read_records
from tests.benchmarks.corpus.archives import tarball


class Words:
    """One token a word, its length: 200 words are 200 tokens."""

    name = "words"
    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def token_bytes(self, token_id: int) -> bytes:
        return b"x" * token_id


def words(count: int, word: str = "a") -> str:
    return f"{word} " * count


def wheel(path: Path, files: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


OLD: dict[str, str | bytes] = {
    "pkg/edited.py": words(300),
    "pkg/same.py": words(300),
    "pkg/only_line_ends.py": "a \r\n" * 300,
    "pkg/removed.py": words(300),
    "pkg/grown_from_little.py": words(3),
    "pkg/shrunk.py": words(300),
    "pkg/least.py": words(300),
    "pkg/most.py": words(300),
    "pkg/too_long.py": words(300),
    "pkg/latin.py": b"\xe9 " * 300,
    "pkg/data.json": words(300),
    "pkg-1.dist-info/METADATA": "Name: x\n\n" + words(300),
}
NEW: dict[str, str | bytes] = {
    "pkg/edited.py": words(310),
    "pkg/same.py": words(300),
    "pkg/only_line_ends.py": "a \n" * 300,
    "pkg/added.py": words(300),
    "pkg/grown_from_little.py": words(400),
    "pkg/shrunk.py": words(199),
    "pkg/least.py": words(200),
    "pkg/most.py": words(8000),
    "pkg/too_long.py": words(8001),
    "pkg/latin.py": words(400),
    "pkg/data.json": words(310),
    "pkg-2.dist-info/METADATA": "Name: y\n\n" + words(320),
}
LABELS = {"id", "kind", "text", "package", "split", "tokens"}
SELECTED = ["pkg/edited.py", "pkg/grown_from_little.py", "pkg/least.py", "pkg/most.py"]


def fetch(name: str, version: str, cache: Path, sdist: bool) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    return wheel(cache / f"{name}-{version}.whl", OLD if version == "1" else NEW)


def pairs_of(cache: Path, *sorts: str, most: int = 100) -> list[EditPair]:
    source = Releases("pkg", ("1", "2"), sorts or ("python",), most=most)
    return [pair for pair, _ in source_pairs(source, "test", Words(), cache, fetch)]


def test_selection(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path)
    assert [pair.id for pair in pairs] == [f"pkg/1..2/{path}" for path in SELECTED]
    sizes = [(len(pair.prediction), len(pair.output)) for pair in pairs]
    assert sizes == [(300, 310), (3, 400), (300, 200), (300, 8000)]


def test_other_sorts_of_text(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path, "json", "document")
    assert [(pair.id, pair.kind) for pair in pairs] == [
        ("pkg/1..2/dist-info/METADATA", "document"),
        ("pkg/1..2/pkg/data.json", "json"),
    ]
    assert len(pairs[0].output) == 320  # the headers are not part of the description


def test_of_many_files_the_same_few_are_kept(tmp_path: Path) -> None:
    few, all_of_them = pairs_of(tmp_path, most=2), pairs_of(tmp_path)
    assert len(few) == 2
    assert few == pairs_of(tmp_path, most=2)
    assert [pair for pair in all_of_them if pair in few] == few


def test_an_sdist_gives_the_paths_of_a_wheel(tmp_path: Path) -> None:
    plain = {
        "pkg-1/pkg/__init__.py": "",
        "pkg-1/pkg/a.py": "a\r\nb",
        "pkg-1/setup.py": "x",
        "pkg-1/tests/__init__.py": "",
        "pkg-1/tests/test_a.py": "x",
        "pkg-1/docs/conf.py": "x",
        "pkg-1/README.md": "x",
    }
    in_src = {name.replace("pkg-1/pkg/", "pkg-1/src/pkg/"): content for name, content in plain.items()}
    expected = {"pkg/__init__.py": "", "pkg/a.py": "a\nb"}
    assert texts_in(tarball(tmp_path / "pkg-1.tar.gz", plain)) == expected
    assert texts_in(tarball(tmp_path / "src-1.tar.gz", in_src)) == expected
    assert texts_in(wheel(tmp_path / "pkg-1.zip", dict(plain))) == expected
    assert texts_in(wheel(tmp_path / "pkg-1.whl", dict(expected))) == expected


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path)
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    digest = write_pairs(pairs, first)
    assert write_pairs(reversed(pairs), second) == digest
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[4:8] == bytes(4)  # no time in the header
    found = [json.loads(line) for line in gzip.decompress(first.read_bytes()).splitlines()]
    assert [set(record) for record in found] == [LABELS | {"prediction", "output"}] * len(SELECTED)
    assert [record["id"] for record in found] == sorted(record["id"] for record in found)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "load_tokenizer", lambda name: Words())
    out = tmp_path / "folder" / "out.jsonl.gz"
    packages = ["--packages", "pkg:1:2", "--packages", "other:1:2", "more:1:2"]
    assert build.main([str(out), "--cache", str(tmp_path / "cache"), *packages], fetch) == 0
    records = read_records(out)
    assert [record.id for record in records] == [
        f"{name}/1..2/{path}" for name in ("more", "other", "pkg") for path in SELECTED
    ]
    printed = capsys.readouterr().out
    assert "pkg 1 → 2" in printed
    assert f"{3 * len(SELECTED):,}" in printed.splitlines()[-2]


BAD = ["flask", "flask:1", "flask:1:2:3", "flask::2", "--pre:1:2", "a b:1:2", "-r x:1:2"]


@pytest.mark.parametrize("text", BAD)
def test_bad_packages(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main([str(tmp_path / "o.gz"), f"--packages={text}"], fetch) == 2
    assert "expected NAME:OLD:NEW" in capsys.readouterr().err
    assert not (tmp_path / "o.gz").exists()


def test_a_download_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if len(calls) == 3:
            wheel(tmp_path / "pkg-1" / "pkg-1.whl", {})
        return subprocess.CompletedProcess(command, 0 if len(calls) == 3 else 1, "", "connection reset")

    monkeypatch.setattr(files, "PAUSE", 0)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):  # the second time it is there
        assert files.download("pkg", "1", tmp_path).name == "pkg-1.whl"
        assert len(calls) == 3
    with pytest.raises(RuntimeError, match="other==1 failed: connection reset"):
        files.download("other", "1", tmp_path)

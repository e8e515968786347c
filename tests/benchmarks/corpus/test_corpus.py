"""The corpus command, on packages made here: selection, order, and the same bytes every time."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.corpus import build
from benchmarks.corpus.build import EditPair, source_pairs, write_pairs
from benchmarks.corpus.files import Releases
from gpu_align.simulate import read_records


class Words:
    """One token a word, its length: 200 words are 200 tokens."""

    name = "words"
    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def token_bytes(self, token_id: int) -> bytes:
        return b"x" * token_id


def words(count: int) -> str:
    return "a " * count


#: Path → its text in the old and in the new release, None where it is not.
FILES: dict[str, tuple[str | bytes | None, str | bytes | None]] = {
    "pkg/edited.py": (words(300), words(310)),
    "pkg/same.py": (words(300), words(300)),
    "pkg/only_line_ends.py": ("a \r\n" * 300, "a \n" * 300),
    "pkg/removed.py": (words(300), None),
    "pkg/added.py": (None, words(300)),
    "pkg/grown_from_little.py": (words(3), words(400)),
    "pkg/shrunk.py": (words(300), words(199)),
    "pkg/least.py": (words(300), words(200)),
    "pkg/most.py": (words(300), words(8000)),
    "pkg/too_long.py": (words(300), words(8001)),
    "pkg/latin.py": (b"\xe9 " * 300, words(400)),
    "pkg/data.json": (words(300), words(310)),
}
SELECTED = ["pkg/edited.py", "pkg/grown_from_little.py", "pkg/least.py", "pkg/most.py"]


def fetch(name: str, version: str, cache: Path, sdist: bool) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{name}-{version}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, texts in FILES.items():
            if (text := texts[int(version) - 1]) is not None:
                archive.writestr(file, text)
    return path


def pairs_of(cache: Path) -> list[EditPair]:
    return [pair for pair, _ in source_pairs(Releases("pkg", ("1", "2")), "test", Words(), cache, fetch)]


def test_selection(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path)
    assert [pair.id for pair in pairs] == [f"pkg/1..2/{path}" for path in SELECTED]
    sizes = [(len(pair.prediction), len(pair.output)) for pair in pairs]
    assert sizes == [(300, 310), (3, 400), (300, 200), (300, 8000)]


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path)
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    digest = write_pairs(pairs, first)
    assert write_pairs(reversed(pairs), second) == digest
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[4:8] == bytes(4)  # no time in the header
    found = [json.loads(line) for line in gzip.decompress(first.read_bytes()).splitlines()]
    assert [set(record) for record in found] == [set(EditPair.__dataclass_fields__)] * len(SELECTED)
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

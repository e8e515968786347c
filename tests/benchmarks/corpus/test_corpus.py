"""The corpora, on packages made here: selection and order, edits of each kind, and texts of whole packages.

Nothing of a reported package is learned, and a corpus has the same bytes every time.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from itertools import product
from pathlib import Path

import pytest

from benchmarks.corpus import build, edits, kinds, packages
from benchmarks.corpus.build import EditPair, source_pairs, write_pairs
from benchmarks.corpus.files import FIVE, NPM, SETS, Edit, Releases
from benchmarks.corpus.kinds import KINDS, MODEL, QUALITIES, RELEASES
from benchmarks.corpus.mix import ByteTokenizer, synthetic_pairs
from benchmarks.corpus.packages import package_texts
from benchmarks.learn import recipes
from gpu_align.simulate import read_records


def chars(count: int) -> str:
    """A character is a token."""
    return "a" * count


#: Path → its text in the old and in the new release, None where it is not.
FILES: dict[str, tuple[str | bytes | None, str | bytes | None]] = {
    "pkg/edited.py": (chars(300), chars(310)),
    "pkg/same.py": (chars(300), chars(300)),
    "pkg/only_line_ends.py": ("a\r\n" * 200, "a\n" * 200),
    "pkg/removed.py": (chars(300), None),
    "pkg/added.py": (None, chars(300)),
    "pkg/grown_from_little.py": (chars(3), chars(400)),
    "pkg/shrunk.py": (chars(300), chars(199)),
    "pkg/least.py": (chars(300), chars(200)),
    "pkg/most.py": (chars(300), chars(8000)),
    "pkg/too_long.py": (chars(300), chars(8001)),
    "pkg/latin.py": (b"\xe9" * 300, chars(400)),
    "pkg/data.json": (chars(300), chars(310)),
}
SELECTED = ["pkg/edited.py", "pkg/grown_from_little.py", "pkg/least.py", "pkg/most.py"]


def wheel(name: str, version: str, cache: Path, sdist: bool) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{name}-{version}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, texts in FILES.items():
            if (text := texts[int(version) - 1]) is not None:
                archive.writestr(file, text)
    return path


def pairs_of(cache: Path) -> list[EditPair]:
    return [
        pair for pair, _ in source_pairs(Releases("pkg", ("1", "2")), "test", ByteTokenizer(), cache, wheel)
    ]


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
    monkeypatch.setattr(build, "load_tokenizer", lambda name: ByteTokenizer())
    out = tmp_path / "folder" / "out.jsonl.gz"
    named = ["--packages", "pkg:1:2", "--packages", "other:1:2", "more:1:2"]
    assert build.main([str(out), "--cache", str(tmp_path / "cache"), *named], wheel) == 0
    records = read_records(out)
    assert [record.id for record in records] == [
        f"{name}/1..2/{path}" for name in ("more", "other", "pkg") for path in SELECTED
    ]
    printed = capsys.readouterr().out
    assert "pkg 1 → 2" in printed
    assert f"{3 * len(SELECTED):,}" in printed.splitlines()[-2]


# Edits of each kind, kinds of text, outputs like a model's, predictions of every quality.

TEXT = "import module_3\nimport module_1\nimport module_2\n" + "".join(
    f"# about step {i}\ndef step_{i}(value):\n    result = run(value, {i})\n    return result\n\n"
    for i in range(20)
)
DONOR = "".join(f"def other_{i}(argument):\n    return argument + {i}\n\n" for i in range(20))


NAMES = [f"file{which}" for which in range(4)]


def javascripts(version: int) -> dict[str, str]:
    line = "function f{}_{}(x) {{ return x + {}; }}\n"
    return {
        f"lib/{name}.js": "".join(line.format(which, i, i if i % 7 else i + version) for i in range(40))
        for which, name in enumerate([*NAMES, "app.min"])
    }


SHARED = "export const shared = 1;\n" * 5


def module(name: str, lines: int = 6) -> str:
    return "".join(f"export const {name}{i} = {i};\n" for i in range(lines))


#: Package and version -> its files.
PACKAGES = {
    **{f"npm:{name} {version}": javascripts(version) for name in ("one", "two") for version in (1, 2, 3)},
    "npm:ours 1": {"a.js": module("a"), "b.ts": module("old"), "mid.js": SHARED},
    "npm:ours 2": {"a.js": module("between")},
    "npm:ours 3": {
        "a.js": module("a"),
        "b.ts": module("new"),
        "c.js": SHARED,
        "empty.js": "",
        "bundle.js": "x" * 1000,
        "lib/vendor/v.js": module("vendored"),
        "lib/upb-generated/u.js": module("upb"),
        "photo.png": "no text",
    },
    "also 1": {"also/__init__.py": "x = 1\n", "also/a.js": module("a"), "README.md": "# Also\n"},
    "also 2": {"also/__init__.py": "x = 2\n", "also/a.js": module("a"), "README.md": "# Also\n"},
    "npm:theirs 1": {"t.js": module("t"), "middle.js": SHARED, "node_modules/x/x.js": module("copied")},
    "npm:theirs 2": {"t.js": module("t")},
}


def fetch(name: str, version: str, cache: Path, sdist: bool) -> Path:
    """All below one folder, as registries have it."""
    path = cache / (f"{name.replace(':', '-')}-{version}.{'tgz' if name.startswith(NPM) else 'tar.gz'}")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz") as archive:
            for file, content in PACKAGES[f"{name} {version}"].items():
                member = tarfile.TarInfo(f"package/{file}")
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
    return path


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(Releases(f"{NPM}{name}", ("1", "2", "3"), ("javascript",)) for name in ("one", "two"))
    monkeypatch.setattr(kinds, "RELEASES", {"test": found})


def test_the_mix_has_every_kind_and_repeats() -> None:
    texts = []
    for package, sort, i in product("ab", ("python", "document", "json", "config", "sql"), range(6)):
        after = f"{package} {i}\n{(DONOR, TEXT)[i % 2]}"
        texts.append(Edit(f"{package}/{sort}/{i}", sort, sort, package, TEXT, after, 900))
    made = synthetic_pairs(texts, "test")
    assert {edit.kind for edit in made} == {*edits.EDITS, "unrelated", "state"}
    assert all(edit.before != edit.after for edit in made)
    assert made == synthetic_pairs(texts[::-1], "test")
    assert len({edit.id for edit in made}) == len(made)
    package_of = {text.after: text.package for text in texts}
    assert all(package_of[e.before] != package_of[e.after] for e in made if e.kind == "unrelated")


def test_records_of_a_split(releases: None, tmp_path: Path) -> None:
    texts = kinds.kind_texts("test", tmp_path, fetch)
    assert {t.path for t in texts["javascript"]} == {f"lib/{name}.js" for name in NAMES}  # nothing minified
    assert {t.edit.id.split("/")[1] for t in texts["javascript"]} == {"1..2", "2..3"}
    turns = kinds.in_turns(texts["javascript"])
    assert {t.edit.package for t in turns[:2]} == {"one", "two"}
    pairs = list(kinds.made_pairs(texts))
    assert {p.kind for p in pairs} == {MODEL, *QUALITIES}
    assert all(p.before != p.after and p.text == "javascript" for p in pairs)
    assert len({p.id for p in pairs}) == len(pairs)
    older = [p for p in pairs if p.kind == "older"]
    assert all("/2..3/" in p.id and "+ 1;" in p.before for p in older)
    assert pairs == list(kinds.made_pairs(texts))
    out = tmp_path / "out.jsonl.gz"
    assert build.main([str(out), "--set", "kinds-test", "--cache", str(tmp_path)], fetch) == 0
    assert {record.id.split("/")[0] for record in read_records(out)} >= {"one", "two", MODEL}


def test_no_package_is_in_both_splits() -> None:
    split_of: dict[str, set[str]] = {}
    for split, found in RELEASES.items():
        for releases in found:
            split_of.setdefault(releases.name.removeprefix(NPM), set()).add(split)
            assert 2 <= len(releases.versions) <= 4
            assert set(releases.sorts) <= set(KINDS)
    for split, source in SETS["all"]:
        split_of.setdefault(source.name, set()).add(split)
    assert [name for name, splits in split_of.items() if len(splits) > 1] == []
    assert all(split_of[package.name] == {"test"} for package in FIVE)
    for split, found in RELEASES.items():
        assert {kind for releases in found for kind in releases.sorts} == set(KINDS), split


# Whole packages as texts.


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "tune": (Releases(f"{NPM}ours", ("1", "2", "3"), ("javascript",)),),
        "test": (Releases(f"{NPM}theirs", ("1", "2"), ("javascript",)),),
    }
    monkeypatch.setattr(packages, "RELEASES", found)
    also = Releases("also", ("1", "2"), sdist=True)
    monkeypatch.setattr(packages, "SETS", {"tune": [("tune", also)], "test": []})


def test_the_first_and_the_last_release_each_text_once_or_everything(splits: None, tmp_path: Path) -> None:
    found = list(package_texts("tune", tmp_path, fetch))
    assert sorted(text for package, text in found if package == "ours") == sorted(
        [module("a"), module("old"), module("new"), SHARED]
    )
    assert sorted(text for package, text in found if package == "also") == sorted(
        ["x = 1\n", "x = 2\n", module("a"), "# Also\n"]
    )
    assert [package for package, _ in found] == ["also"] * 4 + ["ours"] * 4
    assert found == list(package_texts("tune", tmp_path, fetch))
    found = [text for _, text in package_texts("test", tmp_path, fetch, everything=True)]
    assert sorted(found) == sorted([module("t"), SHARED, module("copied")])
    ours = {text for _, text in package_texts("tune", tmp_path, fetch, everything=True)}
    assert {"", "x" * 1000, module("vendored"), module("between")} <= ours


def test_nothing_that_a_reported_package_has_is_learned(splits: None, tmp_path: Path) -> None:
    texts = recipes.learnable_texts(tmp_path, fetch)
    reported = {text for _, text in package_texts("test", tmp_path, fetch, everything=True)}
    assert SHARED in reported & {text for _, text in package_texts("tune", tmp_path, fetch)}
    assert not reported & {text for _, text in texts}
    assert len(texts) == 7


def test_nothing_of_a_package_that_is_held_out_is_learned() -> None:
    texts = [("p", "one"), ("q", "one"), ("q", "two"), ("r", "three")]
    assert recipes.without(texts, {"p"}) == [("q", "two"), ("r", "three")]
    assert recipes.without(texts, set()) == texts

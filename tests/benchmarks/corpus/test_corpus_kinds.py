"""Edits of each kind, kinds of text, outputs like a model's, predictions of every quality; on texts made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.corpus import build, edits, kinds
from benchmarks.corpus.files import FIVE, NPM, SETS, Edit, Releases
from benchmarks.corpus.kinds import KINDS, MODEL, QUALITIES, RELEASES
from benchmarks.corpus.mix import synthetic_pairs
from gpu_align.simulate import read_records
from tests.benchmarks.corpus.archives import tarball

TEXT = "import module_3\nimport module_1\nimport module_2\n" + "".join(
    f"# about step {i}\ndef step_{i}(value):\n    result = run(value, {i})\n    return result\n\n"
    for i in range(20)
)
DONOR = "".join(f"def other_{i}(argument):\n    return argument + {i}\n\n" for i in range(20))


NAMES = [f"file{which}" for which in range(4)]


def javascript(version: int, which: int) -> str:
    functions = (
        f"function f{which}_{i}(x) {{ return x + {i if i % 7 else i + version}; }}\n" for i in range(40)
    )
    return "".join(functions)


def fetch(name: str, version: str, cache: Path, sdist: bool) -> Path:
    path = cache / f"{name.replace(':', '-')}-{version}.tgz"
    files = {f"lib/{name}.js": javascript(int(version), i) for i, name in enumerate([*NAMES, "app.min"])}
    return path if path.is_file() else tarball(path, files, "package/")


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(Releases(f"{NPM}{name}", ("1", "2", "3"), ("javascript",)) for name in ("one", "two"))
    monkeypatch.setattr(kinds, "RELEASES", {"test": found})


def test_the_mix_has_every_kind_and_repeats() -> None:
    texts = [
        Edit(
            f"{package}/{sort}/{i}", sort, sort, package, TEXT, f"{package} {i}\n{(DONOR, TEXT)[i % 2]}", 900
        )
        for package in ("a", "b")
        for sort in ("python", "document", "json", "config", "sql")
        for i in range(6)
    ]
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
    in_parts = Releases("regex", ("2022.10.31", "2023.12.25", "2024.11.6"), ("c",), True, 400, True)
    assert in_parts in RELEASES["tune"]
    assert FIVE[0] == Releases("requests", ("2.28.2", "2.32.3"), ("python",))

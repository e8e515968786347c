"""Whole packages as texts, and that nothing of a reported package is learned; on archives made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.corpus import packages
from benchmarks.corpus.files import NPM, Releases
from benchmarks.corpus.packages import package_texts
from benchmarks.learn import recipes
from tests.benchmarks.corpus.archives import tarball

SHARED = "export const shared = 1;\n" * 5


def module(name: str, lines: int = 6) -> str:
    return "".join(f"export const {name}{i} = {i};\n" for i in range(lines))


#: Package and version -> its files.
FILES = {
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
    path = cache / (f"{name}-{version}.tgz" if name.startswith(NPM) else f"{name}-{version}.tar.gz")
    return path if path.is_file() else tarball(path, FILES[f"{name} {version}"], "top/")


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "tune": (Releases(f"{NPM}ours", ("1", "2", "3"), ("javascript",)),),
        "test": (Releases(f"{NPM}theirs", ("1", "2"), ("javascript",)),),
    }
    monkeypatch.setattr(packages, "RELEASES", found)
    also = Releases("also", ("1", "2"), sdist=True)
    monkeypatch.setattr(packages, "SETS", {"tune": [("tune", also)], "test": []})


def test_the_first_and_the_last_release_each_text_once_or_everything(tmp_path: Path) -> None:
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


def test_nothing_that_a_reported_package_has_is_learned(tmp_path: Path) -> None:
    texts = recipes.learnable_texts(tmp_path, fetch)
    reported = {text for _, text in package_texts("test", tmp_path, fetch, everything=True)}
    assert SHARED in reported & {text for _, text in package_texts("tune", tmp_path, fetch)}
    assert not reported & {text for _, text in texts}
    assert len(texts) == 7


def test_nothing_of_a_package_that_is_held_out_is_learned() -> None:
    texts = [("p", "one"), ("q", "one"), ("q", "two"), ("r", "three")]
    assert recipes.without(texts, {"p"}) == [("q", "two"), ("r", "three")]
    assert recipes.without(texts, set()) == texts

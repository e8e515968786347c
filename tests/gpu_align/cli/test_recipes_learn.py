"""``gpu-align recipes learn``: which files it learns from, what it writes, and how it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from gpu_align import RecipePack
from gpu_align.tools.cli import app
from gpu_align.tools.recipes.command import SourceTexts

TEXT = "alpha beta gamma delta\n"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files(folder: Path, **contents: bytes | str) -> Path:
    """A folder with these files; ``__`` in a name is a slash and ``_`` a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(places: list[Path], suffixes: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    return [(Path(source).name, text) for source, text in SourceTexts(places, suffixes).read(lambda *_: None)]


def test_a_pack_of_ones_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        files(tmp_path / name, a_py=TEXT * 5, b_txt="epsilon zeta\n" * 5)
    out = tmp_path / "own.json.gz"
    places = tmp_path / "one", tmp_path / "two"
    result = run("recipes", "learn", "--out", out, *places, "--suffix", ".py")
    assert result.exit_code == 0, result.output
    pack = RecipePack.load(out)
    told = " ".join(result.stdout.split())
    assert "read 2 files, 230 bytes, of 2 sources wrote" in told
    assert f"{len(pack.words)} words, {len(pack.recipes)} recipes, {out.stat().st_size:,} bytes" in told
    assert "skipped" not in told
    assert (" beta",) in {recipe.context for recipe in pack.recipes}
    assert " zeta" not in pack.words
    assert set(pack.calibration) == {0.0}
    # Neither where the texts are nor when they were read.
    assert (pack.made_by, str(tmp_path) in str(pack)) == ("gpu-align recipes learn", False)
    before = out.read_bytes()
    assert run("recipes", "learn", "--out", out, *reversed(places), "--suffix", ".py").exit_code == 0
    assert out.read_bytes() == before


def test_every_place_is_a_source(tmp_path: Path) -> None:
    files(tmp_path, one__a_py="1", one__deep__b_py="2", two__a_py="3", c_txt=b"\xef\xbb\xbf4\r\n5\r6\n")
    places = [tmp_path / "one", tmp_path / "two", tmp_path / "c.txt"]
    assert read(places) == [("one", "1"), ("one", "2"), ("two", "3"), ("c.txt", "4\n5\n6\n")]
    # A suffix chooses among what is found, not among what is named.
    assert read(places, ("b.py",)) == [("one", "2"), ("c.txt", "4\n5\n6\n")]
    assert read([tmp_path / "two", tmp_path]) == [("two", "3"), (tmp_path.name, "4\n5\n6\n")] + [
        (tmp_path.name, text) for text in "12"
    ]


def test_what_is_no_text_is_counted(tmp_path: Path) -> None:
    files(tmp_path / "a", x=TEXT * 5, y=TEXT * 5, z=b"\xff\xfe\x00", zero=b"a\0b", _hidden=TEXT, _git__x=TEXT)
    os.symlink(tmp_path / "a" / "x", tmp_path / "a" / "link")
    out = tmp_path / "own.json.gz"
    result = run("recipes", "learn", "--out", out, tmp_path / "a")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "read 1 file, 115 bytes, of 1 source; 2 skipped: not UTF-8 text; 1 skipped: the same again" in told

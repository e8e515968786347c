"""``gpu-align recipes``: what ``learn``, ``observe``, ``merge``, ``report`` and ``show`` write and print."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("mistral_common")
from typer.testing import CliRunner

from gpu_align import RecipePack
from gpu_align.tools.cli import app
from tests.gpu_align.recipes.test_observe import records

TEKKEN = ("--tokenizer", "tekken")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["recipes", *map(str, arguments)])


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    rows = [
        {"task": task, "prompt": p, "samples": texts} for task, p, texts in records(random.Random(1), 20, 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    path = tmp_path / "outputs.jsonl"
    texts = [text for _, _, group in records(random.Random(2), 5, 1) for text in group]
    texts[0] = texts[0].replace("kind", "sort")
    rows = [{"task": f"task {i % 2}", "prompt": "Write.", "output": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


@pytest.fixture
def pack(tmp_path: Path, samples: Path) -> Path:
    path = tmp_path / "pack.json"
    assert run("observe", samples, "-o", path, *TEKKEN).exit_code == 0
    return path


def test_observe_writes_the_same_pack_plain_and_gzipped(tmp_path: Path, samples: Path) -> None:
    written = []
    for name in ("a.json", "b.json.gz"):
        result = run("observe", samples, "-o", tmp_path / name, *TEKKEN)
        assert result.exit_code == 0, result.output
        told = " ".join(result.stdout.split())
        assert "read 20 prompts, 60 samples" in told
        written.append(RecipePack.load(tmp_path / name))
    assert written[0] == written[1]
    assert written[0].task == "records"
    assert f"{len(written[0].observed):,} entries observed" in told
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    packed = tmp_path / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress(samples.read_bytes()))
    assert run("observe", packed, "-o", tmp_path / "c.json", *TEKKEN, "--task", "mine").exit_code == 0
    assert RecipePack.load(tmp_path / "c.json").task == "mine"


def test_report_and_merge(tmp_path: Path, pack: Path, outputs: Path) -> None:
    figures = tmp_path / "r.json"
    result = run("report", pack, outputs, *TEKKEN, "--json", figures)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert list(found["tasks"]) == list(found["with_context"]) == ["task 0", "task 1"]
    for task in found["tasks"].values():
        assert list(task) == ["tokens", "drafted", "accepted", "coverage", "accuracy", "tokens_per_step"]
        assert task["coverage"] == task["drafted"] / task["tokens"]
        assert task["accuracy"] == task["accepted"] / task["drafted"] > 0.9
        assert 0.5 < task["coverage"] <= 1
        assert task["tokens_per_step"] > 2
    assert "published" not in result.stdout
    shapes = tmp_path / "shapes.json"
    assert run("merge", "--shapes-only", "-o", shapes, pack, "base").exit_code == 0
    assert {entry.is_shape for entry in RecipePack.load(shapes).observed} == {True}


def test_show(pack: Path) -> None:
    result = run("show", pack, "--top", 5, *TEKKEN)
    assert result.exit_code == 0, result.output
    loaded = RecipePack.load(pack)
    assert loaded.content_hash in result.stdout
    assert "records" in result.stdout
    assert "shape" in result.stdout
    assert "#" in run("show", pack).stdout  # ids, without a tokenizer
    shipped = run("show", "base", "--top", 3)
    assert "95,371 recipes" in shipped.stdout


TEXT = "alpha beta gamma delta\n"


def files(folder: Path, **contents: bytes | str) -> Path:
    """A folder with these files; ``__`` in a name is a slash and ``_`` a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_a_pack_of_ones_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        files(tmp_path / name, a_py=TEXT * 5, b_txt="epsilon zeta\n" * 5)
    out = tmp_path / "own.json.gz"
    places = tmp_path / "one", tmp_path / "two"
    result = run("learn", "--out", out, *places, "--suffix", ".py")
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
    assert run("learn", "--out", out, *reversed(places), "--suffix", ".py").exit_code == 0
    assert out.read_bytes() == before


def test_what_is_no_text_is_counted(tmp_path: Path) -> None:
    files(tmp_path / "a", x=TEXT * 5, y=TEXT * 5, z=b"\xff\xfe\x00", zero=b"a\0b", _hidden=TEXT, _git__x=TEXT)
    os.symlink(tmp_path / "a" / "x", tmp_path / "a" / "link")
    out = tmp_path / "own.json.gz"
    result = run("learn", "--out", out, tmp_path / "a")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "read 1 file, 115 bytes, of 1 source; 2 skipped: not UTF-8 text; 1 skipped: the same again" in told

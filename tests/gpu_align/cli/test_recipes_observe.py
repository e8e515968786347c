"""``gpu-align recipes observe``, ``merge``, ``report``, ``show``, ``index``: what they write, how they refuse."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("mistral_common")
from typer.testing import CliRunner

from gpu_align import RecipePack
from gpu_align.recipes import Misses
from gpu_align.tools.cli import app
from tests.gpu_align.recipes.oracle import num_refuted
from tests.gpu_align.recipes.test_observe import records

TEKKEN = ("--tokenizer", "tekken")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["recipes", *map(str, arguments)])


def refused(result: Any) -> str:
    """The one line that a command ends with."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    line: str = result.stderr
    return line


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


def test_report_and_misses_and_merge(tmp_path: Path, pack: Path, outputs: Path) -> None:
    figures, misses, better = tmp_path / "r.json", tmp_path / "m.json.gz", tmp_path / "better.json.gz"
    result = run("report", pack, outputs, *TEKKEN, "--json", figures, "--misses", misses)
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
    refuted = sum(task["drafted"] - task["accepted"] for task in found["tasks"].values())
    assert num_refuted(Misses.load(misses)) == refuted > 0
    assert run("merge", "-o", better, pack, misses).exit_code == 0
    assert run("report", better, outputs, *TEKKEN, "--json", figures).exit_code == 0
    again = json.loads(figures.read_text())["tasks"].values()
    assert sum(task["drafted"] - task["accepted"] for task in again) < refuted
    shapes = tmp_path / "shapes.json"
    assert run("merge", "--shapes-only", "-o", shapes, pack, better).exit_code == 0
    assert {entry.is_shape for entry in RecipePack.load(shapes).observed} == {True}


def test_report_beside_a_draft_model(tmp_path: Path, pack: Path, outputs: Path) -> None:
    """One that knows nothing is asked, and drafts nothing it is sure of; one with too few tokens is refused."""
    from tests.gpu_align.tiny_models import untrained

    figures = tmp_path / "r.json"
    for vocab_size in (1 << 17, 500):
        untrained("llama", 7, vocab_size=vocab_size).save_pretrained(tmp_path / str(vocab_size))
    result = run(
        "report", pack, outputs, *TEKKEN, "--json", figures, "--draft-model", tmp_path / str(1 << 17)
    )
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    for name, task in found["draft_model"].items():
        assert (task["tokens"], task["tokens_per_step"]) == (found["tasks"][name]["tokens"], 1)
        assert (task["drafted"], task["accuracy"]) == (0, None)  # and not 100 %
    assert re.search(r"draft model .* 0 +0 +0.0% +– +1.00", result.stdout), result.stdout
    for model, said in ((tmp_path / "500", "found 500 and not"), (tmp_path / "none", "--draft-model: ")):
        refused = run("report", pack, outputs, *TEKKEN, "--draft-model", model)
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: expected one JSON object"),
        ("[1]", "line 2: expected an object"),
        ("{}", "line 2: samples: expected a list"),
        ('{"samples": "abc"}', "line 2: samples: expected a list"),
        ('{"samples": [1]}', "line 2: samples[0]: expected a text"),
        ('{"samples": ["\\ud800"]}', "line 2: samples[0]: expected a text"),
        ('{"samples": [], "task": 5}', "line 2: task: expected a text"),
        ("\xff", "line 2: expected UTF-8, found byte 0xff"),
        ("[" * 10**5, "line 2: expected one JSON object"),
    ],
)
def test_lines_that_are_none(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"task": "t", "prompt": "p", "samples": ["a"]}\n' + line.encode("latin-1") + b"\n")
    told = refused(run("observe", path, "-o", tmp_path / "o.json", *TEKKEN))
    assert str(path) in told
    assert said in told
    assert not (tmp_path / "o.json").exists()

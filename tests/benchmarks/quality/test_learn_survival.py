"""The calibration of the shipped survival table: counted anew, while its curves stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpus.build import EditPair, write_pairs
from benchmarks.learn import survival
from gpu_align.ops.choose.survival import SHIPPED, read_survival, read_table

RNG = np.random.default_rng(3)


def edit_pair(kind: str, text: str, number: int, tokens: str = "tekken") -> EditPair:
    prediction = RNG.integers(0, 30, 60).tolist()
    output = list(prediction)
    output[number % 50 + 5] = 99
    return EditPair(f"{kind}{number}", kind, text, "p", "tune", tokens, prediction, output[: 40 + number])


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Path, Path]:
    tune = [edit_pair("python", "python", i) for i in range(4)]
    tune += [edit_pair("python", "python", 5, "bytes"), edit_pair("rename", "python", 6)]
    kinds = [edit_pair("rust", "rust", 7), edit_pair("model", "rust", 8), edit_pair("draft_20", "rust", 9)]
    kinds += [edit_pair("draft_60", "rust", 10), edit_pair("sibling", "rust", 11)]
    paths = tmp_path / "tune.jsonl.gz", tmp_path / "kinds.jsonl.gz"
    for path, pairs in zip(paths, (tune, kinds), strict=True):
        write_pairs(pairs, path)
    return paths


def test_records(corpora: tuple[Path, Path]) -> None:
    latest_first = [f"python{i}" for i in (3, 2, 1, 0)]
    assert [r.id for r in survival.training_records(corpora[0])] == latest_first
    found = [r.id for r in survival.calibration_records(*corpora)]
    assert found == ["draft_209", "model8", "rust7", *latest_first]


def test_only_the_calibration_changes(corpora: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    files = ["--pairs", str(corpora[0]), "--kinds", str(corpora[1])]
    survival.main([str(out), "--calibrate", str(SHIPPED), *files, "--jobs", "1"])
    table, shipped = read_table(out), read_table(SHIPPED)
    same = ("records", "length_edges", "margin_edges", "knots", "unit", "seen", "survival")
    assert {name: table[name] for name in same} == {name: shipped[name] for name in same}
    assert table["made_by"] == "python -m benchmarks.learn.survival"
    assert table["calibration"] != shipped["calibration"]
    # Its own calibration plays no part: once more gives the same.
    again = survival.recalibrated(table, survival.calibration_records(*corpora))
    assert again == table
    assert read_survival(out)[1] == tuple(table["calibration"])

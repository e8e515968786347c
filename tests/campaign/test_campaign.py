"""The programs of the campaign on small counts, and what the campaign says of what they find."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.__main__ import PROGRAMS
from tests.campaign.campaign import Campaign, Row

ROOT = Path(__file__).parents[2]
#: What small counts of these show is shown by the tests of `gpu_align.ops`, and by many requests of any program.
LONG_ALONE = {"exactness", "soak"}


def test_every_seam_changed(tmp_path: Path) -> None:
    """In a process of its own: modules of vLLM are changed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign.seams", "--quick"],
        cwd=ROOT,
        env={**os.environ, "CAMPAIGN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [Row(**row) for row in json.loads((tmp_path / "seams.json").read_text())["rows"]]
    assert rows
    assert all(row.passed or row.not_run for row in rows)


#: Programs that start engines or servers.
WITH_ENGINES = [name for name in PROGRAMS if name not in LONG_ALONE | {"seams", "turnovers"}]


@pytest.mark.parametrize(
    "program", ["turnovers", *(pytest.param(name, marks=pytest.mark.vllm) for name in WITH_ENGINES)]
)
def test_a_program_on_small_counts(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, so that its engines are forked from the process that those of other tests are forked from."""
    monkeypatch.setattr("tests.campaign.campaign.FOLDER", tmp_path)
    run = importlib.import_module(f"tests.campaign.{program}").run
    rows = list(run(Campaign(program, quick=True, seed=0)))
    assert rows
    kept = [path.read_text()[:4000] for path in tmp_path.glob("failures/*")]
    assert all(row.passed or row.not_run for row in rows), ([row.verdict for row in rows], kept)


def test_a_row_that_checked_too_little_has_failed() -> None:
    assert not Row("x", 9, 10).passed
    assert Row("x", 10, 10).passed
    assert not Row("x", 10, 10, failures=1).passed
    assert not Row("x", 0, 10, not_run="no GPU").passed


def test_a_failure_is_kept_and_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.campaign.campaign.FOLDER", tmp_path)
    campaign = Campaign("x", quick=True, seed=3)
    tally = campaign.tally("odd numbers", at_least=100, quick=10)
    while tally.goes_on():
        tally.check(tally.count % 2 == 0, case={(tally.count, "a key that JSON has not"): 1})
    row = tally.row()
    assert (row.count, row.failures) == (10, 5)
    kept = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert len(kept) == 5
    assert {case["seed"] for case in kept} == {3}

"""Every program of the campaign on small counts, and what the campaign says of what it finds."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import fill
from tests.campaign import __main__ as whole
from tests.campaign.__main__ import PAGE, PROGRAMS, REPORT, page
from tests.campaign.campaign import Campaign, Row, commit_of_code

ROOT = Path(__file__).parents[2]
#: Programs that start no engine or server.
IN_PROCESS = {"exactness", "sameness", "seams"}


@pytest.mark.parametrize("program", sorted(IN_PROCESS))
def test_a_program_that_starts_nothing(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.campaign.{program}", "--quick"],
        cwd=ROOT,
        env={**os.environ, "CAMPAIGN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [Row(**row) for row in json.loads((tmp_path / f"{program}.json").read_text())["rows"]]
    assert rows
    assert all(row.passed or row.not_run for row in rows)


@pytest.mark.vllm
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in IN_PROCESS])
def test_a_program_on_small_counts(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, so that its engines are forked from the process that those of other tests are forked from."""
    monkeypatch.setattr("tests.campaign.campaign.FOLDER", tmp_path)
    run = importlib.import_module(f"tests.campaign.{program}").run
    rows = list(run(Campaign(program, quick=True, seed=0)))
    assert rows
    kept = [path.read_text()[:4000] for path in tmp_path.glob("failures/*")]
    assert all(row.passed or row.not_run for row in rows), ([row.verdict for row in rows], kept)


def test_the_page_shows_the_report() -> None:
    text, found = (path.read_text(encoding="utf-8") for path in (PAGE, REPORT))
    assert fill(text, {"campaign": page}, json.loads(found)) == text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"commit": "abc"}, ""),
        (
            {"commit": "", "why no commit": "expected committed code, found changes in x.py"},
            "changes in x.py",
        ),
        ({"commit": "abc", "quick": True}, "found those of --quick"),
        (None, "expected a run, found none"),
    ],
)
def test_the_page_takes_rows_of_committed_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, object] | None, said: str
) -> None:
    monkeypatch.setattr(whole, "FOLDER", tmp_path)
    if found is not None:
        found |= {"date": "2026-01-01", "seed": 1, "share": 0.5, "rows": [vars(Row("odd numbers", 9, 9))]}
        (tmp_path / "seams.json").write_text(json.dumps(found))
    before = {"commit": "old", "machine": "m", "date": "2025-01-01", "seed": 0, "share": 1.0, "rows": []}
    report = {"programs": {"seams": before}}
    refused = whole.take_results(report, ["seams"])
    assert bool(refused) == bool(said)
    assert said in "".join(refused)
    lines = [line for line in page(report).splitlines() if "odd numbers" in line]
    assert report["programs"]["seams"]["commit"] == ("old" if said else "abc")
    cells = "| `seams` | odd numbers | 9 | 50% | passed | abc, 2026-01-01<!-- since abc --> |"
    assert lines == ([] if said else [cells])


def test_changed_code_is_of_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr("tests.campaign.campaign.ROOT", tmp_path)
    assert commit_of_code() == ("", "expected a git repository, found none")
    (tmp_path / "gpu_align").mkdir()
    file = tmp_path / "gpu_align" / "x.py"
    for text, also in (("1", "README.md"), ("2", "gpu_align/new.py")):
        file.write_text(text)
        (tmp_path / also).write_text(text)
        if text == "1":
            git("init")
            git("add", "gpu_align")
            git("commit", "-m", "x")
            commit, why_not = commit_of_code()
            assert (len(commit), why_not) == (40, "")
    assert commit_of_code() == (
        "",
        "expected committed code, found changes in gpu_align/x.py, gpu_align/new.py",
    )


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

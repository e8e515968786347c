"""``gpu-align report DIR``: sums over many step logs, why drafts were lost, the worst requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
import yaml
from typer.testing import CliRunner

from gpu_align import step_log
from gpu_align.tools import report
from gpu_align.tools.cli import app


def step(
    new: int, source: str = "none", proposed: int = 0, verified: int = 0, accepted: int = 0, why: str = ""
) -> Any:
    return {
        "step": 0, "position": 5, "new": [7] * new, "source": source, "proposed": [7] * proposed,
        "confidence": [0.5] * proposed, "duration_us": 1, "verified": verified, "accepted": accepted,
        "candidate": {"why": why} if why else None,
    }  # fmt: skip


def log(*steps: Any, name: str = "r", k: int = 4, prediction: int = 9) -> Any:
    return {
        "format": step_log.FORMAT, "request_id": name, "num_draft_tokens": k, "prompt_tokens": 5,
        "prediction_tokens": prediction, "steps": list(steps),
    }  # fmt: skip


AT_2, AT_31 = "the last 2 tokens occur in the prediction", "the last 31 tokens occur in the prediction"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    (folder / "day").mkdir(parents=True)
    good = log(step(1), step(5, "prediction", 4, 4, 4), name="good")
    bad = log(
        step(1), step(2, "prediction", 4, 4, 1, AT_2), step(1, "prediction", 4, 3, 0, AT_31),
        step(1, "context", 2, 2, 0), step(1),
        name="bad",
    )  # fmt: skip
    for path, content in (("a.yaml", good), ("day/b.yaml", bad), ("c.yaml", log(name="empty"))):
        (folder / path).write_text(yaml.safe_dump(content))
    (folder / "torn.yaml").write_text("format: gpu-align-steps/1\nsteps:\n")
    (folder / "notes.txt").write_text("not a log")
    return folder


def test_sums_sources_and_reasons(folder: Path) -> None:
    found = report.FolderCounts.read(folder)
    assert [request.file for request in found.requests] == ["a.yaml", "c.yaml", "day/b.yaml"]
    assert [name for name, _ in found.skipped] == ["torn.yaml"]
    assert found.sources == {
        "prediction": [3, 11, 5],
        "context": [1, 2, 0],
    }
    assert list(found.sources) == ["prediction", "context"]
    assert found.losses(10) == [
        ("prediction", "the last N tokens occur in the prediction", 6, 2),
        ("context", report.UNKNOWN, 2, 1),
        ("prediction", report.NOT_VERIFIED, 1, 1),
    ]
    assert found.losses(1)[0][2] == 6
    # Nothing is lost twice or forgotten: rejected, and proposed without being verified.
    assert sum(tokens for _, _, tokens, _ in found.losses(10)) == found.total("rejected") + 1


def test_the_worst_request_takes_most_steps_beyond_a_perfect_prediction(folder: Path) -> None:
    found = report.FolderCounts.read(folder)
    # K = 4: a perfect prediction writes 6 tokens in 1 + 1 steps, and 6 in 2.
    assert [(r.request_id, r.steps_lost) for r in found.worst(5)] == [("bad", 3), ("good", 0), ("empty", 0)]
    assert [r.request_id for r in found.worst(1)] == ["bad"]


@pytest.mark.parametrize(("tokens", "steps", "lost"), [(0, 0, 0), (1, 1, 0), (6, 2, 0), (7, 3, 0), (7, 7, 4)])
def test_steps_of_a_perfect_prediction(tmp_path: Path, tokens: int, steps: int, lost: int) -> None:
    sizes = [tokens - steps + 1, *[1] * (steps - 1)] if steps else []
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(log(*map(step, sizes))))
    [request] = report.FolderCounts.read(tmp_path).requests
    assert (request.output_tokens, request.steps, request.steps_lost) == (tokens, steps, lost)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    result = CliRunner().invoke(
        app, ["report", str(folder), "--json", str(out), "--html", str(page), "--top", "1"]
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("note: torn.yaml: ")
    assert "3 requests, 12 tokens in 7 steps, 1.7 a step; 5 drafts accepted, 8 rejected;" in result.stdout
    found = json.loads(out.read_text())
    assert (found["requests"], found["accepted"], found["rejected"], found["steps_lost"]) == (3, 5, 8, 3)
    assert [request["request_id"] for request in found["worst"]] == ["bad"]
    assert len(found["losses"]) == 1
    assert [skipped["file"] for skipped in found["skipped"]] == ["torn.yaml"]
    text = page.read_text()
    assert "day/b.yaml" in text
    assert "the last N tokens occur in the prediction" in text


def test_the_sums_are_those_of_the_single_reports(folder: Path) -> None:
    found = report.FolderCounts.read(folder)
    logs = [step_log.read_step_log(folder / request.file) for request in found.requests]
    assert found.total("output_tokens") == sum(log.output_tokens for log in logs)
    assert found.total("accepted") == sum(log.accepted for log in logs)
    assert found.total("rejected") == sum(log.rejected for log in logs)


def test_a_file_has_json_too(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    assert CliRunner().invoke(app, ["report", str(folder / "a.yaml"), "--json", str(out)]).exit_code == 0
    found = json.loads(out.read_text())
    assert (found["request_id"], found["steps"], found["accepted"]) == ("good", 2, 4)
    assert found["by_source"] == {"prediction": {"drafted": 4, "accepted": 4}}


def test_a_request_that_has_not_finished_is_skipped(folder: Path) -> None:
    whole = step_log.read_step_log(folder / "a.yaml")
    live = step_log.dump_live_head(whole) + "".join(map(step_log.dump_live_step, whole.steps))
    (folder / "a.yaml").write_text(live)
    found = report.FolderCounts.read(folder)
    assert [request.file for request in found.requests] == ["c.yaml", "day/b.yaml"]
    assert ("a.yaml", "the request has not finished") in found.skipped

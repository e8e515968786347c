"""Recipe tokens that the model refuted or confirmed, as a worker counts them, and the file they go to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_align import Recipes, Source
from gpu_align.ops.recipes import SHAPE_WINDOW
from gpu_align.recipes import Misses
from gpu_align.tools.recipes.misses import Miss
from tests.vllm_integration.fakes import FakeEngine, config, sampling, v1_alone
from vllm_integration.config.settings import Settings
from vllm_integration.wire.request import KEY, Prediction
from vllm_integration.worker import miss_log, request_drafter
from vllm_integration.worker.miss_log import ACCEPTED_OF, MissLog, open_miss_log
from vllm_integration.worker.proposer_v1 import PredictedOutputs

K = 4
RECIPES = Recipes.from_lists([([10], [11, 12, 13], [0.9, 0.9, 0.9]), ([20], [50], [0.9])])


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)


@pytest.fixture
def log(tmp_path: Path) -> MissLog:
    return MissLog(tmp_path / "new" / "x.misses.json", Misses(), RECIPES, K)


def take(log: MissLog, tokens: list[int], draft: list[int], source: int = Source.RECIPE) -> None:
    """One step of request "r": its tokens so far, and what is drafted behind them."""
    tails = np.zeros((1, log.tail_len), dtype=np.int32)
    last = tokens[-log.tail_len :]
    tails[0, log.tail_len - len(last) :] = last
    drafts = np.zeros((1, K), dtype=np.int64)
    drafts[0, : len(draft)] = draft
    log.take(["r"], np.array([len(tokens)]), np.array([source]), np.array([len(draft)]), drafts, tails)


def counted(log: MissLog) -> Misses:
    """All that it has written."""
    log.close()
    return log._misses


def refuted(misses: Misses) -> list[tuple[tuple[int, ...], int, int]]:
    """Context, expected, said; of those that were refuted."""
    counts = misses.counts
    return sorted((m.literal, m.expected, m.said) for m in counts if m.said != m.expected)


def num_accepted(misses: Misses) -> int:
    return sum(count for m, count in misses.counts.items() if m.said == m.expected)


def test_a_refuted_token_is_counted_with_what_was_said(log: MissLog, tmp_path: Path) -> None:
    log.add("r", 2)
    take(log, [1, 2, 10], [11, 12, 13])
    take(log, [1, 2, 10, 11, 99], [])
    take(log, [1, 2, 10, 11, 99, 5], [])
    log.close()
    found = Misses.load(tmp_path / "new" / "x.misses.json")
    assert refuted(found) == [((1, 2, 10, 11), 12, 99)]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "x.misses.json").stat().st_mode & 0o777 == 0o600


def test_the_longest_context_is_kept(log: MissLog, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(miss_log, "count_misses", lambda _, before, *more, **options: seen.append(before))
    log.add("r", 0)
    take(log, [*range(50)], [7])
    take(log, [*range(50), 9], [])
    assert seen == [[*range(50)][-SHAPE_WINDOW - 1 :]]


def test_only_recipe_tokens_of_requests_that_are_known_count(log: MissLog) -> None:
    take(log, [1, 2, 10], [11])
    take(log, [1, 2, 10, 99], [11])
    log.add("r", 2)
    take(log, [1, 2, 10, 99], [11], Source.CONTEXT)
    take(log, [1, 2, 10, 99, 98], [11], Source.PREDICTION)
    take(log, [1, 2, 10, 99, 98, 97], [11])
    log.finish(["r"])
    take(log, [1, 2, 10, 99, 98, 97, 96], [])
    assert refuted(counted(log)) == []


def test_a_step_that_nobody_saw_is_not_guessed_at(log: MissLog) -> None:
    log.add("r", 0)
    take(log, [10], [11])
    take(log, list(range(60)), [11])  # more tokens than a step can write
    take(log, [10], [11])  # taken back
    take(log, [10, 11], [])
    assert refuted(counted(log)) == []


def test_accepted_tokens_are_a_sample_that_counts_as_all(log: MissLog) -> None:
    for number in range(2 * ACCEPTED_OF):
        log.add("r", 0)
        take(log, [7, 10], [11, 12])
        take(log, [7, 10, 11, 12, 5], [])
        log.finish(["r"])
        assert num_accepted(counted(log)) == 2 * ACCEPTED_OF * ((number + 1) // ACCEPTED_OF)


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_file_is_written_now_and_then(
    is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing is served any more, and while drafts never cease."""
    monkeypatch.setattr(miss_log, "EVERY", 0.05 if is_busy else 60.0)
    monkeypatch.setattr(miss_log, "IDLE", 0.01)
    path = tmp_path / "x.misses.json"
    log = MissLog(path, Misses(), RECIPES, K)
    time.sleep(0.05)
    assert not path.exists()  # nothing is counted
    log.add("r", 0)
    end = 1
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        if is_busy or end == 1:
            take(log, [10] * end, [11])
            take(log, [10] * end + [99], [])
            end += 1
        else:
            time.sleep(0.01)
    assert path.exists()
    log.close()
    assert ((10,), 11, 99) in refuted(Misses.load(path))


def test_what_is_new_is_appended(log: MissLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x.misses.json"

    def write(tokens: range, said: int) -> bytes:
        for token in tokens:
            log._new.count(Miss((token,), (), 11, said))
        log.guard.run(log._write)
        return path.read_bytes()

    first = write(range(500), 99)
    again = write(range(3), 98) + write(range(3), 98)[len(first) :]
    assert again.startswith(first)
    assert again.count(b"\n") == 1 + 500 + 3 + 6  # the head, and no line twice
    path.write_bytes(path.read_bytes() + b"[[1],[],11,9")  # what a killed worker leaves behind
    found = Misses.load(path)
    assert found.counts == log._misses.counts
    assert (len(found), found.counts.total()) == (503, 506)
    # Written whole: where somebody has cleared the directory, and before a reader would refuse it for its length.
    path.unlink()
    whole = write(range(1), 97)
    assert whole.count(b"\n") == 1 + 504
    monkeypatch.setattr(miss_log, "MAX_BYTES", len(whole))
    assert len(write(range(1), 97)) == len(whole)
    assert Misses.load(path).counts == log._misses.counts
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_full_disk_costs_the_counts_and_one_line(
    log: MissLog, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str], strict: str
) -> None:
    monkeypatch.setenv("GPU_ALIGN_STRICT", strict)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(miss_log, "write_at_once", full)
    log.add("r", 0)
    for end in range(3):
        take(log, [10, *[99] * end], [11])
    for _ in range(2):
        log.close()
    assert not log.on
    [line] = plugin_log
    assert line.startswith(
        "gpu_align counts no recipe misses any more: OSError (No space left on device) at "
    )


def test_the_proposer_of_v1_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_proposer: Callable[[], PredictedOutputs]
) -> None:
    monkeypatch.setenv("GPU_ALIGN_RECIPE_MISSES", str(tmp_path / "m"))
    monkeypatch.setattr(miss_log, "tokenizer_of", lambda _: None)
    monkeypatch.setattr(miss_log, "fingerprint", lambda _: "sha256:0")
    ours = make_proposer()
    output = [10, 11, 12, 99, 20, 50, 7, 8, 9]
    engine = FakeEngine(ours)
    engine.submit("r", [1, 2, 3], output, sampling({KEY: Prediction(b"")}, max_tokens=len(output)))
    while len(engine.written["r"]) < len(output):
        engine.step()
    engine.step(finished=("r",))
    assert ours.miss_log is not None
    assert refuted(counted(ours.miss_log)) == [((1, 2, 3, 10, 11, 12), 13, 99)]
    assert engine.usage["r"].as_dict()["by_source"]["recipe"] == {"drafted": 4, "accepted": 3}


@pytest.fixture
def make_proposer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], PredictedOutputs]:
    v1_alone(monkeypatch)
    monkeypatch.setattr(request_drafter, "load_recipes", lambda settings, vllm_config: RECIPES)
    return lambda: PredictedOutputs(config())


def test_one_rank_counts_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(miss_log, "tokenizer_of", lambda _: None)
    monkeypatch.setattr(miss_log, "fingerprint", lambda _: "sha256:0")
    asked = Settings(recipe_misses=str(tmp_path / "m"), recipe_misses_shapes=True)
    opened = open_miss_log(asked, RECIPES, K, config())
    assert opened is not None
    assert opened._misses.shapes_only
    assert opened._misses.tokenizer == "sha256:0"
    assert str(os.getpid()) in opened._path.name
    assert open_miss_log(Settings(), RECIPES, K, config()) is None
    assert open_miss_log(asked, None, K, config()) is None
    assert open_miss_log(asked, RECIPES, K, config(rank=1, tp=2)) is None
    assert open_miss_log(asked, RECIPES, K, config(rank=2, tp=2)) is not None
    assert not plugin_log
    (tmp_path / "m").chmod(0o755)
    assert open_miss_log(asked, RECIPES, K, config()) is not None
    assert "mode 0755: other users can see into it" in plugin_log.pop()
    (tmp_path / "file").write_text("")
    assert open_miss_log(Settings(recipe_misses=str(tmp_path / "file")), RECIPES, K, config()) is None
    assert len(plugin_log) == 1

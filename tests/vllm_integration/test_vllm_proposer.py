"""The proposer's bookkeeping, against a drafter and an engine that check how they are used."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.vllm_integration.fakes import FakeEngine, config, sampling, v1_alone
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker import proposer_v1
from vllm_integration.worker.proposer_v1 import PredictedOutputs

pytestmark = pytest.mark.usefixtures("plugin_on")


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    v1_alone(monkeypatch)
    for name in ("STRICT", "DEBUG_DIR", "DRAFT_WITHOUT_PREDICTION", "MAX_PREDICTION_TOKENS"):
        monkeypatch.delenv(f"GPU_ALIGN_{name}", raising=False)


def predicted(token_ids: list[int], **overrides: Any) -> Any:
    return sampling(PredictedOutputParams(token_ids=token_ids).to_extra_args(), **overrides)


def test_a_perfect_prediction_takes_the_fewest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, sampled = PredictedOutputs(config(K=4)), []
    propose = ours.drafter.propose
    monkeypatch.setattr(ours.drafter, "propose", lambda *a: sampled.extend(a[3].tolist()) or propose(*a))
    engine = FakeEngine(ours)
    output = list(range(10, 40))
    engine.submit("a", [1, 2, 3], output, predicted(output, max_tokens=30))
    steps = 0
    while len(engine.written["a"]) < len(output):
        engine.step()
        steps += 1
    assert engine.written["a"] == output
    assert steps == 1 + math.ceil(29 / 5)
    assert sampled == [1, 5, 5, 5, 5, 5]
    assert engine.drafts["a"] == []  # nothing is proposed that max_tokens would cut off


def test_nothing_is_proposed_while_prefilling() -> None:
    ours = PredictedOutputs(config())
    engine = FakeEngine(ours)
    engine.submit("a", [1, 2], [5, 6, 7], predicted([5, 6, 7]))
    engine.submit("pooling", [1], [9, 9, 9], None)
    engine.step(prefilling=("a",))
    assert engine.drafts == {"a": [], "pooling": []}
    assert list(ours.slots) == []
    engine.step()
    assert engine.drafts == {"a": [6, 7], "pooling": []}
    assert ours.token_ids[0, :3].tolist() == [1, 2, 5]


def test_a_request_that_leaves_the_batch_is_rebuilt_when_it_returns() -> None:
    """Preempted or merely not scheduled: its slot goes to somebody else, its drafts stay the same."""
    ours = PredictedOutputs(config(max_num_seqs=1))
    engine = FakeEngine(ours)
    output = list(range(20, 40))
    engine.submit("a", [1, 2], output, predicted(output))
    engine.step()
    engine.step()
    before = list(engine.drafts["a"])
    engine.rows.remove("a")
    engine.drafts.clear()
    engine.submit("b", [3], [60, 61, 62], predicted([60, 61, 62]))
    engine.step()
    assert list(ours.slots) == ["b"]
    assert engine.drafts["b"] == [61, 62]
    engine.rows[:] = ["a"]
    engine.step(finished=("b",), prefilling=("a",))
    assert list(ours.slots) == []
    engine.step()
    assert engine.drafts["a"] == [token + 1 for token in before]
    known = [1, 2, *engine.written["a"]]
    assert ours.token_ids[0, : len(known)].tolist() == known


def test_tokens_that_vllm_takes_back_rebuild_the_slot() -> None:
    ours = PredictedOutputs(config())
    engine = FakeEngine(ours)
    output = list(range(20, 50))
    engine.submit("a", [1], output, predicted(output))
    for _ in range(3):
        engine.step()
    engine.written["a"] = output[:2]
    engine.drafts["a"] = []
    engine.step()
    assert engine.drafts["a"] == output[3:7]
    assert ours.requests["a"].synced == 4


def test_near_max_model_len_vllm_still_asks_for_drafts() -> None:
    """Where K tokens more do not fit for one request, it would schedule K zeros for all."""
    for drafter, fits in ((PredictedOutputs(config()), True), (object(), False)):
        asked = wrapped_by(proposer_v1.input_fits_in_drafter)(lambda self, metadata: False)
        runner = SimpleNamespace(drafter=drafter)
        assert (asked(runner, "a batch"), asked(runner, None)) == (fits, False)


def test_no_draft_goes_on_after_a_stop_token() -> None:
    ours = PredictedOutputs(config(K=6))
    engine = FakeEngine(ours)
    engine.submit("a", [1], [5, 6, 2, 7, 8, 9], predicted([5, 6, 2, 7, 8, 9], eos_token_id=2))
    engine.step()
    assert engine.drafts["a"] == [6, 2]
    engine.step()
    assert engine.drafts["a"] == []


@pytest.mark.parametrize(("rank", "tp", "writes"), [(0, 1, True), (0, 2, True), (1, 2, False), (2, 2, True)])
def test_the_step_log_is_written_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, tp: int, writes: bool
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path))
    ours = PredictedOutputs(config(rank=rank, tp=tp))
    engine = FakeEngine(ours)
    engine.submit("a", [1, 2], [5, 6, 7, 8], predicted([5, 6, 9, 8]))
    for _ in range(3):
        engine.step()
    engine.step(finished=("a",))
    if not writes:
        assert list(tmp_path.iterdir()) == []
        return
    document = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert document["prompt_tokens"] == 2
    assert document["prediction_tokens"] == 4
    steps = document["steps"]
    assert [step["new"] for step in steps] == [[5], [6, 7], [8]]
    assert [step["proposed"] for step in steps] == [[], [6, 9, 8], [8]]
    assert [step["position"] for step in steps] == [2, 3, 5]
    assert [step["source"] for step in steps] == ["none", "prediction", "prediction"]
    assert document["usage"]["accepted"] == 1
    assert document["usage"]["rejected"] == 3  # the last token is always the model's own

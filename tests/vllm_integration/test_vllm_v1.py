"""V1's proposer: its bookkeeping, against a drafter and an engine that check how they are used; and what vLLM's V1
does differently with a speculative configuration, undone for ours."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from gpu_align import Drafter
from gpu_align.ops import jit
from tests.vllm_integration.fakes import FakeEngine, config, sampling
from vllm_integration.seams import guard
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire.reports import DRAFTING
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker import proposer_v1
from vllm_integration.worker.proposer_v1 import PredictedOutputs


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposer without vLLM around it."""
    monkeypatch.setattr(proposer_v1, "install", lambda group: "")
    monkeypatch.setattr(proposer_v1, "watch", lambda: None)


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
    engine = FakeEngine(PredictedOutputs(config(rank=rank, tp=tp)))
    engine.submit("a", [1, 2], [5, 6, 7], predicted([5, 6, 7]))
    engine.step()
    engine.step(finished=("a",))
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"] * writes


@pytest.mark.parametrize("everybody", ["0", "1"])
def test_nothing_is_drafted_for_a_request_with_a_thinking_budget(
    monkeypatch: pytest.MonkeyPatch, everybody: str
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DRAFT_WITHOUT_PREDICTION", everybody)
    engine = FakeEngine(PredictedOutputs(config()))
    engine.submit("with", [1], [5, 6, 7, 8], predicted([5, 6, 7, 8], thinking_token_budget=0))
    engine.submit("without", [1], [5, 6, 7, 8], predicted([5, 6, 7, 8]))
    engine.step()
    assert engine.drafts == {"with": [], "without": [6, 7, 8]}


def test_drafting_goes_on_after_a_minute(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    """And at once after two faults. What the drafter knew of requests is given to it again."""
    clock = [0.0]
    monkeypatch.setattr(guard.time, "monotonic", lambda: clock[0])
    engine, text = FakeEngine(PredictedOutputs(config())), list(range(10, 60))
    engine.submit("a", [1, 2], text, predicted(text))
    for faults, seconds, drafts_in_between in ((2, 0.0, True), (3, 59.0, False), (0, 2.0, True)):
        with monkeypatch.context() as patch:
            patch.setattr(Drafter, "propose", lambda *_: 1 / 0)
            for _ in range(faults):
                engine.step()
                assert not engine.drafts["a"]
        clock[0] += seconds
        engine.step()
        engine.step()
        assert bool(engine.drafts["a"]) == drafts_in_between, (faults, seconds)
        assert (DRAFTING in engine.report.faults) is not drafts_in_between
    assert engine.written["a"] == text[: len(engine.written["a"])]
    assert "works again" in plugin_log[-1]


@pytest.mark.skipif(not jit.COMPILED, reason="needs Numba")
@pytest.mark.parametrize("logs", [True, False])
def test_the_first_request_of_v1_compiles_nothing(
    logs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path) if logs else "")
    ours = PredictedOutputs(config())
    at_start = {"step_reference": 1, **({"_look": 1} if logs else {})}
    assert compilations == at_start
    engine, output = FakeEngine(ours), [5, 6, 7, 8, 9, 10]
    engine.submit("a", [1, 2], output, predicted(output))
    engine.step()
    assert engine.drafts["a"]
    engine.step()
    engine.step(finished=("a",))
    assert compilations == at_start
    if logs:
        log = " ".join((tmp_path / "a.yaml").read_text().split())
        assert "the output so far is the beginning of the prediction" in log


# --- thinking_token_budget ---

START, END, BUDGET = 1, 2, 3


def served(drafts: int, *, mended: bool = True) -> list[list[int]]:
    """What two requests write in steps of the ordinary sampler, with a model that always prefers token 7; the
    second one has a budget, and thinks from its prompt on."""
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=[START],
        reasoning_end_token_ids=[END],
        natural_reasoning_end_token_ids=[END],
    )
    holder = ThinkingBudgetStateHolder(reasoning, 2, drafts, torch.device("cpu"), False)
    metadata = SimpleNamespace(logprob_token_ids={"r": [5]}, thinking_budget_state_holder=holder)
    runner = SimpleNamespace(input_batch=SimpleNamespace(sampling_metadata=metadata))

    def original(self: Any, logits: torch.Tensor, drafts: Any) -> None:
        holder.apply_to_logits(logits, False, [[], []])

    sample = wrapped_by(proposer_v1.sample)(original) if mended else original
    params = [SimpleNamespace(thinking_token_budget=budget) for budget in (None, BUDGET)]
    written: list[list[int]] = [[], []]
    added = [(row, params[row], [START], written[row]) for row in range(2)]
    holder.sync_batch(SimpleNamespace(removed=[], added=added, moved=[]))
    for _ in range(8):
        logits = torch.zeros((2, 9))
        logits[:, 7] = 1
        holder.update_state(written, [[], []])
        sample(runner, logits, SimpleNamespace(num_draft_tokens=[0, 0]) if drafts else None)
        for row, token in enumerate(logits.argmax(dim=-1).tolist()):
            written[row].append(token)
    assert holder.in_spec_mode == (drafts > 0)
    return written


def test_thinking_ends_where_it_ends_without_drafts() -> None:
    expected = [[7] * 8, [7] * BUDGET + [END] + [7] * 4]
    assert served(0) == served(4) == expected
    assert served(0, mended=False) == expected
    assert served(4, mended=False)[0] != expected[0], "vLLM has mended it: the wrapper can go"


@pytest.mark.parametrize(
    ("scored", "drafts", "given"),
    [({}, [0, 0], "drafts"), ({"r": [5]}, [0, 1], "drafts"), ({"r": [5]}, [0, 0], None)],
)
def test_the_ordinary_sampler_answers_logprob_token_ids(
    scored: dict[str, list[int]], drafts: list[int], given: str | None
) -> None:
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    batch = SimpleNamespace(
        sampling_metadata=SimpleNamespace(logprob_token_ids=scored, thinking_budget_state_holder=None)
    )
    sample = wrapped_by(proposer_v1.sample)(lambda self, logits, metadata: metadata and "drafts")
    assert sample(SimpleNamespace(input_batch=batch), "logits", metadata) == given


# --- two faults of the rejection sampler, met in vLLM's own functions and mended in them ---


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with our wrappers, whether or not an engine of this process has put them there."""
    for name, wrapper in (
        ("apply_sampling_constraints", proposer_v1.constraints),
        ("expand_batch_to_tokens", proposer_v1.expand),
    ):
        original = getattr(rejection_sampler, name)
        original = getattr(original, "__wrapped__", original)
        monkeypatch.setattr(rejection_sampler, name, wrapped_by(wrapper)(original))
    return rejection_sampler


def constraints(*, temperature: list[float], top_k: list[int]) -> Any:
    return SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=None,
    )


def test_a_step_without_drafts_has_nothing_to_constrain(mended: Any) -> None:
    logits = torch.zeros((0, 11))
    given = constraints(temperature=[1.0, 0.0], top_k=[3, 11])
    assert mended.apply_sampling_constraints(logits, torch.tensor([0, 0], dtype=torch.int32), given) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_each_draft_gets_the_value_of_its_request(mended: Any, dtype: torch.dtype) -> None:
    x, ends = torch.tensor([7, 0, 5, 9], dtype=dtype), torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    expanded = mended.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
    assert expanded.tolist() == [7, 7, 1, 1, 1, 9]
    assert expanded.dtype == dtype
    assert x.tolist() == [7, 0, 5, 9]
    assert mended.expand_batch_to_tokens(x, ends * 0, 0).tolist() == []
    assert mended.expand_batch_to_tokens(x * 0 + 1, ends, 6).tolist() == [1] * 6  # nothing is replaced


def test_drafts_are_scaled_and_masked_by_their_own_request(mended: Any) -> None:
    """A greedy request keeps its logits; one at a temperature has them divided, and `top_k` of them left."""
    row = torch.tensor([1.0, 4.0, 2.0, 3.0])
    given = constraints(temperature=[0.0, 0.5], top_k=[4, 2])
    ends = torch.tensor([1, 3], dtype=torch.int32)
    constrained = mended.apply_sampling_constraints(row.repeat(3, 1), ends, given)
    none = -float("inf")
    assert constrained.tolist() == [[1.0, 4.0, 2.0, 3.0], [none, 8.0, none, 6.0], [none, 8.0, none, 6.0]]

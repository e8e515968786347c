"""V1's proposer in what no engine of tests/vllm does: tokens taken back, thinking budgets. And what vLLM's V1 does
differently with a speculative configuration, undone for ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from tests.vllm_integration.fakes import config
from vllm_integration.seams import guard
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire.reports import ATTRIBUTE, take
from vllm_integration.wire.request import PredictedOutputParams, RequestContent
from vllm_integration.worker import proposer_v1
from vllm_integration.worker.proposer_v1 import PredictedOutputs
from vllm_integration.worker.requests import StopRule


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposer without vLLM around it."""
    monkeypatch.setattr(proposer_v1, "install", lambda group: "")
    monkeypatch.setattr(proposer_v1, "watch", lambda: None)


def test_tokens_that_vllm_takes_back_rebuild_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV transfer that failed."""
    ours, output = PredictedOutputs(config()), list(range(20, 50))
    request = proposer_v1._Request(RequestContent(np.array(output, np.int32)), StopRule(), prompt_len=1)
    ours.requests["a"], added, add = request, list[int](), ours.add
    monkeypatch.setattr(ours, "add", lambda slot, *more: added.append(slot) or add(slot, *more))
    for length in (1, 6, 2):
        assert (
            ours._room_of("a", request, output[length - 1 : length], np.array([9, *output]), 1 + length) == 4
        )
        draft = ours._draft(["a"], [1], [4])
        assert draft.token_ids.tolist() == [output[length : length + 4]]
    assert (request.synced, ours.slots, added) == (3, {"a": 0}, [0, 0])
    # Preempted, or not scheduled: the slot is free.
    nothing = SimpleNamespace(scheduled_spec_decode_tokens={}, finished_req_ids=(), scheduled_new_reqs=())
    ours.observe(SimpleNamespace(input_batch=SimpleNamespace(req_ids=[])), nothing)
    assert (request.synced, ours.slots) == (0, {})


@pytest.mark.parametrize("budget", [None, 0])
def test_nothing_is_drafted_for_a_request_with_a_thinking_budget(budget: int | None) -> None:
    ours, extra = PredictedOutputs(config()), PredictedOutputParams(token_ids=[5, 6]).to_extra_args()
    ours._batch = SimpleNamespace(req_ids=["a"], num_prompt_tokens=[1])
    ours._admit("a", SamplingParams(extra_args=extra, thinking_token_budget=budget))
    assert bool(ours.requests) == (budget is None)


def test_an_engine_reports_neither_faults_nor_refusals_of_another(plugin_log: list[str]) -> None:
    """Two in a process: the scheduler of one without faults grants slots, and each counts its own refusals."""
    broken, whole = PredictedOutputs(config()), PredictedOutputs(config())
    broken.guard.end(RuntimeError("no kernel"))
    broken.refused.tell("a", "malformed", "Request %s is refused")
    reports: list[Any] = []
    for ours in (whole, broken):
        output = ours.leaves(SimpleNamespace())
        reports.append(take(output) if hasattr(output, ATTRIBUTE) else None)
    assert reports[0] is None
    assert (list(reports[1].faults), reports[1].refused) == (["drafting"], {"a": "malformed"})
    assert list(guard.faults()) == ["drafting"], "the process has it"
    assert len(plugin_log) == 2


def test_no_draft_goes_over_a_limit_that_vllm_has_lowered() -> None:
    """`--max-model-len auto`, whose limit is known after the start."""
    given, output = config(), list(range(20, 84))
    ours = PredictedOutputs(given)
    given.model_config.max_model_len = 32
    extra = PredictedOutputParams(token_ids=output).to_extra_args()
    new = SimpleNamespace(req_id="a", sampling_params=SamplingParams(max_tokens=99, extra_args=extra))
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, finished_req_ids=(), scheduled_new_reqs=[new])
    batch = SimpleNamespace(req_ids=["a"], num_prompt_tokens=[1])
    ours.observe(SimpleNamespace(input_batch=batch), step)
    request, row = ours.requests["a"], np.array([9, *output])
    assert (ours.drafter.token_ids.shape, len(request.content.token_ids)) == ((4, 32), 32)
    for total_len, room in ((20, 4), (28, 3), (30, 1), (31, 0)):
        assert ours._room_of("a", request, [output[total_len - 2]], row, total_len) == room
    assert ours._room_of("a", request, [output[8]], row, 10) == 4
    assert ours._draft(["a"], [1], [4]).token_ids.tolist() == [output[9:13]]


def test_near_max_model_len_vllm_still_asks_for_drafts() -> None:
    """Where K tokens more do not fit for one request, it would schedule K zeros for all."""
    for drafter, fits in ((PredictedOutputs(config()), True), (object(), False)):
        asked = wrapped_by(proposer_v1.input_fits_in_drafter)(lambda self, metadata: False)
        runner = SimpleNamespace(drafter=drafter)
        assert (asked(runner, "a batch"), asked(runner, None)) == (fits, False)


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

"""What vLLM does differently with a speculative configuration, undone for ours: without an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_integration.fakes import FakeEngine, config, sampling, v1_alone
from vllm_integration import PredictedOutputParams
from vllm_integration.config import engine_config
from vllm_integration.frontend.inputs import engine_of_request, process_inputs
from vllm_integration.seams import install
from vllm_integration.seams.install import wrapped_by
from vllm_integration.worker import proposer_v1
from vllm_integration.worker.proposer_v1 import PredictedOutputs

pytestmark = pytest.mark.usefixtures("plugin_on")


def engine_config_of(
    *, v2: bool = False, scheduler: Any = engine_config.V1_SCHEDULER, method: str = "custom_class"
) -> Any:
    vllm_config = config()
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = v2
    vllm_config.scheduler_config = SimpleNamespace(
        scheduler_cls=scheduler, async_scheduling=False, max_num_seqs=4, max_num_batched_tokens=2048
    )
    return vllm_config


# More drafts than V1's sampler takes.


V1: dict[str, Any] = {}
V2 = {"v2": True, "scheduler": None}


@pytest.mark.parametrize(
    ("settings", "asked", "room", "used", "why"),
    [
        *((V1, asked, 2048, min(asked, 128), "V1 sampler verifies") for asked in (1, 127, 128, 129, 1000)),
        (V2, 63, 64, 63, ""),
        (V2, 64, 64, 63, "the most that fit"),
        (V2, 200, 64, 63, "the most that fit"),
        (V2, 200, 2048, 200, ""),
        (V2, 1, 1, 1, ""),
        ({"method": "ngram"}, 200, 64, 200, ""),
    ],
)
def test_no_more_drafts_than_the_sampler_verifies_or_a_batch_has_room_for(
    settings: dict[str, Any], asked: int, room: int, used: int, why: str, plugin_log: list[str]
) -> None:
    pytest.importorskip("vllm.config.vllm")
    vllm_config = engine_config_of(**settings)
    vllm_config.scheduler_config.max_num_batched_tokens = room
    vllm_config.speculative_config.num_speculative_tokens = asked
    seen: list[int] = []
    for _ in range(2):  # vLLM may make a configuration again
        engine_config.post_init(
            lambda made: seen.append(made.speculative_config.num_speculative_tokens), vllm_config
        )
    assert seen == [used, used]
    said = [line for line in plugin_log if "num_speculative_tokens" in line]
    assert len(said) == (asked > used)
    assert all(f"is {asked}; gpu_align uses {used}, " in line and why in line for line in said)


# min_p and logit_bias.


@pytest.fixture
def verify() -> Callable[[Any, Any], Any]:
    """`verify(params, vllm_config)`: vLLM's check of a request, within our wrapped `process_inputs`."""
    sampling_params = pytest.importorskip("vllm.sampling_params")
    from vllm_integration.frontend import inputs as parameters

    check = sampling_params.SamplingParams._validate_spec_decode
    check = wrapped_by(parameters.validate)(getattr(check, "__wrapped__", check))

    def verified(params: Any, vllm_config: Any) -> Any:
        def original(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
            check(params, self.vllm_config.speculative_config)
            return params

        return process_inputs(original, SimpleNamespace(vllm_config=vllm_config), "r", "prompt", params)

    return verified


PARAMETERS = [{"min_p": 0.2}, {"logit_bias": {3: 5.0}}, {"min_p": 0.2, "logit_bias": {3: 5.0}}]


@pytest.mark.parametrize("given", PARAMETERS, ids=str)
@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ({}, False),
        (V2, True),
        ({**V2, "method": "ngram"}, False),
        ({**V2, "off": "a seam is missing"}, False),
    ],
    ids=["V1", "V2", "another drafter", "the plugin off"],
)
def test_parameters_that_vllm_refuses_are_served_where_drafts_are_verified_by_them(
    verify: Callable[[Any, Any], Any],
    given: dict[str, Any],
    settings: dict[str, Any],
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params, settings = SamplingParams(**given), dict(settings)
    monkeypatch.setattr(install, "_off_reason", settings.pop("off", None))
    if not served:
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            verify(params, engine_config_of(**settings))
    else:
        assert verify(params, engine_config_of(**settings)) is params
    assert (params.min_p, params.logit_bias) == (given.get("min_p", 0.0), given.get("logit_bias"))
    assert engine_of_request.get() is None


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch) -> PredictedOutputs:
    """K = 4, without vLLM."""
    v1_alone(monkeypatch)
    return PredictedOutputs(config(K=4))


def predicted(output: list[int], **more: Any) -> Any:
    return sampling(PredictedOutputParams(token_ids=output).to_extra_args(), **more)


@pytest.mark.parametrize("everybody", ["0", "1"])
def test_v1_drafts_for_no_request_with_a_thinking_budget(
    proposer: PredictedOutputs, monkeypatch: pytest.MonkeyPatch, everybody: str
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DRAFT_WITHOUT_PREDICTION", everybody)
    ours = PredictedOutputs(config(K=4))
    engine = FakeEngine(ours)
    engine.submit("with", [1], [5, 6, 7, 8], predicted([5, 6, 7, 8], thinking_token_budget=0))
    engine.submit("without", [1], [5, 6, 7, 8], predicted([5, 6, 7, 8]))
    engine.step()
    assert engine.drafts == {"with": [], "without": [6, 7, 8]}
    engine.step(finished=("with", "without"))


# thinking_token_budget on V1.

START, END, BUDGET = 1, 2, 3


def served(drafts: int, *, mended: bool = True) -> list[list[int]]:
    """What two requests write in steps of the ordinary sampler, with a model that always prefers token 7; the
    second one has a budget, and thinks from its prompt on."""
    state = pytest.importorskip("vllm.v1.sample.thinking_budget_state")
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=[START],
        reasoning_end_token_ids=[END],
        natural_reasoning_end_token_ids=[END],
    )
    holder = state.ThinkingBudgetStateHolder(reasoning, 2, drafts, torch.device("cpu"), False)
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


# Two faults of V1's rejection sampler, met in vLLM's own functions and mended in them.


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with our wrappers, whether or not an engine of this process has put them there."""
    rejection_sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
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

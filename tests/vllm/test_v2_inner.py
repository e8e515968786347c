"""Beside a drafter of vLLM's: who brings a prediction is drafted for by us, everybody else by the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_align.drafter.step_log import read_step_log
from tests.vllm.engines import SHORT, Request, Run, V2Engine, edited, prompt_of
from tests.vllm.tiny_llama import Greedy
from vllm_integration.seams.guard import Guard

pytestmark = pytest.mark.vllm

K, INNER, N = 16, 3, 40
#: Blocks of the KV cache for eight short requests, but not for eight longer ones.
TIGHT = {"num_gpu_blocks_override": 26}


@pytest.fixture(scope="session")
def head_of(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Heads for the tiny model, none of them trained: its first layer, and a projection of what it is given."""
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_model / "model.safetensors")
    size = weights["model.embed_tokens.weight"].shape[1]
    first = "model.layers.0."
    layer = {name.removeprefix(first): each for name, each in weights.items() if name.startswith(first)}
    ones, eye = torch.ones(size), torch.eye(size)
    own: dict[str, dict[str, Any]] = {
        "eagle3": {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        # The layers of Xiaomi's MiMo are Qwen2's, of which a Llama's are a special case.
        "mtp": {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1},
    }

    @cache
    def head(method: str) -> Path:
        directory = tmp_path_factory.mktemp(method)
        before = {"eagle3": "midlayer.", "mtp": "model.mtp_layers.0."}[method]
        head = {before + name: each for name, each in layer.items()}
        if method == "eagle3":
            for name in ("q_proj", "k_proj", "v_proj"):  # embedding and state beside each other
                half = head.pop(f"{before}self_attn.{name}.weight")
                head[f"{before}self_attn.{name}.weight"] = torch.cat([half, half], dim=1)
            head |= {"fc.weight": torch.cat([eye, eye, eye], dim=1), f"{before}hidden_norm.weight": ones}
            head |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                head[f"{before}self_attn.{name}.bias"] = torch.zeros(len(layer[f"self_attn.{name}.weight"]))
            head |= {f"{before}{name}_layernorm.weight": ones for name in ("token", "hidden", "final")}
            head[f"{before}input_proj.weight"] = torch.cat([eye, eye], dim=1)
            head |= {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        save_file({name: each.clone() for name, each in head.items()}, directory / "model.safetensors")
        config = json.loads((tiny_model / "config.json").read_text()) | own[method]
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return head


@pytest.fixture(scope="session")
def inner_of(tiny_model: Path, head_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """vLLM's speculative configuration of each drafter that runs under the interpreter."""

    def config(method: str) -> dict[str, Any]:
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": INNER}
        if method == "ngram_gpu":
            return {**config, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
        return {**config, "model": str(tiny_model if method == "draft_model" else head_of(method))}

    return config


Start = Callable[..., V2Engine]


@pytest.fixture(scope="session")
def start_beside(start_engine: Start, inner_of: Callable[[str], dict[str, Any]]) -> Start:
    def start(name: str, method: str, more: dict[str, str] | None = None, **settings: Any) -> V2Engine:
        environment = {**SHORT, "GPU_ALIGN_DRAFTER": json.dumps(inner_of(method)), **(more or {})}
        return start_engine(name, num_draft_tokens=K, environment=environment, **settings)

    return start


def mixed(greedy: Greedy, prompt_len: int = 12, n: int = N) -> list[Request]:
    prompts = [prompt_of(seed, prompt_len) for seed in range(8)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    predictions = [outputs[i] if i % 4 == 1 else edited(outputs[i], i) for i in range(8)]
    return [Request(prompt, predictions[i] if i % 2 else None, n) for i, prompt in enumerate(prompts)]


#: vLLM's drafter → whether scheduling is asynchronous.
DRAFTERS = {"draft_model": False, "eagle3": True, "mtp": False, "ngram_gpu": True}


def beside(start_beside: Start, method: str) -> tuple[V2Engine, dict[str, Any]]:
    """The engine, and how one without us is set up for the same drafter."""
    settings: dict[str, Any] = {"asynchronous": True} if DRAFTERS[method] else {}
    if method == "mtp":  # that layer is part of its model
        settings["hf_overrides"] = {"num_nextn_predict_layers": 1}
    # A failure of the model's drafter is injected at the end.
    more = {"GPU_ALIGN_STRICT": "0"} if method == "draft_model" else {}
    return start_beside(method, method, more, **settings, **TIGHT), settings


@pytest.mark.parametrize("method", DRAFTERS)
def test_each_request_has_the_steps_of_its_own_drafter(
    method: str,
    start_beside: Start,
    start_engine: Start,
    inner_of: Callable[[str], dict[str, Any]],
    greedy: Greedy,
) -> None:
    """The text is the model's own; beside a model that drafts, the steps are those of either drafter alone."""
    requests = mixed(greedy)
    engine, settings = beside(start_beside, method)
    run = engine.run(requests)
    assert run.preemptions == 0
    assert run.outputs == [greedy(request.prompt, N) for request in requests]
    ours = [i for i, request in enumerate(requests) if request.prediction]
    theirs = [i for i in range(len(requests)) if i not in ours]
    assert {drafts for i in theirs for _, drafts, _ in run.of(i)[2:-2]} == {INNER}
    assert max(drafts for i in ours for _, drafts, _ in run.of(i)) == K
    check_sources(run, ours)
    if method != "draft_model":
        return
    alone = {"num_draft_tokens": INNER, "speculative_config": inner_of(method), **settings}
    for name, own, how in (("them", theirs, alone), ("us", ours, {"num_draft_tokens": K})):
        apart = start_engine(name, environment=SHORT, **how).run([requests[i] for i in own])
        assert [run.verification_steps(i) for i in own] == [
            apart.verification_steps(i) for i in range(len(own))
        ]


def check_sources(run: Run, ours: list[int]) -> None:
    """Whose drafts the front end has counted, a request: those of one drafter."""
    for i, answer in enumerate(run.answers):
        usage, steps = answer["usage"], run.of(i)
        assert usage["output_tokens"] == len(answer["token_ids"])
        if i in ours:
            assert set(usage["by_source"]) <= {"prediction", "context"}
            continue
        # Asynchronous scheduling may have planned a step more when a request ends.
        verified = sum(drafts for _, drafts, sampled in steps if sampled)
        accepted = sum(max(0, sampled - 1) for _, _, sampled in steps)
        assert usage["by_source"] == {"draft_model": {name: usage[name] for name in ("drafted", "accepted")}}
        assert verified - INNER <= usage["drafted"] <= verified
        assert accepted - INNER <= usage["accepted"] <= accepted


def test_steps_in_which_ours_is_empty_can_have_the_models(start_beside: Start, greedy: Greedy) -> None:
    """As the step log shows: each step's draft is of one drafter."""
    fills = {"GPU_ALIGN_DRAFTER_FILLS": "1"}
    engine = start_beside("inner-fills", "draft_model", fills, step_log=True)
    prompts = [prompt_of(seed) for seed in range(3)]
    outputs = [greedy(prompt, N) for prompt in prompts]
    predictions = [prompt_of(1000, 30), outputs[1], edited(outputs[2], 2)]
    run = engine.run([Request(*each, N) for each in zip(prompts, predictions, strict=True)])
    assert run.outputs == outputs
    assert run.verification_steps(0) <= N // (INNER + 1) + 3  # alone it would have N
    assert run.verification_steps(1) <= 4
    logs = {log.request_id.split("-")[0]: log for log in map(read_step_log, engine.steps.iterdir())}
    for i, answer in enumerate(run.answers):
        steps = logs[str(i)].steps
        assert logs[str(i)].usage()["by_source"] == answer["usage"]["by_source"]
        for step in steps:
            assert len(step.proposed) == INNER or step.source != "draft_model"
    assert run.answers[0]["usage"]["by_source"].keys() >= {"draft_model"}
    assert run.answers[2]["usage"]["by_source"].keys() >= {"draft_model", "prediction"}


def with_ours(propose: Callable[..., Any], num_ranks: int = 1) -> tuple[Any, Any]:
    """A drafter of vLLM's that proposes so, with ours, which takes what that one says; and ours."""
    from vllm_integration.worker.speculator import with_predictions

    ours: Any = SimpleNamespace(num_ranks=num_ranks, inner=Guard("inner drafter", "uses none"))
    ours.propose = lambda *_, **given: given["models"]
    theirs = type(
        "Theirs", (), {"num_speculative_steps": INNER, "propose": lambda self, *_, **given: propose(**given)}
    )
    return with_predictions(theirs(), ours), ours


@pytest.mark.parametrize(("num_ranks", "dummy_run"), [(2, False), (1, True), (1, False)])
def test_an_inner_drafter_that_fails_on_several_ranks_ends_the_engine(
    num_ranks: int, dummy_run: bool
) -> None:
    """And at its start. On one rank requests go on without the model's drafts."""
    speculator, ours = with_ours(lambda **_: [].index("out of luck"), num_ranks)
    if num_ranks > 1 or dummy_run:
        with pytest.raises(ValueError, match="out of luck"):
            speculator.propose(*[None] * 6, dummy_run=dummy_run)
    else:
        assert speculator.propose(*[None] * 6) is None
    assert ours.inner.is_off is (num_ranks == 1 and not dummy_run)


@pytest.mark.parametrize(("asked", "told"), [(None, None), (0, 0), (INNER - 1, INNER - 1), (K, INNER)])
def test_vllms_drafter_hears_how_many_of_its_drafts_can_be_used(asked: int | None, told: int | None) -> None:
    """None where all requests read their prompts, or write their last token: it does not work for nothing."""
    models, heard = torch.zeros((1, INNER)), []
    speculator, _ = with_ours(
        lambda num_speculative_tokens=None, **_: heard.append(num_speculative_tokens) or models
    )
    drafts = speculator.propose(*[None] * 6, num_speculative_tokens=asked)
    assert heard == [told]
    assert drafts is (None if asked == 0 else models)


@pytest.mark.parametrize("method", DRAFTERS)
def test_preempted_requests_resume_where_they_were(method: str, start_beside: Start, greedy: Greedy) -> None:
    engine, _ = beside(start_beside, method)
    requests = mixed(greedy, 72, 60)[::-1]  # the youngest is not ours
    run = engine.run(requests)
    assert run.preemptions > 0
    assert run.outputs == [greedy(request.prompt, 60) for request in requests]
    assert not any(engine.ask("held").values())


def test_the_models_drafter_fails_in_a_step(start_beside: Start, greedy: Greedy) -> None:
    """Its requests go on without drafts, ours with theirs."""
    engine, _ = beside(start_beside, "draft_model")
    assert engine.warnings() == []
    engine.execute(
        "from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as module\n"
        "kind = module.StandaloneARSpeculator\n"
        "def failing(self, *args, propose=kind.propose, calls=[], **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 6: raise RuntimeError('out of luck')\n"
        "    return propose(self, *args, **kwargs)\n"
        "kind.propose = failing\n"
    )
    requests = mixed(greedy)
    run = engine.run(requests)
    assert run.outputs == [greedy(request.prompt, N) for request in requests]
    (line,) = engine.warnings()
    assert "gpu_align uses no drafter of the model's any more: RuntimeError at " in line
    assert run.verification_steps(1) <= 4
    assert run.verification_steps(0) > N // (INNER + 1) + 5
    late = run.of(0)[12:]
    assert late
    assert {drafts for _, drafts, _ in late} == {0}  # the scheduler knows

"""Models with recurrent layers on the real V2 runner: Mamba-2 with attention and alone, GDN with attention. Drafts
that come and go leave no trace in their states. Their step kernels are vLLM's own, interpreted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engines import SHORT, Request, Run, V2Engine, edited, prompt_of
from tests.vllm.tiny_llama import Greedy, greedy_by_transformers

pytestmark = pytest.mark.vllm

N = 16
SIZES: dict[str, Any] = {
    "vocab_size": 404, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
#: Family of transformers → more of its configuration, and how the layers run.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "FalconH1": (
        {
            **ATTENTION, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_ssm": 128, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 64,
        },
        "run_mamba_as_on_a_gpu()",
    ),
    "Mamba2": (
        {
            "num_heads": 2, "head_dim": 64, "expand": 2, "n_groups": 1, "state_size": 16, "conv_kernel": 4,
            "chunk_size": 64,
        },
        "run_mamba_as_on_a_gpu()",
    ),
    "Qwen3Next": (
        {
            **ATTENTION, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4, "mlp_only_layers": [0], "num_experts": 2, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
        "run_gdn_as_on_a_gpu()",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family][0])
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():  # wide, so that the greedy output wanders and rounding flips nothing
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        model.lm_head.weight[:4] = 0
    model.generation_config.eos_token_id = None
    directory = tmp_path_factory.mktemp(family)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def greedy(hybrid: Path) -> Greedy:
    return greedy_by_transformers(hybrid)


@pytest.fixture(scope="module")
def start(family: str, hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., V2Engine]:
    """Long prompts come in chunks, equal ones from the prefix cache, draft lengths a step late. The KV cache holds
    a few requests, so that others are preempted."""

    def start(environment: Mapping[str, str] = {}, **settings: Any) -> V2Engine:
        defaults = {"asynchronous": True, "delay_counts": True, "enable_prefix_caching": True}
        return V2Engine(
            hybrid,
            tmp_path_factory.mktemp("engine"),
            num_draft_tokens=4,
            environment={**SHORT, **environment},
            before=MODELS[family][1],
            skip_tokenizer_init=True,
            max_num_batched_tokens=40,
            num_gpu_blocks_override=22,
            **{**defaults, **settings},
        )

    return start


def wrong(engine: V2Engine, greedy: Greedy, count: int = 12) -> tuple[list[int], Run]:
    """Requests with other answers than transformers gives. Predictions are right, right at first, wrong at first,
    and none: rows with accepted, rejected and no drafts stand beside and follow each other."""
    draw = random.Random(5)
    requests: list[Request] = []
    for seed in range(count // 6):
        prompt = prompt_of(seed, draw.choice((8, 12, 50)))
        output = greedy(prompt, N)
        half = output[: N // 2] + prompt_of(seed + 500, 8)
        late = prompt_of(seed + 700, 6) + output[N // 2 :]
        for prediction in (None, output, half, late, edited(output, seed)):
            requests.append(Request(prompt, prediction, N))
    draw.shuffle(requests)
    for index, request in enumerate(requests):
        request.arrives = index // 4
    for seed in range(count - len(requests)):
        # Alone: all drafts are accepted, then none is left to draft before the last token.
        prompt = prompt_of(count + seed)
        begins = 2 * len(requests) + 10 * seed
        requests.append(Request(prompt, greedy(prompt, N + 1), N + 1, arrives=begins))
    run = engine.run(requests, seconds=3000)
    assert run.accepted > count
    wrong = [i for i, r in enumerate(requests) if run.outputs[i] != greedy(r.prompt, r.max_tokens)]
    return wrong, run


@pytest.mark.parametrize("family", ["FalconH1", "Qwen3Next"], indirect=True, scope="module")
def test_a_recurrent_model_writes_what_it_writes_without_drafts(
    start: Callable[..., V2Engine], greedy: Greedy
) -> None:
    with start() as engine:
        others, run = wrong(engine, greedy)
    assert others == []
    assert run.preemptions


@pytest.mark.parametrize("family", ["Mamba2", "Qwen3Next"], indirect=True, scope="module")
def test_a_step_without_drafts_goes_on_from_the_states_after_those_with_them(
    start: Callable[..., V2Engine], greedy: Greedy
) -> None:
    """Where nothing else copies states after a step: without prefix caching, in synchronous scheduling."""
    packed = {"VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE": "0"}  # by a kernel that can be interpreted
    with start(packed, enable_prefix_caching=False, asynchronous=False, delay_counts=False) as engine:
        others, _ = wrong(engine, greedy)
    assert others == []

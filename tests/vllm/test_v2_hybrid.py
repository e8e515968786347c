"""A model with recurrent layers (Mamba-2 beside attention) on the real V2 runner: drafts that come and go leave no
trace in its states. Their step kernels are vLLM's own, interpreted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_llama import greedy_by_transformers
from v2_harness import SHORT, Request, V2Engine, edited, prompt_of

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]
N = 16


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    torch.manual_seed(3)
    config = FalconH1Config(
        vocab_size=404,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_ssm=128,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = FalconH1ForCausalLM(config).float()
    with torch.no_grad():  # wide, so that the greedy output wanders and rounding flips nothing
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        model.lm_head.weight[:4] = 0
    model.generation_config.eos_token_id = None
    directory = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def greedy(hybrid: Path) -> Greedy:
    return greedy_by_transformers(hybrid)


@pytest.fixture(scope="module")
def engine(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engine]:
    """Long prompts come in chunks, equal ones from the prefix cache, draft lengths a step late. The KV cache holds
    a few requests, so that others are preempted."""
    with V2Engine(
        hybrid,
        tmp_path_factory.mktemp("engine"),
        num_draft_tokens=4,
        environment=SHORT,
        before="run_mamba_as_on_a_gpu()",
        skip_tokenizer_init=True,
        max_num_batched_tokens=40,
        num_gpu_blocks_override=22,
        enable_prefix_caching=True,
        asynchronous=True,
        delay_counts=1,
    ) as engine:
        yield engine


def test_a_recurrent_model_writes_what_it_writes_without_drafts(engine: V2Engine, greedy: Greedy) -> None:
    """Predictions that are right, right at first, wrong at first, and none: rows with accepted, rejected and no
    drafts stand beside each other, and follow each other."""
    draw = random.Random(5)
    requests = []
    for seed in range(6):
        prompt = prompt_of(seed, draw.choice((8, 12, 50)))
        output = greedy(prompt, N)
        half = output[: N // 2] + prompt_of(seed + 500, 8)
        late = prompt_of(seed + 700, 6) + output[N // 2 :]
        for prediction in (None, output, half, late, edited(output, seed)):
            requests.append(Request(prompt, prediction, N))
    draw.shuffle(requests)
    for index, request in enumerate(requests):
        request.arrives = index // 4
    run = engine.run(requests)
    wrong = [i for i, r in enumerate(requests) if run.outputs[i] != greedy(r.prompt, N)]
    assert wrong == []
    assert run.accepted > 50
    assert run.preemptions

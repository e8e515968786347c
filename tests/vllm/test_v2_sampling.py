"""At a temperature the sampled distribution is the model's, drafts or not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import build
from v2_harness import Request, V2Engine, prompt_of

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.8
WORDS = range(10, 18)
PROBABILITIES = (0.85, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)
#: The 0.999 quantile of chi-square with 7 degrees of freedom.
CRITICAL = 24.32


@pytest.fixture(scope="session")
def memoryless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that knows eight words, and says each with its probability (at our temperature) whatever came
    before: all embeddings are equal, so every position computes the same. Its outputs are independent draws."""
    from transformers import LlamaForCausalLM

    directory = build(tmp_path_factory.mktemp("memoryless"))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[10].clone()
        hidden = model.model(torch.tensor([[10, 11]])).last_hidden_state[0]
        assert torch.allclose(hidden[0], hidden[1], atol=1e-4)
        logits = torch.full((model.config.vocab_size,), -50.0)
        logits[list(WORDS)] = TEMPERATURE * torch.tensor(PROBABILITIES).log()
        model.lm_head.weight[:] = logits[:, None] * (hidden[0] / hidden[0].square().sum())
    model.save_pretrained(directory)
    return directory


def chi_square(counts: Counter[int]) -> float:
    total = sum(counts.values())
    return sum((counts[w] - total * p) ** 2 / (total * p) for w, p in zip(WORDS, PROBABILITIES, strict=True))


def test_chi_square_tells_a_wrong_distribution() -> None:
    exact = Counter({w: round(5000 * p) for w, p in zip(WORDS, PROBABILITIES, strict=True)})
    assert chi_square(exact) < 1
    # As if each tenth rejected draft had been kept.
    wrong = exact + Counter({WORDS[0]: 150}) - Counter({WORDS[1]: 50, WORDS[2]: 50, WORDS[3]: 50})
    assert chi_square(wrong) > CRITICAL


def requests_of(count: int, tokens: int, **params: Any) -> list[Request]:
    return [
        Request(
            prompt_of(seed),
            # Mostly the likeliest word, which is accepted often, and one of the others, which is not.
            [WORDS[1 + seed % 7] if i % 12 == seed % 12 else WORDS[0] for i in range(60)],
            tokens,
            arrives=seed // 8,
            params={"temperature": TEMPERATURE, "seed": seed, **params},
        )
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def memoryless(memoryless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engine]:
    settings = {"num_draft_tokens": 6, "environment": {"GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"}}
    with V2Engine(memoryless_model, tmp_path_factory.mktemp("memoryless-engine"), **settings) as engine:
        yield engine


def test_5000_draws_have_the_models_distribution(memoryless: V2Engine) -> None:
    tokens = 105
    run = memoryless.run(requests_of(48, tokens), seconds=500)
    counts = Counter(token for output in run.outputs for token in output)
    drafted = sum(drafts for step in run.steps for _, drafts, _ in step.values())
    assert sum(counts.values()) == 48 * tokens >= 5000
    assert set(counts) <= set(WORDS)
    assert run.accepted > 2000  # both verdicts are well represented
    assert drafted - run.accepted > 1000
    assert chi_square(counts) < CRITICAL, counts


def test_min_p_and_logit_bias_hold_for_each_draft(memoryless: V2Engine) -> None:
    """Two words are made likelier, the three least likely ones of the rest fall to `min_p`."""
    bias = {WORDS[1]: 2.0, WORDS[4]: 1.5}
    weights = [
        p * math.exp(bias.get(word, 0.0) / TEMPERATURE) for word, p in zip(WORDS, PROBABILITIES, strict=True)
    ]
    min_p = 0.018
    kept = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    expected = {word: w / sum(kept) for word, w in zip(WORDS, kept, strict=True) if w}
    assert set(WORDS) - set(expected) == set(WORDS[5:])
    tokens = 80
    run = memoryless.run(requests_of(32, tokens, min_p=min_p, logit_bias=bias), seconds=500)
    counts = Counter(token for output in run.outputs for token in output)
    total = sum(counts.values())
    assert total == 32 * tokens
    assert set(counts) == set(expected)
    assert run.accepted > 500
    # The 0.999 quantile of chi-square with 4 degrees of freedom.
    assert sum((counts[w] - total * p) ** 2 / (total * p) for w, p in expected.items()) < 18.47, counts

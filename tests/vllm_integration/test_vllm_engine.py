"""The V1 model runner of a real engine: same output, fewer steps, nothing left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from vllm_harness import MAX_MODEL_LEN, K, OfflineEngine

from vllm_integration.seams import install as compat
from vllm_integration.wire import request as wire

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [random.Random(seed).randrange(4, 404) for _ in range(length)]


def edited(tokens: list[int], seed: int) -> list[int]:
    """Insertions, deletions and substitutions, one in about twelve tokens."""
    draw, out = random.Random(seed), []
    for token in tokens:
        kind = draw.randrange(36)
        if kind == 0:
            continue
        out.append(draw.randrange(4, 404) if kind == 1 else token)
        if kind == 2:
            out += [draw.randrange(4, 404) for _ in range(3)]
    return out


def test_output_is_the_models_own_whatever_is_predicted(engine: OfflineEngine, greedy: Greedy) -> None:
    n = 60
    prompts, predictions = [], []
    for seed in range(4):
        prompt = prompt_of(seed, 20 + 50 * (seed % 2))  # the longer ones are prefilled in two chunks
        output = greedy(prompt, n)
        for prediction in (
            None,
            output,
            edited(output, seed),
            [7] * 200,
            output[::-1],
            prompt_of(seed + 100, 80),
            greedy(prompt_of(seed + 1, 20), n),
            output[: n // 2],
            output * 3,
        ):
            prompts.append(prompt)
            predictions.append(prediction)
    with engine.trace() as steps:
        answers = engine.generate(prompts, [engine.params(p, max_tokens=n) for p in predictions])
    for prompt, prediction, answer in zip(prompts, predictions, answers, strict=True):
        assert answer.token_ids == greedy(prompt, n)
        if prediction is None:
            assert answer.log is None
        else:
            assert answer.log is not None
            assert [t for step in answer.log["steps"] for t in step["new"]] == answer.token_ids
    # In one and the same step some requests verify drafts and others take a plain one-token step.
    assert any(max(step.values()) > 0 and min(step.values()) == 0 for step in steps if step)
    assert not engine.proposer.requests
    assert not engine.proposer.slots.holders()


def test_a_request_without_prediction_is_untouched(engine: OfflineEngine, greedy: Greedy) -> None:
    prompts = [prompt_of(21), prompt_of(22)]
    params = [engine.params(max_tokens=40), engine.params(greedy(prompts[1], 40), max_tokens=40)]
    with engine.trace() as steps:
        answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [greedy(prompt, 40) for prompt in prompts]
    assert params[0].extra_args is None
    plain = min((req_id for step in steps for req_id in step), key=lambda r: int(r.split("-")[0]))
    assert sum(plain in step for step in steps) == 40  # one token a step
    assert all(step.get(plain, 0) == 0 for step in steps)
    assert any(count == K for step in steps for count in step.values())


def test_text_is_tokenised_and_the_callers_params_are_kept(engine: OfflineEngine, greedy: Greedy) -> None:
    prompt = prompt_of(31)
    (plain,) = engine.generate([prompt], [engine.params(max_tokens=60)])
    params = engine.params(plain.text.replace(" ", "\r\n"), max_tokens=60)
    before = params.extra_args[wire.KEY]
    (answer,) = engine.generate([prompt], [params])
    assert answer.token_ids == plain.token_ids
    assert answer.log["prediction_tokens"] == 60
    assert answer.log["usage"]["steps"] == 1 + math.ceil(59 / (K + 1))
    assert params.extra_args[wire.KEY] is before


def test_drafts_end_at_max_model_len(engine: OfflineEngine, greedy: Greedy) -> None:
    """Near the limit vLLM would schedule K zeros for every request of the batch."""
    long, short = prompt_of(51), prompt_of(52)
    n = MAX_MODEL_LEN - len(long)
    with engine.trace() as steps:
        answers = engine.generate(
            [long, short],
            [engine.params(greedy(long, n), max_tokens=n), engine.params(max_tokens=60)],
        )
    assert answers[0].token_ids == greedy(long, n)
    assert answers[1].token_ids == greedy(short, 60)
    assert answers[0].log["usage"]["rejected"] == 0
    assert answers[0].log["usage"]["steps"] == 1 + math.ceil((n - 1) / (K + 1))
    plain = max((req_id for step in steps for req_id in step), key=lambda r: int(r.split("-")[0]))
    assert all(step.get(plain, 0) == 0 for step in steps)


def test_with_the_plugin_off_the_engine_serves_plain_steps(
    engine: OfflineEngine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(91), prompt_of(92)]
    params = [engine.params(greedy(prompt, 30), max_tokens=30) for prompt in prompts]
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    with engine.trace() as steps:
        answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [greedy(prompt, 30) for prompt in prompts]
    assert all(count == 0 for step in steps for count in step.values())


def test_a_prediction_longer_than_the_context_is_cut(
    engine: OfflineEngine, greedy: Greedy, plugin_log: list[str]
) -> None:
    prompt = prompt_of(81)
    text = " ".join(f"w{token - 4}" for token in greedy(prompt, 40) * 30)
    (answer,) = engine.generate([prompt], [engine.params(text, max_tokens=40)])
    assert answer.token_ids == greedy(prompt, 40)
    assert answer.log["prediction_tokens"] == MAX_MODEL_LEN
    assert any("expected at most 512 tokens, got more" in message for message in plugin_log)


def test_requests_share_a_prediction_within_one_cache_salt(engine: OfflineEngine) -> None:
    """On its way through a real engine: equal predictions of two salts are stored twice."""
    prediction = list(range(40, 90))
    salts = ["one", "one", "two", None, None]
    before = engine.proposer.drafter.prediction_stats
    prompts = [{"prompt_token_ids": [7, 8, 9], **({"cache_salt": salt} if salt else {})} for salt in salts]
    params = [engine.params(prediction, max_tokens=3) for _ in salts]
    answers = engine.llm.generate(prompts, params, use_tqdm=False)
    engine.flush()
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    after = engine.proposer.drafter.prediction_stats
    # The arena may be full: older ones go.
    stored = after.num_predictions + after.evicted - before.num_predictions - before.evicted
    assert stored == 3
    assert after.reused - before.reused == 2

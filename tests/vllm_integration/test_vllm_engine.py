"""The V1 model runner of a real engine: same output, fewer steps, nothing left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import MAX_MODEL_LEN, K, OfflineEngine

from vllm_integration.wire import request as wire

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [random.Random(seed).randrange(4, 404) for _ in range(length)]


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


def test_min_p_and_logit_bias_are_served_beside_drafts(engine: OfflineEngine, greedy: Greedy) -> None:
    """vLLM refuses both where there are drafts. With min_p = 1 the likeliest token is drawn at any temperature."""
    prompts = [prompt_of(seed) for seed in range(201, 205)]
    outputs = [greedy(prompt, 24) for prompt in prompts]
    cases: list[dict[str, Any]] = [
        {"logit_bias": dict.fromkeys(outputs[0][:8], -100.0)},
        {"logit_bias": {17: 100.0}},
        {"min_p": 1.0, "temperature": 2.0},
        {},
    ]
    params = [engine.params(p, max_tokens=24, **case) for p, case in zip(outputs, cases, strict=True)]
    with engine.trace() as steps:
        answers = engine.generate(prompts, params)
    assert [answer.log is not None for answer in answers] == [False, False, False, True]
    assert any(max(step.values()) > 0 for step in steps if step)
    assert not set(answers[0].token_ids) & set(outputs[0][:8])
    assert set(answers[1].token_ids) == {17}
    assert [answer.token_ids for answer in answers[2:]] == outputs[2:]


def test_no_placeholders_are_verified_in_place_of_drafts(engine: OfflineEngine, greedy: Greedy) -> None:
    """vLLM pads a request whose prompt is cached but for one token, to K placeholders; V1 verifies them, by
    logits without bias."""
    prompt, other = prompt_of(210, 33), prompt_of(211)  # one block and one token
    engine.generate([prompt], [engine.params(max_tokens=2)])
    llm_engine, answers = engine.llm.llm_engine, {}
    drafted = engine.params(greedy(other, 60), max_tokens=60)
    biased = engine.params(max_tokens=4, logit_bias={17: 100.0})
    with engine.trace() as steps:
        llm_engine.add_request("other", {"prompt_token_ids": other}, drafted)
        llm_engine.step()
        llm_engine.step()
        llm_engine.add_request("biased", {"prompt_token_ids": prompt}, biased)
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
    engine.flush()
    assert answers == {"other": greedy(other, 60), "biased": [17] * 4}
    (first,) = [step for step in steps if any(name.startswith("biased") for name in step)][:1]
    assert {name.split("-")[0]: count for name, count in first.items()} == {"other": K, "biased": 0}


def test_the_probabilities_of_given_tokens_are_answered_beside_drafts(
    engine: OfflineEngine, greedy: Greedy
) -> None:
    """`logprob_token_ids`, which the sampler that verifies drafts leaves out, or ends the engine by."""
    drafted, listed, scored = (prompt_of(seed) for seed in (220, 221, 222))
    n = 40
    alone, beside = (
        {
            "drafted": (drafted, engine.params(greedy(drafted, n) if drafts else None, max_tokens=n)),
            "listed": (listed, engine.params(max_tokens=n, logprobs=2)),
            "scored": (scored, engine.params(max_tokens=3, logprob_token_ids=[5, 6, 7])),
        }
        for drafts in (False, True)
    )
    found = []
    for requests in (alone, beside):
        answers: dict[str, Any] = {}
        for name, (prompt, params) in requests.items():
            engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
            engine.llm.llm_engine.step()
        while engine.llm.llm_engine.has_unfinished_requests():
            answers |= {each.request_id: each.outputs[0] for each in engine.llm.llm_engine.step()}
        engine.flush()
        assert {name: list(answer.token_ids) for name, answer in answers.items()} == {
            "drafted": greedy(drafted, n),
            "listed": greedy(listed, n),
            "scored": greedy(scored, 3),
        }
        found.append(
            [{token: each[token].logprob for token in (5, 6, 7)} for each in answers["scored"].logprobs]
        )
    for with_drafts, without in zip(*found, strict=True):
        assert with_drafts == pytest.approx(without, abs=1e-4)

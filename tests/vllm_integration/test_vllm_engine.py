"""The V1 model runner of a real engine: same output, fewer steps, nothing left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import MAX_MODEL_LEN, K, OfflineEngine

from gpu_align import Recipes
from vllm_integration.seams import install as compat
from vllm_integration.wire import request as wire
from vllm_integration.worker.request_drafter import make_drafter

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


def test_every_seam_of_the_table_is_in_the_installed_vllm() -> None:
    assert [(s.seam.name, s.state, s.detail) for s in compat.probe() if s.state != "found"] == []


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


@pytest.mark.parametrize("length", [1, 2, K + 1, K + 2, 120])
def test_a_perfect_prediction_takes_the_fewest_steps(
    engine: OfflineEngine, greedy: Greedy, length: int
) -> None:
    prompt = prompt_of(11)
    output = greedy(prompt, length)
    (answer,) = engine.generate([prompt], [engine.params(output, max_tokens=length)])
    assert answer.token_ids == output
    usage = answer.log["usage"]
    assert usage["steps"] == 1 + math.ceil((length - 1) / (K + 1))
    assert usage["rejected"] == 0
    assert usage["output_tokens"] == length


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


def test_recipes_change_steps_and_no_token(
    engine: OfflineEngine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes that know the outputs but for every third token, with predictions that are of no use."""
    n = 60
    prompts = [prompt_of(seed) for seed in (23, 24, 25)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    predictions = [[7] * 20, outputs[1][::-1], None]
    params = [engine.params(prediction, max_tokens=n) for prediction in predictions]
    without = engine.generate(prompts, params)

    known: dict[tuple[int, ...], list[int]] = {}
    for tokens in (prompt + output for prompt, output in zip(prompts, outputs, strict=True)):
        for end in range(20, len(tokens) - 4):
            after = [tokens[i] if i % 3 else 5 for i in range(end, end + 4)]
            known[tuple(tokens[end - 8 : end])] = after
    recipes = Recipes.from_lists((context, after, (0.9, 0.85, 0.8, 0.75)) for context, after in known.items())
    monkeypatch.setattr(engine.proposer, "recipes", recipes)
    monkeypatch.setattr(engine.proposer, "drafter", make_drafter(engine.proposer, max_slots=8, device="cpu"))
    with engine.trace() as steps:
        answers = engine.generate(prompts, params)

    assert [answer.token_ids for answer in without] == outputs
    assert [answer.token_ids for answer in answers] == outputs
    for before, after in zip(without[:2], answers[:2], strict=True):
        assert "recipe" not in before.log["usage"]["by_source"]
        count = after.log["usage"]["by_source"]["recipe"]
        assert 0 < count["accepted"] < count["drafted"]
        for step in after.log["steps"]:
            if step["proposed"]:
                assert step["candidate"]["source"] == step["source"]
    assert answers[2].log is None
    plain = max((req_id for step in steps for req_id in step), key=lambda r: int(r.split("-")[0]))
    assert [step[plain] for step in steps if plain in step] == [0] * n  # one token a step, as ever


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


def test_sampling_parameters_of_others_change_no_greedy_answer(engine: OfflineEngine, greedy: Greedy) -> None:
    """Two faults of vLLM's sampler (see `rejection`). The second would end the engine, and this run with it."""
    from vllm.v1.sample import rejection_sampler

    for function in (rejection_sampler.apply_sampling_constraints, rejection_sampler.expand_batch_to_tokens):
        assert hasattr(function, compat.MARK)
    n = 40
    prompts = [prompt_of(seed) for seed in range(100, 106)]
    params = [engine.params(edited(greedy(prompt, n), 3), max_tokens=n) for prompt in prompts]
    for cold in (1, 3):
        params[cold].temperature = 0.001
    for warm in (4, 5):
        params[warm].temperature, params[warm].top_k = 1.0, 5
    answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers[:4]] == [greedy(prompt, n) for prompt in prompts[:4]]
    plain = engine.params(max_tokens=n)  # no request of this batch has drafts
    plain.temperature, plain.top_k = 0.001, 5
    assert engine.generate(prompts[:1], [plain])[0].token_ids == greedy(prompts[0], n)


def test_preempted_requests_resume_and_keep_drafting(engine: OfflineEngine, greedy: Greedy) -> None:
    n = 180
    prompts = [prompt_of(40 + i, 30) for i in range(6)]  # 6 × 210 tokens want 42 blocks, there are 24
    before = engine.preemptions()
    answers = engine.generate(
        prompts, [engine.params(edited(greedy(p, n), i), max_tokens=n) for i, p in enumerate(prompts)]
    )
    assert engine.preemptions() > before
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == greedy(prompt, n)
        assert answer.log["usage"]["accepted"] > 0
        assert [t for step in answer.log["steps"] for t in step["new"]] == answer.token_ids


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


def test_aborted_requests_give_everything_back(engine: OfflineEngine, greedy: Greedy) -> None:
    llm_engine = engine.llm.llm_engine
    draw = random.Random(5)
    live: dict[str, list[int]] = {}
    finished = 0
    for round_ in range(12):
        for _ in range(2):
            req_id = f"abort-{round_}-{len(live)}-{draw.randrange(10**6)}"
            prompt = prompt_of(draw.randrange(60, 66))
            live[req_id] = prompt
            llm_engine.add_request(
                req_id,
                {"prompt_token_ids": prompt},
                engine.params(edited(greedy(prompt, 50), round_), max_tokens=50),
            )
        for _ in range(draw.randrange(1, 4)):
            for output in llm_engine.step():
                if output.finished:
                    assert list(output.outputs[0].token_ids) == greedy(live.pop(output.request_id), 50)
                    finished += 1
        for req_id in draw.sample(sorted(live), min(len(live), 1)):
            llm_engine.abort_request([req_id])
            del live[req_id]
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                assert list(output.outputs[0].token_ids) == greedy(live.pop(output.request_id), 50)
                finished += 1
    engine.flush()
    assert finished > 6
    assert not engine.proposer.requests
    assert engine.proposer.slots.holders() == []


@pytest.mark.parametrize(
    "value",
    [[5, 10**6], {"token_ids": b"\x01"}, {"token_ids": b"\xff\xff\xff\xff"}, {"other": 1}, 3.5],
    ids=["out-of-vocabulary", "torn", "negative", "wrong-key", "wrong-type"],
)
def test_a_malformed_prediction_in_the_worker_costs_only_itself(
    engine: OfflineEngine, greedy: Greedy, value: Any, plugin_log: list[str]
) -> None:
    """Put there behind the front end's back, as a foreign front end could."""
    prompts = [prompt_of(71), prompt_of(72)]
    good = greedy(prompts[1], 30)
    bad = engine.params(max_tokens=30)
    bad.extra_args = {wire.KEY: value}
    process_inputs = type(engine.llm.llm_engine.input_processor).process_inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(engine.llm.llm_engine.input_processor), "process_inputs", process_inputs.__wrapped__
        )
        answers = engine.generate(prompts, [bad, engine.params(good, max_tokens=30)])
    assert [answer.token_ids for answer in answers] == [greedy(prompt, 30) for prompt in prompts]
    assert answers[0].log is None
    assert answers[1].log["usage"]["rejected"] == 0
    messages = [m for m in plugin_log if "without its prediction" in m]
    assert len(messages) == 1


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


def test_a_malformed_prediction_is_refused_by_the_front_end(engine: OfflineEngine) -> None:
    from vllm.exceptions import VLLMValidationError

    params = engine.params(max_tokens=5)
    params.extra_args = {wire.KEY: {"other": 1}}
    with pytest.raises(VLLMValidationError, match="prediction"):
        engine.generate([prompt_of(1)], [params])


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

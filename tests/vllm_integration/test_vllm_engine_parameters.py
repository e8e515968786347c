"""V1 with our drafter beside V1 without one: the same requests get the same answers, whatever they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_vllm_engine import edited, prompt_of
from vllm_harness import ENVIRONMENT, MAX_MODEL_LEN, K, OfflineEngine

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 48,
}


def started(model: Path, **settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        from vllm import LLM

        return LLM(str(model), **SETTINGS, **settings)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    """vLLM with our drafter. Prompts are prefilled whole: on the CPU vLLM fails on chunks of one with a seed."""
    logs = tmp_path_factory.mktemp("steps")
    model = "vllm_integration.PredictedOutputs"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "GPU_ALIGN_DEBUG_DIR": str(logs)}.items():
            patch.setenv(name, value)
        speculative = {"method": "custom_class", "model": model, "num_speculative_tokens": K}
        yield OfflineEngine(started(tiny_llama, speculative_config=speculative), logs)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> OfflineEngine:
    """vLLM without a speculative configuration."""
    return OfflineEngine(started(tiny_llama), Path("/nowhere"))


def same(
    engine: OfflineEngine, plain: OfflineEngine, prompts: list[list[int]], cases: list[Any]
) -> list[Any]:
    """All in one batch of each engine; the answers, after they were found to be equal."""
    given = [(prompt, case) for prompt in prompts for case in cases]
    expected = plain.generate([p for p, _ in given], [plain.params(**case) for _, case in given])
    predictions = [
        edited(answer.token_ids, i) if i % 3 else answer.token_ids for i, answer in enumerate(expected)
    ]
    params = [
        engine.params(prediction, **case) for (_, case), prediction in zip(given, predictions, strict=True)
    ]
    answers = engine.generate([p for p, _ in given], params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    for answer, without in zip(answers, expected, strict=True):
        for mine, theirs in zip(answer.logprobs or [], without.logprobs or [], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    return answers


def test_min_p_and_logit_bias_are_served_as_without_drafts(
    engine: OfflineEngine, plain: OfflineEngine, greedy: Greedy
) -> None:
    """Among requests that are drafted for. With a seed the draws are the same, too."""
    prompts = [prompt_of(seed) for seed in (201, 202)]
    warm = {"temperature": 1.0, "seed": 7}
    cases: list[dict[str, Any]] = [
        {"logit_bias": dict.fromkeys(greedy(prompts[0], 8), -100.0)},
        {"logit_bias": {17: 100.0}},
        {"min_p": 0.9, **warm},
        {"min_p": 0.05, **warm},
        {"min_p": 0.05, "logit_bias": {17: 3.0}, **warm},
    ]
    with engine.trace() as steps:
        answers = same(engine, plain, prompts, [{"max_tokens": 24, **case} for case in [*cases, {}]])
    assert [answer.log is not None for answer in answers] == [False, False, False, False, False, True] * 2
    assert any(max(step.values()) > 0 for step in steps if step)
    assert set(answers[1].token_ids) == {17}
    assert not set(answers[0].token_ids) & set(greedy(prompts[0], 8))
    assert answers[2].token_ids != answers[3].token_ids


def test_what_v1_applies_to_each_draft(engine: OfflineEngine, plain: OfflineEngine, greedy: Greedy) -> None:
    prompts = [prompt_of(seed) for seed in (205, 206)]
    cases: list[dict[str, Any]] = [
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.9, "presence_penalty": 0.4},
        {"repetition_penalty": 3.0},
        {"bad_words": [f"w{token - 4}" for token in greedy(prompts[0], 12)[4:6]]},
        {"allowed_token_ids": list(range(100, 200))},
        {"logprobs": 3},
        {"logprobs": 0, "repetition_penalty": 1.4},
    ]
    answers = same(engine, plain, prompts, [{"max_tokens": 30, **case} for case in cases])
    for answer in answers:
        assert answer.log["usage"]["accepted"] > 0
    assert [len(position) for position in answers[5].logprobs] == [3] * 30


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


def test_the_next_turn_finds_as_much_in_the_prefix_cache(
    engine: OfflineEngine, plain: OfflineEngine, greedy: Greedy
) -> None:
    """The last step of the first turn has five tokens, and fills a block of 32 with the second of them."""
    prompt, n = prompt_of(240, 64 - 2 * (K + 1) - 3), 2 * (K + 1) + 6
    output = greedy(prompt, n)
    for of, prediction in ((plain, None), (engine, output)):
        assert [a.token_ids for a in of.generate([prompt], [of.params(prediction, max_tokens=n)])] == [output]
        second = {"prompt_token_ids": [*prompt, *output, 7, 8, 9]}
        (answer,) = of.llm.generate([second], [of.params(max_tokens=2)], use_tqdm=False)
        assert answer.num_cached_tokens == 64


@pytest.mark.parametrize("place", [K + 1, 20])
def test_min_tokens_end_where_they_end_without_drafts(
    engine: OfflineEngine, plain: OfflineEngine, greedy: Greedy, place: int
) -> None:
    """The model writes its stop token as the last of a step's tokens, when the drafts of the step before it
    have just satisfied `min_tokens`."""
    seeds = (
        seed
        for seed in range(300, 400)
        if greedy(prompt_of(seed), 60)[place] not in greedy(prompt_of(seed), place)
    )
    prompts = [prompt_of(next(seeds)) for _ in range(2)]
    for prompt in prompts:
        stop = greedy(prompt, 60)[place]
        cases = [
            {"max_tokens": 60, "stop_token_ids": [stop], "min_tokens": m}
            for m in (0, 2, 5, place - 1, place, place + 1, place + 2, place + K)
        ]
        answers = same(engine, plain, [prompt], cases)
        lengths = [len(answer.token_ids) for answer in answers]
        assert lengths[:5] == [place + 1] * 5
        assert min(lengths[5:]) > place + 1


def test_the_probabilities_of_given_tokens_are_answered_beside_drafts(
    engine: OfflineEngine, plain: OfflineEngine, greedy: Greedy
) -> None:
    """`logprob_token_ids`, which the sampler that verifies drafts leaves out, or ends the engine by."""
    drafted, listed, scored = (prompt_of(seed) for seed in (220, 221, 222))
    n = 40

    def serve(of: OfflineEngine, prediction: list[int] | None) -> dict[str, Any]:
        llm_engine, done = of.llm.llm_engine, {}
        arrivals = {
            0: ("drafted", drafted, of.params(prediction, max_tokens=n)),
            1: ("listed", listed, of.params(max_tokens=n, logprobs=2)),
            2: ("scored", scored, of.params(max_tokens=3, logprob_token_ids=[5, 6, 7])),
        }
        step = 0
        while step < 3 or llm_engine.has_unfinished_requests():
            if step in arrivals:
                name, prompt, params = arrivals[step]
                llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
            for output in llm_engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0]
            step += 1
        of.flush()
        return done

    ours, theirs = serve(engine, greedy(drafted, n)), serve(plain, None)
    assert {name: list(output.token_ids) for name, output in ours.items()} == {
        "drafted": greedy(drafted, n),
        "listed": greedy(listed, n),
        "scored": greedy(scored, 3),
    }
    assert set(theirs) == set(ours)
    for mine, without in zip(ours["scored"].logprobs, theirs["scored"].logprobs, strict=True):
        assert {5, 6, 7} <= set(mine)
        assert {t: v.logprob for t, v in mine.items()} == pytest.approx(
            {t: v.logprob for t, v in without.items()}, abs=1e-4
        )

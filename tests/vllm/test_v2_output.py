"""The V2 model runner of a real engine: the output is the model's own, in fewer steps, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from v2_harness import Request, Run, V2Engine, edited, prompt_of

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]
N = 10
NUM_PROMPTS = 40


def predictions_for(seed: int, greedy: Greedy, n: int) -> list[list[int] | None]:
    """None, verbatim, edited, unrelated, and those that mean harm: empty, one token, reversed, another's."""
    output = greedy(prompt_of(seed), n)
    adversarial = ([], [output[0]] * 40, output[::-1], greedy(prompt_of(seed + 1), n))
    return [None, output, edited(output, seed), prompt_of(seed + 1000, 30), *adversarial]


def mixed_requests(greedy: Greedy, seeds: range, n: int = N) -> list[Request]:
    """Every kind of prediction for every prompt, in random order; they arrive at random steps, so that batches
    of all sizes up to the engine's limit come up."""
    draw = random.Random(len(seeds))
    requests = [
        Request(prompt_of(seed), prediction, n)
        for seed in seeds
        for prediction in predictions_for(seed, greedy, n)
    ]
    draw.shuffle(requests)
    step = 0
    for index, request in enumerate(requests):
        request.arrives = step
        # Now and then nobody comes until most have left.
        step += 12 if index % 64 == 63 else draw.choice((0, 0, 0, 1, 2))
    return requests


def check_outputs(requests: list[Request], run: Run, greedy: Greedy) -> None:
    wrong = [
        index
        for index, (request, output) in enumerate(zip(requests, run.outputs, strict=True))
        if request.aborted is None and output != greedy(request.prompt, request.max_tokens)
    ]
    assert wrong == []


def test_the_engine_is_the_real_v2_runner_with_our_parts(k4: V2Engine, k16: V2Engine) -> None:
    assert k4.facts == {
        "runner": "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
        "speculator": "PredictedOutputsSpeculator",
        "scheduler": "PredictedOutputsScheduler",
    }
    assert k16.facts["scheduler"] == "PredictedOutputsAsyncScheduler"


@pytest.mark.parametrize("name", ["k4", "k16"])
def test_output_is_the_models_own_whatever_is_predicted(
    name: str, request: pytest.FixtureRequest, greedy: Greedy
) -> None:
    engine: V2Engine = request.getfixturevalue(name)
    requests = mixed_requests(greedy, range(NUM_PROMPTS))
    run = engine.run(requests, seconds=500)
    check_outputs(requests, run, greedy)
    assert run.accepted > NUM_PROMPTS * N
    sizes = {len(step) for step in run.steps if step}
    assert {1, 8} <= sizes
    assert len(sizes) >= 6
    assert engine.state() == {"occupied": 0, "known": 0, "counted": 0, "rows": 0}


def test_a_verbatim_prediction_of_256_tokens_takes_ten_steps_at_most(k32: V2Engine, greedy: Greedy) -> None:
    prompt = prompt_of(1)
    output = greedy(prompt, 256)
    run = k32.run([Request(prompt, output, 256)])
    assert run.outputs == [output]
    assert run.verification_steps(0) <= 10


def test_draft_slots_go_to_those_who_can_use_them(k16: V2Engine, k4: V2Engine, greedy: Greedy) -> None:
    """In one batch: K slots for an aligned request, none for one without a prediction."""
    for engine, k in ((k16, 16), (k4, 4)):
        n = 3 * (k + 1)
        prompts = [prompt_of(seed) for seed in range(4)]
        requests = [
            Request(prompt, greedy(prompt, n) if i % 2 else None, n) for i, prompt in enumerate(prompts)
        ]
        run = engine.run(requests)
        check_outputs(requests, run, greedy)
        for index in (0, 2):
            assert {drafts for _, drafts, _ in run.of(index)} == {0}
            assert {tokens for tokens, _, _ in run.of(index)[1:]} == {1}
        together = [step for step in run.steps if len(step) == 4]
        full = [step for step in together if step[1][1] == step[3][1] == k]
        assert len(full) >= 2
        assert all(step[0][1] == step[2][1] == 0 for step in full)


def test_preempted_requests_resume_where_they_were(tight: V2Engine, greedy: Greedy) -> None:
    n = 70
    prompts = [prompt_of(seed, 40) for seed in range(6)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    predictions = [
        None,
        outputs[1],
        edited(outputs[2], 2),
        outputs[3][::-1],
        outputs[4],
        edited(outputs[5], 5),
    ]
    requests = [
        Request(prompt, prediction, n) for prompt, prediction in zip(prompts, predictions, strict=True)
    ]
    forget_step_logs(tight)
    run = tight.run(requests)
    check_outputs(requests, run, greedy)
    assert run.preemptions > 0
    check_step_logs(requests, run, tight)
    assert run.accepted > n
    assert tight.state() == {"occupied": 0, "known": 0, "counted": 0, "rows": 0}


def forget_step_logs(engine: V2Engine) -> None:
    for file in engine.steps.iterdir() if engine.steps.exists() else ():
        file.unlink()


def check_step_logs(requests: list[Request], run: Run, engine: V2Engine) -> None:
    """One file for each request with a prediction, which agrees with what the scheduler saw and the front end
    counted; the log is written from the device's tokens, the count comes from the scheduler."""
    files = {
        int(file.name.split("-")[0]): yaml.safe_load(file.read_text()) for file in engine.steps.iterdir()
    }
    assert sorted(files) == [index for index, request in enumerate(requests) if request.prediction]
    for index, document in files.items():
        output = run.outputs[index]
        assert [token for step in document["steps"] for token in step["new"]] == output
        usage = document["usage"]
        assert usage == run.answers[index]["usage"]
        assert usage["output_tokens"] == len(output)
        assert (
            usage["drafted"] == usage["accepted"] + usage["rejected"] <= sum(d for _, d, _ in run.of(index))
        )
        # Asynchronous scheduling has started one step more when a request ends.
        late = run.verification_steps(index) + 1 - usage["steps"]
        assert late == 0 or (late == 1 and engine.facts["scheduler"] == "PredictedOutputsAsyncScheduler")
        assert document["prompt_tokens"] == len(requests[index].prompt)
        for step in document["steps"]:
            assert step["new"][: step["accepted"]] == step["proposed"][: step["accepted"]]


def test_prompts_are_prefilled_in_chunks(tight: V2Engine, greedy: Greedy) -> None:
    n = 20
    prompts = [prompt_of(seed, length) for seed, length in ((11, 100), (12, 12), (13, 130))]
    requests = [Request(prompt, greedy(prompt, n), n, arrives=2 * i) for i, prompt in enumerate(prompts)]
    forget_step_logs(tight)
    run = tight.run(requests)
    check_outputs(requests, run, greedy)
    check_step_logs(requests, run, tight)
    for index in (0, 2):
        chunks = [row for row in run.of(index) if row[2] == 0]
        assert len(chunks) >= 2
        assert all(drafts == 0 for _, drafts, _ in chunks)
    assert run.accepted > n


def test_aborting_requests_at_random_steps_disturbs_nobody(tight: V2Engine, greedy: Greedy) -> None:
    n, draw = 24, random.Random(5)
    requests = []
    for seed in range(12):
        prompt = prompt_of(seed, draw.choice((12, 60)))
        output = greedy(prompt, n)
        prediction = draw.choice((None, output, edited(output, seed), prompt_of(seed + 50, 30)))
        request = Request(prompt, prediction, n, arrives=draw.randrange(8))
        if draw.random() < 0.5:
            request.aborted = request.arrives + 1 + draw.randrange(8)
        requests.append(request)
    run = tight.run(requests)
    check_outputs(requests, run, greedy)
    assert sum(answer["end"] == "aborted" for answer in run.answers) >= 3
    assert run.accepted > 0
    assert tight.state() == {"occupied": 0, "known": 0, "counted": 0, "rows": 0}


def test_prefix_caching(k32: V2Engine, greedy: Greedy) -> None:
    """The second time a prompt's blocks come from the cache: the drafter still sees all of its tokens."""
    n = 40
    prompts = [prompt_of(seed, 100) for seed in (21, 22)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    first = [Request(prompt, None, n) for prompt in prompts]
    second = [
        Request(prompts[0], outputs[0], n),
        Request(prompts[1], edited(outputs[1], 3), n),
        Request(prompts[0], None, n),
        Request(prompts[1], outputs[1], n),
    ]
    check_outputs(first, k32.run(first), greedy)
    run = k32.run(second)
    check_outputs(second, run, greedy)
    assert all(rows[0][0] < 100 for rows in map(run.of, range(4)))  # most of each prompt was cached
    assert run.accepted > n


def test_the_next_turn_finds_the_answer_in_the_prefix_cache(k32: V2Engine, greedy: Greedy) -> None:
    """All of its blocks: the last step of the first turn has six tokens, and fills a block of 32."""
    prompt, n = prompt_of(23, 27), 40
    output = greedy(prompt, n)
    first = k32.run([Request(prompt, output, n)])
    assert first.of(0)[-1][2] == 6
    second = k32.run([Request([*prompt, *output, 7, 8, 9], None, 2)])
    assert second.of(0)[0][0] == len(prompt) + n + 3 - 64


def test_a_malformed_prediction_is_dropped_for_its_request_alone(k4: V2Engine, greedy: Greedy) -> None:
    n = 12
    prompts = [prompt_of(seed) for seed in range(3)]
    requests = [
        Request(prompts[0], None, n, malformed=[1, 2, 3]),  # no whole number of int32
        Request(prompts[1], None, n, malformed=[255, 255, 0, 0]),  # token 65535 of a vocabulary of 404
        Request(prompts[2], greedy(prompts[2], n), n),
    ]
    run = k4.run(requests)
    check_outputs(requests, run, greedy)
    assert run.verification_steps(2) < n - 1
    assert run.verification_steps(0) == run.verification_steps(1) == n - 1
    log = k4.log.read_text()
    assert log.count("is served without its prediction") >= 2
    assert "expected 0 ≤ token id < 404, got others" in log


def test_drafts_end_at_max_tokens_and_at_the_context(k16: V2Engine, greedy: Greedy) -> None:
    prompt = prompt_of(31, 230)  # the context is 256
    output = greedy(prompt, 26)
    requests = [Request(prompt, output + output, 60), Request(prompt_of(32), greedy(prompt_of(32), 40), 5)]
    run = k16.run(requests)
    assert run.outputs == [output, greedy(prompt_of(32), 5)]
    assert run.answers[0]["end"] == run.answers[1]["end"] == "length"
    # Beyond the first token, at most five more can be output: one from the model, so four drafts.
    assert max(drafts for _, drafts, _ in run.of(1)) <= 4


def test_a_batch_that_is_smaller_than_the_drafts_serves_a_cached_prompt(
    tiny_model: Path, tmp_path: Path, greedy: Greedy
) -> None:
    """vLLM pads a request whose prompt is cached but for one token to 1 + K tokens, and waits for room."""
    prompt = prompt_of(7, 33)
    with V2Engine(
        tiny_model,
        tmp_path,
        num_draft_tokens=64,
        environment={"GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"},
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    ) as engine:
        again = Request(prompt, greedy(prompt, N), N, arrives=N + 20)
        run = engine.run([Request(prompt, greedy(prompt, N), N), again], seconds=60)
        [line] = engine.warnings()
    assert run.outputs == [greedy(prompt, N)] * 2
    assert "num_speculative_tokens is 64; gpu_align uses 63" in line
    assert run.verification_steps(1) == 1

"""Recipes and earlier answers on the V2 runner, up to the usage: fewer steps, the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from v2_harness import Request, Spoken, V2Engine, prompt_of

from gpu_align.recipes import Misses

pytestmark = pytest.mark.vllm

#: No earlier answers.
APART = {"memory": False}


@pytest.fixture(scope="module")
def engine(spoken: Spoken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engine]:
    """K = 4, asynchronous scheduling, with a pack that knows what the model writes."""
    directory = tmp_path_factory.mktemp("recipes")
    with V2Engine(
        spoken.model,
        directory,
        before="from vllm_integration.worker import miss_log\nmiss_log.EVERY = 0.1",
        num_draft_tokens=4,
        asynchronous=True,
        delay_counts=1,
        step_log=True,
        environment={
            "GPU_ALIGN_RECIPES": str(spoken.pack),
            "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64",
            "GPU_ALIGN_MEMORY_TOKENS": "1000",
            "GPU_ALIGN_RECIPE_MISSES": str(directory / "misses"),
        },
    ) as running:
        yield running


def test_recipes_change_steps_and_no_token(
    engine: V2Engine, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    n = spoken.num_tokens
    outputs = [greedy(prompt, n) for prompt in spoken.prompts]
    useless = [[7] * 12, outputs[1][::-1], None, list(range(300, 320))]
    run = engine.run(
        [Request(p, guess, n, extra=APART) for p, guess in zip(spoken.prompts, useless, strict=True)]
        + [Request(spoken.prompts[0], None, n, extra={"recipes": [], "memory": False})]
    )
    *answers, alone = run.answers
    assert run.outputs == [*outputs, outputs[0]]
    # A plain one-token step at a time, beside others that are drafted for.
    assert alone["usage"] is None
    assert run.of(4)[1:] == [(1, 0, 1)] * (n - 1)
    logs = {path.name.split("-")[0]: path for path in engine.steps.iterdir()}
    assert sorted(logs) == ["0", "1", "2", "3"]
    for index, answer in enumerate(answers):
        count = answer["usage"]["by_source"]["recipe"]
        assert 0 < count["accepted"] <= count["drafted"]
        assert run.verification_steps(index) < n - 1
        log = yaml.safe_load(logs[str(index)].read_text())
        assert log["usage"]["by_source"] == answer["usage"]["by_source"]
        assert [token for step in log["steps"] for token in step["new"]] == outputs[index]
        for step in log["steps"]:
            if step["proposed"]:
                assert step["candidate"]["source"] == step["source"]
    assert engine.warnings() == []


def test_recipe_tokens_are_counted_as_the_model_wrote_them(
    engine: V2Engine, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    """Against the step logs: every refuted recipe token is counted, with what was written instead."""
    prompts = [*spoken.prompts, *(prompt_of(seed) for seed in range(60, 64))]
    engine.run([Request(prompt, None, spoken.num_tokens, extra=APART) for prompt in prompts])
    refuted = set()
    for path in engine.steps.iterdir():
        for step in yaml.safe_load(path.read_text())["steps"]:
            accepted, drafts, new = step["accepted"], step["proposed"], step["new"]
            wrong = accepted < len(drafts) and accepted < len(new) and drafts[accepted] != new[accepted]
            if step["source"] == "recipe" and wrong:
                refuted.add((drafts[accepted], new[accepted]))
    assert refuted
    deadline = time.monotonic() + 20
    counted: set[tuple[int, int]] = set()
    while not refuted <= counted and time.monotonic() < deadline:
        time.sleep(0.2)
        for path in (engine.steps.parent / "misses").glob("*.json"):
            misses = Misses.load(path).counts
            counted = {(miss.expected, miss.said) for miss in misses if miss.said != miss.expected}
    assert refuted <= counted


def test_earlier_answers_are_drafted_from(
    engine: V2Engine, greedy: Callable[[list[int], int], list[int]]
) -> None:
    prompt, n = prompt_of(70), 24
    once = Request(prompt, None, n, salt="a", extra={"recipes": []})
    first = engine.run([once])
    again = engine.run([once, Request(prompt, None, n, salt="b", extra={"recipes": []})])
    assert first.outputs + again.outputs == [greedy(prompt, n)] * 3
    sources = [answer["usage"]["by_source"] for answer in (*first.answers, *again.answers)]
    assert ["memory" in by_source for by_source in sources] == [False, True, False]
    assert sources[1]["memory"]["accepted"] > n // 2
    assert again.verification_steps(0) < min(first.verification_steps(0), again.verification_steps(1))
    [log] = [
        path
        for path in engine.steps.iterdir()
        if yaml.safe_load(path.read_text())["usage"]["by_source"] == sources[1]
    ]
    candidates = [step["candidate"] for step in yaml.safe_load(log.read_text())["steps"] if step["proposed"]]
    assert {candidate["source"] for candidate in candidates} >= {"memory"}
    assert engine.warnings() == []


def test_a_prediction_that_holds_is_still_the_best_source(
    engine: V2Engine, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    prompt, n = spoken.prompts[0], spoken.num_tokens
    output = greedy(prompt, n)
    run = engine.run([Request(prompt, output, n)])
    assert run.outputs == [output]
    by_source = run.answers[0]["usage"]["by_source"]
    assert by_source == {"prediction": {"drafted": n - 5, "accepted": n - 5}}


def test_a_pack_that_is_not_there_costs_one_warning(
    spoken: Spoken, tmp_path: Path, greedy: Callable[[list[int], int], list[int]]
) -> None:
    gone = tmp_path / "gone.json.gz"
    prompt = spoken.prompts[0]
    with V2Engine(
        spoken.model, tmp_path, num_draft_tokens=4, environment={"GPU_ALIGN_RECIPES": str(gone)}
    ) as running:
        run = running.run([Request(prompt, greedy(prompt, 8), 8)])
        assert run.outputs == [greedy(prompt, 8)]
        assert run.accepted > 0
        [line] = running.warnings()
        assert "gpu_align drafts without recipes" in line
        assert str(gone) in line

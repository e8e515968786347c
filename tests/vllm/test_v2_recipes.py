"""Recipes and earlier answers on the V2 runner, up to the usage and the step log: fewer steps, the same tokens,
over preemptions too."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add

import pytest
import yaml

from gpu_align.tools.recipes.learn import learn
from tests.vllm.engines import SHORT, Request, V2Engine, prompt_of
from tests.vllm.tiny_llama import Greedy, build

pytestmark = pytest.mark.vllm

#: No earlier answers.
APART = {"memory": False}


N = 24
PROMPTS = [prompt_of(seed) for seed in range(80, 84)]


@pytest.fixture(scope="module")
def outputs(greedy: Greedy) -> list[list[int]]:
    """The model's own answer to each prompt."""
    return [greedy(prompt, N) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(outputs: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engine]:
    """K = 4, asynchronous scheduling, with a pack that was learned from what the model writes. Its words are of
    letters, which recipes do not cut. The KV cache overflows."""
    directory = tmp_path_factory.mktemp("recipes")
    words = [f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghijklmnopqrst"]
    texts = [" ".join(words[token - 4] for token in each) for each in map(add, PROMPTS, outputs)]
    learn([("texts", text) for text in texts * 3]).save(directory / "pack.json.gz")
    with V2Engine(
        build(directory / "model", words=words),
        directory,
        num_draft_tokens=4,
        asynchronous=True,
        delay_counts=True,
        step_log=True,
        num_gpu_blocks_override=9,
        environment={
            **SHORT,
            "GPU_ALIGN_RECIPES": str(directory / "pack.json.gz"),
            "GPU_ALIGN_MEMORY_TOKENS": "1000",
        },
    ) as running:
        yield running


def test_recipes_change_steps_and_no_token(engine: V2Engine, outputs: list[list[int]]) -> None:
    useless = [[7] * 12, outputs[1][::-1], None, list(range(300, 320))]
    plain = Request(PROMPTS[0], None, N, extra={"recipes": [], **APART})
    predicted = zip(PROMPTS, useless, strict=True)
    run = engine.run([plain, *(Request(prompt, guess, N, extra=APART) for prompt, guess in predicted)])
    assert run.outputs == [outputs[0], *outputs]
    assert run.preemptions
    # A plain one-token step at a time, beside others that are drafted for.
    assert run.answers[0]["usage"] is None
    assert run.of(0)[1:] == [(1, 0, 1)] * (N - 1)
    logs = {path.name.split("-")[0]: path for path in engine.steps.iterdir()}
    assert sorted(logs) == ["1", "2", "3", "4"]
    for index, answer in enumerate(run.answers[1:], 1):
        count = answer["usage"]["by_source"]["recipe"]
        assert 0 < count["accepted"] <= count["drafted"]
        assert run.verification_steps(index) < N - 1
        log = yaml.safe_load(logs[str(index)].read_text())
        assert (log["usage"], log["prompt_tokens"]) == (answer["usage"], 12)
        assert [token for step in log["steps"] for token in step["new"]] == outputs[index - 1]
        for step in log["steps"]:
            assert step["new"][: step["accepted"]] == step["proposed"][: step["accepted"]]
            if step["proposed"]:
                assert step["candidate"]["source"] == step["source"]
    assert engine.warnings() == []

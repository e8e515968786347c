"""Two tensor-parallel ranks propose the same drafts in every step, and answers are those without predictions: the
model's greedy ones, and on V2 those of a seed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Request, V2Engine, edited, prompt_of
from tests.vllm.tiny_llama import Greedy, greedy_by_transformers

pytestmark = pytest.mark.vllm

#: Tokens of an answer; steps with drafts of each runner in `make test`. The interpreter runs those of V2.
N, STEPS = 40, {"V1": 80, "V2": 20}
#: Sampled on V2 with these seeds, which are prompts' numbers, too.
SEEDS = range(100, 104)
#: The words of this model are none of the recipes.
ENVIRONMENT = {
    "GPU_ALIGN_RECIPES": "off",
    "GPU_ALIGN_MEMORY_TOKENS": "2000",
    "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64",
}


def sampling(seed: int) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed} if seed in SEEDS else {}


def check_batch(engine: V2Engine, answers: dict[int, list[int]], greedy: Greedy, rng: random.Random) -> None:
    """Requests with predictions of several kinds, which arrive and are aborted at random.

    answers: of the seeds that are sampled, without a prediction.
    """
    requests, texts = [], []
    for index in range(8):
        # Of few prompts, whose answers are known then.
        seed = rng.choice([*answers]) if answers and index % 2 else rng.randrange(24)
        text = answers.get(seed) or greedy(prompt_of(seed), N)
        edits = [edited(text, 100 * index + version) for version in range(3)]  # the most steps with drafts
        prediction = rng.choice([text, *edits, prompt_of(seed + 1, N), text[::-1], None])
        aborted = rng.randrange(5, 20) if rng.random() < 0.1 else None
        arrives, params = rng.randrange(4), sampling(seed)
        requests.append(Request(prompt_of(seed), prediction, N, arrives, aborted, params=params))
        texts.append(text)
    run = engine.run(requests)
    for request, output, text, answer in zip(requests, run.outputs, texts, run.answers, strict=True):
        assert output == text or answer["end"] == "aborted", request


def drafts_of(directory: Path) -> tuple[list[str], list[str]]:
    """What each rank has written so far, one line a step."""
    first, second = ((directory / f"rank-{rank}").read_text() for rank in (0, 1))
    return first.rpartition("\n")[0].splitlines(), second.rpartition("\n")[0].splitlines()


@pytest.mark.parametrize("runner", STEPS)
def test_both_ranks_draft_alike(
    runner: str, tiny_model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    greedy, steps = greedy_by_transformers(tiny_model), 0
    with V2Engine(
        tiny_model,
        tmp_path,
        num_draft_tokens=4,
        environment=ENVIRONMENT,
        runner=runner,
        before=f"record_drafts({str(tmp_path)!r})",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as engine:
        seeds = SEEDS if runner == "V2" else ()
        alone = [Request(prompt_of(seed), None, N, params=sampling(seed)) for seed in seeds]
        answers = dict(zip(seeds, engine.run(alone).outputs, strict=True)) if alone else {}
        assert all(text != greedy(prompt_of(seed), N) for seed, text in answers.items())
        while steps < count(STEPS[runner]):
            check_batch(engine, answers, greedy, rng)
            both = zip(*drafts_of(tmp_path), strict=False)
            steps = sum(any(any(drafts) for drafts in json.loads(left)[1]) for left, _ in both)
        for _ in range(100):  # one rank may be a step behind the other
            first, second = drafts_of(tmp_path)
            if len(first) == len(second):
                break
            time.sleep(0.1)
        assert first == second
        assert not engine.warnings()

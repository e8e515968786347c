"""Tensor parallel: two worker processes, each with its own drafter on its own copy of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from v2_harness import Request, V2Engine, edited, prompt_of

pytestmark = pytest.mark.vllm


def test_both_ranks_draft_the_same_and_one_writes_the_log(
    tiny_model: Path, tmp_path: Path, greedy: Callable[[list[int], int], list[int]]
) -> None:
    n = 20
    prompts = [prompt_of(seed) for seed in range(4)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    predictions = (None, outputs[1], edited(outputs[2], 2), outputs[3][::-1])
    with V2Engine(
        tiny_model,
        tmp_path,
        num_draft_tokens=4,
        environment={"GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"},
        step_log=True,
        record_drafts=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as engine:
        run = engine.run(
            [Request(p, prediction, n) for p, prediction in zip(prompts, predictions, strict=True)]
        )
    assert run.outputs == outputs
    assert run.accepted > n // 2
    assert {drafts for _, drafts, _ in run.of(0)} == {0}
    first, second = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert len(first.splitlines()) >= n // 5
    assert len(list((tmp_path / "steps").iterdir())) == 3  # a file a prediction, not two

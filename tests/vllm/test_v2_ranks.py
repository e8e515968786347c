"""Tensor parallel: two worker processes, each with its own drafter on its own copy of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from v2_harness import SHORT, Request, Spoken, V2Engine, edited

pytestmark = pytest.mark.vllm


def test_both_ranks_draft_the_same_and_one_writes_the_log(
    spoken: Spoken, tmp_path: Path, greedy: Callable[[list[int], int], list[int]]
) -> None:
    n, prompts = 20, spoken.prompts
    outputs = [greedy(prompt, n) for prompt in prompts]
    predictions = (None, outputs[1], edited(outputs[2], 2), outputs[3][::-1])
    with V2Engine(
        spoken.model,
        tmp_path,
        num_draft_tokens=4,
        environment={
            **SHORT,
            "GPU_ALIGN_RECIPES": str(spoken.pack),
            "GPU_ALIGN_MEMORY_TOKENS": "1000",
        },
        step_log=True,
        record_drafts=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as engine:
        run = engine.run(
            [
                Request(
                    p, prediction, n, extra={"recipes": [], "memory": False} if prediction is None else {}
                )
                for p, prediction in zip(prompts, predictions, strict=True)
            ]
        )
        remembered = engine.run([Request(prompts[1], None, n, extra={"recipes": []})])
    assert remembered.outputs == outputs[1:2]
    assert remembered.answers[0]["usage"]["by_source"]["memory"]["accepted"] > n // 2
    assert run.outputs == outputs
    assert run.accepted > n // 2
    assert {drafts for _, drafts, _ in run.of(0)} == {0}
    first, second = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert len(first.splitlines()) >= n // 5
    logs = [yaml.safe_load(path.read_text()) for path in (tmp_path / "steps").iterdir()]
    assert len(logs) == 4  # a file a request that is drafted for, not two
    assert any("recipe" in log["usage"]["by_source"] for log in logs)
    assert engine.warnings() == []

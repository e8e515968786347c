"""A request with a seed, whose prompt comes in parts, on the V1 model runner and a CPU. vLLM alone ends the
engine: `gen.set_offset`, which a CPU's generator does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.engines import Request, V2Engine, prompt_of

pytestmark = pytest.mark.vllm


def test_an_answer_does_not_depend_on_how_its_prompt_is_cut(start_engine: Callable[..., V2Engine]) -> None:
    """Alone and in parts; with most of the prompt in the prefix cache, in one; beside others, preempted and read
    anew in parts."""
    engine = start_engine(
        "v1-seeds",
        runner="V1",
        num_draft_tokens=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=12,
        enable_prefix_caching=True,
    )
    requests = [
        Request(prompt_of(seed, 110), max_tokens=60, params={"temperature": 1.0, "seed": seed})
        for seed in range(4)
    ]
    alone = [engine.run([request]) for request in requests]
    answers = [run.outputs[0] for run in alone]
    assert [row[0] for row in alone[0].of(0)[:3]] == [48, 48, 14]
    assert len({tuple(answer) for answer in answers}) == 4
    again = engine.run(requests[3:])
    assert again.outputs == answers[3:]
    assert again.of(0)[0][0] < 48
    together = engine.run(requests)
    assert together.preemptions
    assert together.outputs == answers

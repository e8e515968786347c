"""The V1 model runner of a real engine: how much is drafted, what is compiled when, and requests with a seed.
(Whatever is predicted: `tests/campaign`.)"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gpu_align.ops import host
from tests.vllm.engines import Request, V2Engine, prompt_of
from tests.vllm.tiny_llama import Greedy

pytestmark = pytest.mark.vllm

K, N = 4, 30
COUNTED = """
from gpu_align.ops.host import Entry
Entry.compiled = []
def counted(self, *args, compile=Entry._compile, **kwargs):
    if self._function.__module__.startswith("gpu_align."):  # the scheduler's are compiled on a thread
        self.compiled.append(self._function.__name__)
    return compile(self, *args, **kwargs)
Entry._compile = counted
"""
SAMPLED = """
from gpu_align import Drafter
engine.sampled, propose = [], Drafter.propose
Drafter.propose = lambda self, *args: engine.sampled.extend(args[1].tolist()) or propose(self, *args)
"""
COMPILED = "from gpu_align.ops.host import Entry\nfound = Entry.compiled"


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., V2Engine]) -> V2Engine:
    """A KV cache that a few requests overflow, and 48 tokens a step: longer prompts come in chunks."""
    engine = start_engine(
        "v1",
        runner="V1",
        num_draft_tokens=K,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=12,
        enable_prefix_caching=True,
        step_log=True,
        before=COUNTED,
    )
    engine.facts["compiled"] = engine.execute(COMPILED)
    return engine


def test_no_draft_goes_on_after_the_end_of_an_answer(engine: V2Engine, greedy: Greedy) -> None:
    """A prompt in three parts, with none; then as many drafts as the answer has tokens left."""
    prompt = prompt_of(7, 110)
    output = greedy(prompt, N)
    assert output[7] not in output[:7]
    stop = {"stop_token_ids": [output[7]]}
    engine.execute(SAMPLED)
    run = engine.run([Request(prompt, output, N)])
    assert run.outputs == [output]
    assert run.of(0) == [(48, 0, 0), (48, 0, 0), (14, 0, 1), *[(5, 4, 5)] * 5, (4, 3, 4)]
    assert engine.execute("found = engine.sampled") == [1, 5, 5, 5, 5, 5]
    run = engine.run([Request(prompt, output, N, params=stop)])
    assert run.outputs == [output[:8]]
    assert [drafts for _, drafts, sampled in run.of(0) if sampled] == [0, 4, 2]
    assert engine.facts["compiled"] == ["step_reference", "_look"] * host.COMPILED
    assert engine.execute(COMPILED) == engine.facts["compiled"], "all at the start"


def test_a_request_that_was_preempted_is_drafted_for_as_before(engine: V2Engine, greedy: Greedy) -> None:
    """More of them than there are slots."""
    prompts = [prompt_of(seed, 40) for seed in range(10, 18)]
    outputs = [greedy(prompt, 70) for prompt in prompts]
    run = engine.run([Request(*each, 70) for each in zip(prompts, outputs, strict=True)])
    assert run.outputs == outputs
    assert run.preemptions
    # A step without drafts when it returns.
    most = math.ceil(69 / (K + 1)) + run.preemptions
    assert max(run.verification_steps(index) for index in range(8)) <= most
    assert not any(engine.ask("held").values())


def test_an_answer_with_a_seed_does_not_depend_on_how_its_prompt_is_cut(engine: V2Engine) -> None:
    """Alone and in parts; with most of the prompt in the prefix cache, in one; beside others, preempted and read
    anew in parts. vLLM alone ends the engine: `gen.set_offset`, which a CPU's generator does not have."""
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

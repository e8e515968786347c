"""CPU against GPU: one drafting step of a whole batch, side by side: ``make bench``.

Each step brings 8 new tokens to every request, or one, and drafts up to 16 (`workload`). A group a size and state.
Every contestant's drafts are checked before it is timed. On a GPU the wall time of a call has the launch and
the wait in it; ``extra_info["device_us"]`` is the device time of the step, ours from a replayed CUDA graph.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from benchmarks.alignment.device_time import time_graph
from benchmarks.alignment.workload import (
    NUM_DRAFT_TOKENS,
    STATES,
    STEP_TOKENS,
    Steps,
    Texts,
    make_texts,
    spread,
)
from benchmarks.gpu.lcs_time import SIZES
from gpu_align.policies import OPTIONAL_POLICIES, POLICIES, Policy, StaticText

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="the CPU path without Numba is plain Python"
)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a kernel's time means something on a GPU only"
)


def make_policy(name: str) -> Policy:
    if name == "static_text":
        return StaticText(lambda token: token < 10)  # lines of about ten tokens, as code has
    return {**POLICIES, **OPTIONAL_POLICIES}[name]()


class PolicySteps:
    """One policy object a request, as in an engine whose drafter lives on the host."""

    def __init__(self, name: str, texts: Texts) -> None:
        self.outputs = texts.outputs.tolist()
        self.policies = [make_policy(name) for _ in self.outputs]
        self.written, self.step_tokens = texts.done, texts.step_tokens
        for policy, prediction, output in zip(
            self.policies, texts.predictions.tolist(), self.outputs, strict=True
        ):
            policy.start([], prediction, NUM_DRAFT_TOKENS)
            policy.extend(output[: texts.done])
        self.new: list[list[int]] = []

    def advance(self) -> None:
        self.new = [output[self.written : self.written + self.step_tokens] for output in self.outputs]
        self.written += self.step_tokens

    def step(self) -> list[list[int]]:
        for policy, tokens in zip(self.policies, self.new, strict=True):
            policy.extend(tokens)
        return [policy.propose() for policy in self.policies]


def time_policy(benchmark: Any, name: str, texts: Texts, state: str) -> None:
    steps = PolicySteps(name, texts)
    steps.advance()
    drafts = steps.step()
    if state == "aligned":  # in the other states a policy may draft nothing, or something wrong
        for draft, output in zip(drafts, steps.outputs, strict=True):
            assert draft, "expected a draft, found none"
            assert draft == output[steps.written : steps.written + len(draft)]
    rounds = min(10, texts.num_steps - 2)
    benchmark.pedantic(steps.step, setup=steps.advance, rounds=rounds)


def time_cpu(benchmark: Any, steps: Steps) -> None:
    steps.advance()
    steps.check()
    benchmark.pedantic(steps.propose, setup=steps.advance, rounds=20)


def time_gpu(benchmark: Any, steps: Steps) -> None:
    steps.advance()
    steps.check()

    def step() -> None:
        steps.propose()
        torch.cuda.synchronize()

    benchmark.extra_info["device_us"] = spread(time_graph(steps))
    benchmark.pedantic(step, setup=steps.advance, rounds=20, warmup_rounds=3)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("batch", "size", "new"), [(64, 4096, 1), *((batch, size, STEP_TOKENS) for batch, size in SIZES)]
)
class TestStep:
    """Where no draft was accepted, with one token, a host has little to take in and as much to look up as ever."""

    @pytest.fixture(autouse=True)
    def texts(self, benchmark: Any, batch: int, size: int, new: int, state: str) -> Texts:
        title = "step" if new > 1 else "step of one token"
        benchmark.group = f"{title}, batch {batch}, {size} tokens, {state}"
        return make_texts(batch, size, state, new)

    @pytest.mark.largest(1 << 18)
    @pytest.mark.parametrize("name", ["prompt_lookup", "static_text"])
    def test_policy(self, benchmark: Any, name: str, texts: Texts, state: str) -> None:
        time_policy(benchmark, name, texts, state)

    @pytest.mark.largest(1 << 18)
    def test_suffix_tree(self, benchmark: Any, texts: Texts, state: str) -> None:
        from benchmarks.quality.build_suffix_peer import add_to_path

        add_to_path()
        pytest.importorskip("arctic_inference.suffix_decoding")
        time_policy(benchmark, "suffix_decoding", texts, state)

    @needs_numba
    @pytest.mark.largest(1 << 18)
    def test_cpu(self, benchmark: Any, texts: Texts) -> None:
        time_cpu(benchmark, Steps(texts, "cpu"))

    @needs_gpu
    def test_gpu(self, benchmark: Any, texts: Texts) -> None:
        time_gpu(benchmark, Steps(texts, "cuda"))

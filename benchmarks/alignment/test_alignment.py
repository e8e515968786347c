"""CPU beside GPU, a whole batch at a time: LCS, realignment after a divergence, a drafting step: ``make bench``.

A group is an operation and a size; each row is a contestant, and its result is checked before it is timed.
``gpu_align_cpu`` is this library's CPU path, ``gpu_align_gpu`` its kernels, which take part where there is a GPU.
Their wall time has the launch and the wait in it; ``extra_info["device_us"]`` is the device's time alone.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.alignment import workload
from benchmarks.alignment.device_time import record, time_device
from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, STATES, STEP_TOKENS, Steps, Texts, Tokens
from benchmarks.quality.build_suffix_peer import add_to_path
from gpu_align import DrafterConfig
from gpu_align.ops.align import WINDOW
from gpu_align.ops.layout import LCS_ROW
from gpu_align.ops.lcs import lcs_length, lcs_prefix_row
from gpu_align.predictors import PredictorOptions
from gpu_align.tools.policies import OPTIONAL_POLICIES, POLICIES, Myers, Policy, StaticText

#: Requests and tokens of a text.
SIZES = [(batch, size) for size in (1024, 4096, 32_768) for batch in (1, 64, 256, 1024)]
#: Tokens of an output before it diverges, and of its prediction after that.
IN_SYNC = REST = 2048

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a kernel's time means something on a GPU only"
)


def rounds_for(batch: int, size: int) -> int:
    return 10 if batch * size <= 1 << 17 else 3


@lru_cache(maxsize=1)
def draw_pairs(batch: int, size: int) -> tuple[Tokens, Tokens]:
    """Contexts and predictions [B, N] int32 that differ by edits: 8 tokens of every 64."""
    rng = np.random.default_rng(batch + size)
    texts = rng.integers(0, 400, (batch, size), dtype=np.int32)
    contexts = texts.copy()
    for at in range(8, size - 8, 64):
        contexts[:, at : at + 8] = rng.integers(0, 400, (batch, 8))
    return contexts, texts


def tensors_of(contexts: Tokens, texts: Tokens, device: str) -> tuple[torch.Tensor, ...]:
    """The arguments of `lcs_length`."""
    found = []
    for tokens in (contexts, texts):
        found.append(torch.from_numpy(tokens).to(device))
        found.append(torch.full((len(tokens),), tokens.shape[1], dtype=torch.int32, device=device))
    return tuple(found)


def lcs_rows(contexts: Tokens, texts: Tokens) -> Tokens:
    """The reference's LCS of the first four with every prefix of the text."""
    return lcs_prefix_row(*tensors_of(contexts[:4], texts[:4], "cpu"), backend="reference").numpy()


def time_kernels(benchmark: Any, run: Callable[[], object], cells: int) -> None:
    """The call with its launch, and on the device; ``tcups``: 10**12 cells a second there."""

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize()

    found = workload.spread(time_device(run, lambda: None, 30))
    benchmark.extra_info.update(device_us=found, tcups=round(cells / found["median"] / 1e6, 4))
    benchmark.pedantic(run_and_wait, rounds=20, warmup_rounds=3)


@pytest.mark.parametrize(("batch", "size"), SIZES)
class TestLcs:
    """Of whole texts."""

    @pytest.fixture(autouse=True)
    def group(self, benchmark: Any, batch: int, size: int) -> None:
        benchmark.group = f"LCS length, batch {batch}, {size} tokens"

    @pytest.mark.largest(1 << 18)
    def test_rapidfuzz(self, benchmark: Any, batch: int, size: int) -> None:
        lcs_seq = pytest.importorskip("rapidfuzz.distance").LCSseq
        contexts, texts = draw_pairs(batch, size)
        pairs = list(zip(contexts.tolist(), texts.tolist(), strict=True))

        def run() -> list[int]:
            return [lcs_seq.similarity(c, t) for c, t in pairs]

        assert run()[:4] == lcs_rows(contexts, texts)[:, -1].tolist()
        benchmark.pedantic(run, rounds=rounds_for(batch, size), warmup_rounds=1)

    @pytest.mark.largest(1 << 16)
    def test_gpu_align_cpu(self, benchmark: Any, batch: int, size: int) -> None:
        args = tensors_of(*draw_pairs(batch, size), "cpu")
        assert lcs_length(*args, backend="reference")[0] == lcs_rows(*draw_pairs(batch, size))[0, -1]
        benchmark.pedantic(lambda: lcs_length(*args, backend="reference"), rounds=3)

    @needs_gpu
    @pytest.mark.largest(1 << 36, 2)
    def test_gpu_align_gpu(self, benchmark: Any, batch: int, size: int) -> None:
        args, rows = tensors_of(*draw_pairs(batch, size), "cuda"), lcs_rows(*draw_pairs(batch, size))
        # Nothing is allocated in what is timed.
        out = torch.empty_like(lcs_length(*args))
        lcs_length(*args, out=out)
        assert out[:4].tolist() == rows[:, -1].tolist()
        time_kernels(benchmark, lambda: lcs_length(*args, out=out), batch * size * size)


def time_cpu(benchmark: Any, steps: Steps) -> None:
    steps.advance()
    steps.check()
    benchmark.pedantic(steps.propose, setup=steps.advance, rounds=20)


def time_gpu(benchmark: Any, steps: Steps) -> None:
    """Device time is that of a captured step, one after another, with the start of its graph on the device."""
    steps.advance()
    steps.check()

    def step() -> None:
        steps.propose()
        torch.cuda.synchronize()

    graph = record([steps.propose], "cuda")
    benchmark.extra_info["device_us"] = workload.spread(time_device(graph, steps.advance, 50))
    benchmark.pedantic(step, setup=steps.advance, rounds=20, warmup_rounds=3)


def make_diverged(batch: int, size: int) -> Texts:
    """Outputs that diverged a step ago and write `size` tokens in the next."""
    predictions, others = workload.draw_texts(batch, IN_SYNC + REST + size)
    outputs = np.hstack([predictions[:, :IN_SYNC], others[:, : STEP_TOKENS + size + NUM_DRAFT_TOKENS]])
    outputs[:, IN_SYNC] = predictions[:, IN_SYNC] + 1
    return Texts(predictions[:, : IN_SYNC + REST], outputs, IN_SYNC + STEP_TOKENS, size)


def since_divergence(texts: Texts) -> tuple[Tokens, Tokens, Tokens]:
    """The rest of each prediction, what is written, and the first LCS rows of the two."""
    rest, written = texts.predictions[:, IN_SYNC:], texts.outputs[:, IN_SYNC : texts.done + texts.step_tokens]
    return rest, written, lcs_rows(written, rest)


def time_whole_texts(benchmark: Any, blocks: Callable[..., Any], is_exact: bool, texts: Texts) -> None:
    """blocks: of two texts, ``(i, j, length)`` each. An output stands after the last that is not empty."""
    rests, outputs, rows = since_divergence(texts)
    pairs = list(zip(rests.tolist(), outputs.tolist(), strict=True))

    def run() -> list[Any]:
        return [blocks(*pair) for pair in pairs]

    for found, (rest, written), row in zip(run(), pairs, rows, strict=False):
        places = [(i + n, j + n) for i, j, length in found for n in range(length)]
        assert all(rest[i] == written[j] for i, j in places)
        assert all(i < k and j < m for (i, j), (k, m) in pairwise(places))
        assert len(places) == row[-1] if is_exact else 0 < len(places) <= row[-1]
    benchmark.pedantic(run, rounds=rounds_for(len(pairs), texts.step_tokens))


def diverged_steps(texts: Texts, device: str) -> Steps:
    """Of a drafter that drafts from the prediction alone; where its outputs stand is checked."""
    steps = Steps(texts, device, config=DrafterConfig(use_context=False))
    steps.advance()
    steps.propose()
    words, rows = steps.drafter._state.align_state[:4, LCS_ROW].tolist(), since_divergence(texts)[2]
    for word, row in zip(words, rows, strict=False):
        assert [~word >> j & 1 for j in range(WINDOW)] == np.diff(row[: WINDOW + 1]).tolist()
    return steps


@pytest.mark.parametrize(
    ("batch", "size"), [(batch, n) for n in (1, 17, 256, 8192) for batch in (1, 64, 1024)]
)
class TestRealignment:
    """Peers align what was written since the divergence with the rest of the prediction; ours draft, too."""

    @pytest.fixture(autouse=True)
    def group(self, benchmark: Any, batch: int, size: int) -> None:
        benchmark.group = f"realignment, batch {batch}, {size} new tokens"

    @pytest.mark.largest(1 << 19)
    def test_rapidfuzz(self, benchmark: Any, batch: int, size: int) -> None:
        opcodes = pytest.importorskip("rapidfuzz.distance").LCSseq.opcodes
        texts = make_diverged(batch, size)
        time_whole_texts(benchmark, lambda *pair: opcodes(*pair).as_matching_blocks(), True, texts)

    @pytest.mark.largest(1 << 14)
    def test_difflib(self, benchmark: Any, batch: int, size: int) -> None:
        def blocks(*pair: list[int]) -> Any:
            return difflib.SequenceMatcher(None, *pair, autojunk=False).get_matching_blocks()

        time_whole_texts(benchmark, blocks, False, make_diverged(batch, size))

    @pytest.mark.largest(1 << 16)
    def test_myers(self, benchmark: Any, batch: int, size: int) -> None:
        rest, written, rows = since_divergence(make_diverged(batch, size))
        policies, new = [Myers() for _ in rest], written[:, STEP_TOKENS:].tolist()
        for policy, prediction, output in zip(policies, rest, written, strict=True):
            policy.reset([], PredictorOptions(NUM_DRAFT_TOKENS, prediction=tuple(prediction.tolist())))
            policy.push_tokens(output[:STEP_TOKENS].tolist())

        def run(policies: list[Myers]) -> None:
            for policy, tokens in zip(policies, new, strict=True):
                policy.push_tokens(tokens)

        run(found := [*map(copy.copy, policies)])
        for policy, row in zip(found, rows, strict=False):
            bits = np.frombuffer(policy._row.to_bytes(policy._size, "little"), dtype=np.uint8)
            grows = 1 - np.unpackbits(bits, bitorder="little")[: len(row) - 1]
            assert [0, *np.cumsum(grows)] == row.tolist()
        benchmark.pedantic(
            run, setup=lambda: (([*map(copy.copy, policies)],), {}), rounds=rounds_for(batch, size)
        )

    @pytest.mark.largest(1 << 19)
    def test_gpu_align_cpu(self, benchmark: Any, batch: int, size: int) -> None:
        time_cpu(benchmark, diverged_steps(make_diverged(batch, size), "cpu"))

    @needs_gpu
    def test_gpu_align_gpu(self, benchmark: Any, batch: int, size: int) -> None:
        time_gpu(benchmark, diverged_steps(make_diverged(batch, size), "cuda"))


class PolicySteps:
    """One policy object a request, as in an engine whose drafter lives on the host."""

    def __init__(self, name: str, texts: Texts) -> None:
        self.outputs = texts.outputs.tolist()
        make: Callable[[], Policy] = {**POLICIES, **OPTIONAL_POLICIES}[name]
        if name == "static_text":  # lines of about ten tokens, as code has
            make = partial(StaticText, lambda token: token < 10)
        self.policies = [make() for _ in self.outputs]
        self.written, self.step_tokens = texts.done, texts.step_tokens
        for policy, prediction, output in zip(
            self.policies, texts.predictions.tolist(), self.outputs, strict=True
        ):
            policy.reset([], PredictorOptions(NUM_DRAFT_TOKENS, prediction=tuple(prediction)))
            policy.push_tokens(output[: texts.done])
        self.new: list[list[int]] = []

    def advance(self) -> None:
        self.new = [output[self.written : self.written + self.step_tokens] for output in self.outputs]
        self.written += self.step_tokens

    def step(self) -> list[list[int]]:
        for policy, tokens in zip(self.policies, self.new, strict=True):
            policy.push_tokens(tokens)
        return [policy.predict_tokens() for policy in self.policies]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("batch", "size", "new"), [(64, 4096, 1), *((batch, size, STEP_TOKENS) for batch, size in SIZES)]
)
class TestStep:
    """A step brings 8 new tokens to every request, or one where no draft was accepted, and drafts up to 16."""

    @pytest.fixture(autouse=True)
    def texts(self, benchmark: Any, batch: int, size: int, new: int, state: str) -> Texts:
        title = "step" if new > 1 else "step of one token"
        benchmark.group = f"{title}, batch {batch}, {size} tokens, {state}"
        return workload.make_texts(batch, size, state, new)

    @pytest.mark.largest(1 << 18)
    @pytest.mark.parametrize("name", ["prompt_lookup", "static_text", "suffix_decoding"])
    def test_policy(self, benchmark: Any, name: str, texts: Texts, state: str) -> None:
        if name == "suffix_decoding":
            add_to_path()
            pytest.importorskip("arctic_inference.suffix_decoding")
        steps = PolicySteps(name, texts)
        steps.advance()
        drafts = steps.step()
        if state == "aligned":  # in the other states a policy may draft nothing, or something wrong
            for draft, output in zip(drafts, steps.outputs, strict=True):
                assert draft, "expected a draft, found none"
                assert draft == output[steps.written : steps.written + len(draft)]
        most = (texts.outputs.shape[1] - steps.written) // texts.step_tokens
        benchmark.pedantic(steps.step, setup=steps.advance, rounds=min(10, most))

    @pytest.mark.largest(1 << 18)
    def test_gpu_align_cpu(self, benchmark: Any, texts: Texts) -> None:
        time_cpu(benchmark, Steps(texts, "cpu", recipes=workload.make_recipes()))

    @needs_gpu
    def test_gpu_align_gpu(self, benchmark: Any, texts: Texts) -> None:
        time_gpu(benchmark, Steps(texts, "cuda", recipes=workload.make_recipes()))

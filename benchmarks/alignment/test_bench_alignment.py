"""CPU against GPU: a whole batch's longest common subsequences and realignment, side by side: ``make bench``.

One group a size; the fastest line of a group is 1.0. Every contestant's result is checked before it is timed.
The kernels take part where there is a GPU; under Triton's interpreter their time would mean nothing.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.alignment.device_time import time_device
from benchmarks.alignment.test_bench_step import needs_gpu, needs_numba, time_cpu, time_gpu
from benchmarks.alignment.workload import (
    NUM_DRAFT_TOKENS,
    STEP_TOKENS,
    Steps,
    Texts,
    Tokens,
    draw_texts,
    spread,
)
from benchmarks.gpu.lcs_time import SIZES, LcsCase, draw_pairs, tensors_of
from gpu_align import DrafterConfig
from gpu_align.ops.layout import WINDOW
from gpu_align.ops.lcs import lcs_length, lcs_prefix_row, lcs_workspace
from gpu_align.policies import Myers

#: Tokens of an output before it diverges, and of its prediction behind that.
IN_SYNC = REST = 2048


def lcs_rows(contexts: Tokens, texts: Tokens) -> Tokens:
    """What the NumPy reference says of the first four, with every prefix of the text."""
    return lcs_prefix_row(*tensors_of(contexts[:4], texts[:4], "cpu"), backend="reference").numpy()


def rounds_for(batch: int, size: int) -> int:
    return 10 if batch * size <= 1 << 17 else 3


@pytest.mark.parametrize(("batch", "size"), SIZES)
class TestLcsLength:
    @pytest.fixture(autouse=True)
    def group(self, benchmark: Any, batch: int, size: int) -> None:
        benchmark.group = f"LCS length, batch {batch}, {size} tokens"

    @pytest.mark.largest(1 << 18)
    def test_rapidfuzz(self, benchmark: Any, batch: int, size: int) -> None:
        lcs_seq = pytest.importorskip("rapidfuzz.distance").LCSseq
        contexts, texts = draw_pairs(LcsCase(batch, size))
        pairs = list(zip(contexts.tolist(), texts.tolist(), strict=True))

        def run() -> list[int]:
            return [lcs_seq.similarity(c, t) for c, t in pairs]

        assert run()[:4] == lcs_rows(contexts, texts)[:, -1].tolist()
        benchmark.pedantic(run, rounds=rounds_for(batch, size), warmup_rounds=1)

    @pytest.mark.largest(1 << 16)
    def test_numpy_reference(self, benchmark: Any, batch: int, size: int) -> None:
        args = tensors_of(*draw_pairs(LcsCase(batch, size)), "cpu")
        assert lcs_length(*args, backend="reference")[0] <= size
        benchmark.pedantic(lambda: lcs_length(*args, backend="reference"), rounds=3)

    @needs_gpu
    @pytest.mark.most_cells(1 << 36)
    def test_triton(self, benchmark: Any, batch: int, size: int) -> None:
        args = tensors_of(*draw_pairs(LcsCase(batch, size)), "cuda")
        out = torch.empty(batch, dtype=torch.int32, device="cuda")
        # Scratch memory is the caller's, so that none is allocated in the timed call.
        carry = torch.empty((batch, size), dtype=torch.int8, device="cuda")
        workspace = lcs_workspace(batch, size, size, device="cuda")

        def run() -> None:
            lcs_length(*args, out=out, carry=carry, workspace=workspace)

        run()
        assert out[:4].tolist() == lcs_rows(*draw_pairs(LcsCase(batch, size)))[:, -1].tolist()

        def run_and_wait() -> None:
            run()
            torch.cuda.synchronize()

        benchmark.extra_info["device_us"] = spread(time_device(run, lambda: None, 30))
        benchmark.pedantic(run_and_wait, rounds=20, warmup_rounds=3)


def make_diverged(batch: int, size: int) -> Texts:
    """Outputs that diverged a step ago and write `size` tokens in the next."""
    predictions, others = draw_texts(batch, IN_SYNC + REST + size)
    outputs = np.hstack([predictions[:, :IN_SYNC], others[:, : STEP_TOKENS + size + NUM_DRAFT_TOKENS]])
    outputs[:, IN_SYNC] = predictions[:, IN_SYNC] + 1
    return Texts(predictions[:, : IN_SYNC + REST], outputs, IN_SYNC + STEP_TOKENS, size)


def behind(texts: Texts) -> tuple[Tokens, Tokens, Tokens]:
    """Behind the divergence: the rest of each prediction, what is written, and the first LCS rows of the two."""
    rest, written = texts.predictions[:, IN_SYNC:], texts.outputs[:, IN_SYNC : texts.done + texts.step_tokens]
    return rest, written, lcs_rows(written, rest)


def time_static_text(benchmark: Any, blocks: Callable[..., Any], is_exact: bool, texts: Texts) -> None:
    """blocks: of two texts, ``(i, j, length)`` each. An output stands behind the last that is not empty."""
    rests, outputs, rows = behind(texts)
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
    steps = Steps(texts, device, recipes=None, config=DrafterConfig(use_context=False))
    steps.advance()
    steps.propose()
    for word, row in zip(steps.drafter._state.lcs_row[:4].tolist(), behind(texts)[2], strict=False):
        assert [word >> j & 1 for j in range(WINDOW)] == np.diff(row[: WINDOW + 1]).tolist()
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
        time_static_text(benchmark, lambda *pair: opcodes(*pair).as_matching_blocks(), True, texts)

    @pytest.mark.largest(1 << 14)
    def test_difflib(self, benchmark: Any, batch: int, size: int) -> None:
        def blocks(*pair: list[int]) -> Any:
            return difflib.SequenceMatcher(None, *pair, autojunk=False).get_matching_blocks()

        time_static_text(benchmark, blocks, False, make_diverged(batch, size))

    @pytest.mark.largest(1 << 16)
    def test_myers(self, benchmark: Any, batch: int, size: int) -> None:
        rest, written, rows = behind(make_diverged(batch, size))
        policies, new = [Myers() for _ in rest], written[:, STEP_TOKENS:].tolist()
        for policy, prediction, output in zip(policies, rest, written, strict=True):
            policy.start([], prediction.tolist(), NUM_DRAFT_TOKENS)
            policy.extend(output[:STEP_TOKENS].tolist())

        def run(policies: list[Myers]) -> None:
            for policy, tokens in zip(policies, new, strict=True):
                policy.extend(tokens)

        run(found := [*map(copy.copy, policies)])
        for policy, row in zip(found, rows, strict=False):
            bits = np.frombuffer(policy._row.to_bytes(policy._size, "little"), dtype=np.uint8)
            grows = 1 - np.unpackbits(bits, bitorder="little")[: len(row) - 1]
            assert [0, *np.cumsum(grows)] == row.tolist()
        benchmark.pedantic(
            run, setup=lambda: (([*map(copy.copy, policies)],), {}), rounds=rounds_for(batch, size)
        )

    @needs_numba
    @pytest.mark.largest(1 << 19)
    def test_token_loop(self, benchmark: Any, batch: int, size: int) -> None:
        time_cpu(benchmark, diverged_steps(make_diverged(batch, size), "cpu"))

    @needs_gpu
    def test_wavefront_gpu(self, benchmark: Any, batch: int, size: int) -> None:
        time_gpu(benchmark, diverged_steps(make_diverged(batch, size), "cuda"))

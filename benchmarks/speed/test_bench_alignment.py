"""CPU against GPU: the longest common subsequence of a whole batch, and a step of requests that diverged, side by
side: ``make bench``.

One group a size; the fastest line of a group is 1.0. Every contestant's result is checked before it is timed, but
for what a policy drafts after it diverged.
The kernel takes part where there is a GPU; under Triton's interpreter its time would mean nothing.
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.speed.device_time import time_device
from benchmarks.speed.lcs_time import LcsCase, draw_pairs, tensors_of
from benchmarks.speed.test_bench_step import PolicySteps, ends_line, needs_numba
from benchmarks.speed.workload import Steps, make_texts, spread
from gpu_align.ops.lcs import lcs_length, lcs_workspace
from gpu_align.policies import Myers, StaticText

SIZES = [(batch, size) for size in (1024, 4096, 32_768) for batch in (1, 64, 256, 1024)]
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a kernel's time means something on a GPU only"
)


def pairs_of(batch: int, size: int) -> list[tuple[list[int], list[int]]]:
    contexts, texts = draw_pairs(LcsCase(batch, size))
    return [(c.tolist(), t.tolist()) for c, t in zip(contexts, texts, strict=True)]


def reference(batch: int, size: int, rows: int = 4) -> list[int]:
    """What the NumPy reference says of the first `rows`."""
    contexts, texts = draw_pairs(LcsCase(batch, size))
    return lcs_length(*tensors_of(contexts[:rows], texts[:rows], "cpu"), backend="reference").tolist()


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
        pairs = pairs_of(batch, size)

        def run() -> list[int]:
            return [lcs_seq.similarity(c, t) for c, t in pairs]

        assert run()[:4] == reference(batch, size)
        benchmark.pedantic(run, rounds=rounds_for(batch, size), warmup_rounds=1)

    @pytest.mark.largest(1 << 12)
    def test_difflib(self, benchmark: Any, batch: int, size: int) -> None:
        pairs = pairs_of(batch, size)

        def run() -> list[int]:
            # Matching blocks, not an exact LCS: a common subsequence that is never longer.
            matchers = (difflib.SequenceMatcher(None, c, t, autojunk=False) for c, t in pairs)
            return [sum(block.size for block in m.get_matching_blocks()) for m in matchers]

        found, best = run(), reference(batch, size)
        assert all(size // 2 < n <= most for n, most in zip(found, best, strict=False))
        benchmark.pedantic(run, rounds=3)

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
        assert out[:4].tolist() == reference(batch, size)

        def run_and_wait() -> None:
            run()
            torch.cuda.synchronize()

        benchmark.extra_info["device_us"] = spread(time_device(run, lambda: None, 30))
        benchmark.pedantic(run_and_wait, rounds=20, warmup_rounds=3)


@pytest.mark.parametrize("size", [1, 17, 256, 8192])
@pytest.mark.parametrize("batch", [1, 64, 256, 1024])
class TestRealignment:
    """A step of requests that all diverged, with `size` new tokens each; half of a text is written before it."""

    @pytest.fixture(autouse=True)
    def group(self, benchmark: Any, batch: int, size: int) -> None:
        benchmark.group = f"realignment, batch {batch}, {size} new tokens"
        self.texts = make_texts(batch, max(1024, 4 * size), "lost", size)

    @pytest.mark.largest(1 << 14)
    @pytest.mark.parametrize("name", ["static_text_rapidfuzz", "static_text_difflib", "myers"])
    def test_policy(self, benchmark: Any, name: str, batch: int, size: int) -> None:
        if name == "static_text_rapidfuzz":
            pytest.importorskip("rapidfuzz")

        def setup() -> tuple[tuple[PolicySteps], dict[str, Any]]:
            aligner = "difflib" if name.endswith("difflib") else "auto"
            make = Myers if name == "myers" else partial(StaticText, ends_line, aligner)
            steps = PolicySteps(make, self.texts)
            steps.advance()
            return (steps,), {}

        benchmark.pedantic(PolicySteps.step, setup=setup, rounds=3)

    @needs_numba
    @pytest.mark.largest(1 << 16)
    def test_token_loop(self, benchmark: Any, batch: int, size: int) -> None:
        self.time(benchmark, Steps(self.texts, "cpu"))

    @needs_gpu
    def test_triton(self, benchmark: Any, batch: int, size: int) -> None:
        self.time(benchmark, Steps(self.texts, "cuda"))

    def time(self, benchmark: Any, steps: Steps) -> None:
        def run() -> None:
            steps.propose()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        steps.advance()
        steps.check()
        benchmark.pedantic(run, setup=steps.advance, rounds=10)

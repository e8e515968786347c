"""CPU against GPU: the longest common subsequence of a whole batch, side by side: ``make bench``.

One group a size; the fastest line of a group is 1.0. Every contestant's result is checked before it is timed.
The kernel takes part where there is a GPU; under Triton's interpreter its time would mean nothing.
"""

from __future__ import annotations

import difflib
from typing import Any

import pytest
import torch

from benchmarks.speed.device_time import time_device
from benchmarks.speed.lcs_time import LcsCase, draw_pairs, tensors_of
from benchmarks.speed.test_bench_step import SIZES, needs_gpu
from benchmarks.speed.workload import spread
from gpu_align.ops.lcs import lcs_length, lcs_workspace


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

"""CPU against GPU alignment, side by side: ``make bench``.

One group a size; the fastest line of a group is 1.0. Every contestant's result is checked before it is timed.
The kernels take part where there is a GPU; under Triton's interpreter their time would mean nothing.
"""

import difflib

import numpy as np
import pytest
import torch

from gpu_align.ops.lcs import lcs_length

SIZES = [(1, 1024), (64, 1024), (1, 4096)]


def make_batch(batch, size):
    """Predictions and contexts that differ by edits, as lists and as tensors."""
    rng = np.random.default_rng(batch + size)
    texts = rng.integers(0, 400, (batch, size), dtype=np.int32)
    contexts = texts.copy()
    for row in contexts:
        for _ in range(size // 64):
            at = rng.integers(0, size - 16)
            row[at : at + 8] = rng.integers(0, 400, 8)
    return contexts, texts


def expected(contexts, texts):
    return lcs_length(*pack(contexts, texts, "cpu"), backend="reference").tolist()


def pack(contexts, texts, device):
    lengths = torch.full((len(texts),), texts.shape[1], dtype=torch.int32, device=device)
    return torch.from_numpy(contexts).to(device), lengths, torch.from_numpy(texts).to(device), lengths.clone()


@pytest.mark.parametrize(("batch", "size"), SIZES)
class TestLcsLength:
    @pytest.fixture(autouse=True)
    def group(self, benchmark, batch, size):
        benchmark.group = f"LCS length, batch {batch}, {size} tokens"

    def test_rapidfuzz(self, benchmark, batch, size):
        lcs_seq = pytest.importorskip("rapidfuzz.distance").LCSseq
        contexts, texts = make_batch(batch, size)
        pairs = [(c.tolist(), t.tolist()) for c, t in zip(contexts, texts, strict=True)]

        def run():
            return [lcs_seq.similarity(c, t) for c, t in pairs]

        assert run() == expected(contexts, texts)
        benchmark(run)

    def test_difflib(self, benchmark, batch, size):
        contexts, texts = make_batch(batch, size)
        pairs = [(c.tolist(), t.tolist()) for c, t in zip(contexts, texts, strict=True)]

        def run():
            # Matching blocks, not an exact LCS: a common subsequence that is never longer.
            matchers = (difflib.SequenceMatcher(None, c, t, autojunk=False) for c, t in pairs)
            return [sum(block.size for block in m.get_matching_blocks()) for m in matchers]

        found = run()
        assert all(n <= best for n, best in zip(found, expected(contexts, texts), strict=True))
        benchmark.pedantic(run, rounds=3)

    def test_numpy_reference(self, benchmark, batch, size):
        args = pack(*make_batch(batch, size), "cpu")
        benchmark.pedantic(lambda: lcs_length(*args, backend="reference"), rounds=3)

    @pytest.mark.skipif(
        not torch.cuda.is_available(), reason="the kernel's time means something on a GPU only"
    )
    def test_triton(self, benchmark, batch, size):
        contexts, texts = make_batch(batch, size)
        args = pack(contexts, texts, "cuda")
        out = torch.empty(batch, dtype=torch.int32, device="cuda")
        lcs_length(*args, out=out)
        assert out.tolist() == expected(contexts, texts)

        def run():
            lcs_length(*args, out=out)
            torch.cuda.synchronize()

        benchmark(run)

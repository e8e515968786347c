"""Rows of exact LCS, small cases first: microseconds and cell updates a second of `lcs_length` on a GPU.

A case whose time, estimated from the rate of the largest case so far, is above `ROW_SECONDS` is not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.alignment.device_time import Clock
from benchmarks.alignment.workload import Tokens, spread
from benchmarks.gpu.result_file import SkipError
from gpu_align.ops.lcs import lcs_length

#: Estimated seconds of one row's calls above which it is left out, and its calls: as many as fit in a second.
ROW_SECONDS, MIN_CALLS, MAX_CALLS = 8.0, 5, 30


class LcsCase(NamedTuple):
    """`batch` pairs of texts of `size` tokens."""

    batch: int
    size: int

    @property
    def name(self) -> str:
        return f"lcs_length, batch {self.batch}, {self.size} tokens"

    @property
    def cells(self) -> int:
        return self.batch * self.size * self.size


#: Requests and tokens of a text.
SIZES = [(batch, size) for size in (1024, 4096, 32_768) for batch in (1, 64, 256, 1024)]
CASES = tuple(sorted((LcsCase(*size) for size in SIZES), key=lambda case: case.cells))
DRY_CASES = (LcsCase(1, 64), LcsCase(2, 100))


class LcsTimer:
    """Times case after case and remembers the rate."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.clock = Clock(device)
        #: Cells a second of the largest case so far.
        self.rate: float | None = None

    def measure(self, case: LcsCase) -> dict[str, Any]:
        """One row."""
        estimate = 0.0 if self.rate is None else case.cells / self.rate
        if estimate * (MIN_CALLS + 1) > ROW_SECONDS:
            raise SkipError(f"about {estimate * (MIN_CALLS + 1):.0f} s, the limit is {ROW_SECONDS:.0f} s")
        args = tensors_of(*draw_pairs(case), self.device)
        out = torch.full((case.batch,), -1, dtype=torch.int32, device=self.device)
        carry = torch.empty((case.batch, case.size), dtype=torch.int8, device=self.device)

        def run() -> None:
            lcs_length(*args, out=out, carry=carry)

        run()
        few = min(case.batch, 1 if case.size > 4096 else 2)
        want = lcs_length(*(tensor[:few].cpu() for tensor in args), backend="reference").tolist()
        assert out[:few].tolist() == want, f"expected {want}, found {out[:few].tolist()}"
        calls = MAX_CALLS if not estimate else min(MAX_CALLS, max(MIN_CALLS, int(1 / estimate)))
        if self.device != "cuda":
            calls = 2
        times, _ = self.clock.compare(run, lambda: None, lambda: None, calls, warm_up=1)
        found = spread(times)
        self.rate = case.cells / (found["median"] * 1e-6)
        return {
            "batch": case.batch, "size": case.size, "us": round(found["median"], 2),
            "iqr_us": round(found["iqr"], 2), "calls": calls, "tcups": round(self.rate / 1e12, 4),
        }  # fmt: skip


def rows(device: str, dry_run: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and measurement of each row."""
    timer = LcsTimer(device)
    for case in DRY_CASES if dry_run else CASES:
        yield case.name, partial(timer.measure, case)


def tensors_of(contexts: Tokens, texts: Tokens, device: str) -> tuple[torch.Tensor, ...]:
    """What `lcs_length` takes."""
    found = []
    for tokens in (contexts, texts):
        found.append(torch.from_numpy(tokens).to(device))
        found.append(torch.full((len(tokens),), tokens.shape[1], dtype=torch.int32, device=device))
    return tuple(found)


@lru_cache(maxsize=1)
def draw_pairs(case: LcsCase) -> tuple[Tokens, Tokens]:
    """Contexts and predictions [B, N] int32 that differ by edits: 8 tokens of every 64."""
    rng = np.random.default_rng(case.batch + case.size)
    texts = rng.integers(0, 400, (case.batch, case.size), dtype=np.int32)
    contexts = texts.copy()
    for at in range(8, case.size - 8, 64):
        contexts[:, at : at + 8] = rng.integers(0, 400, (case.batch, 8))
    return contexts, texts

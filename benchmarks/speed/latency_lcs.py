"""The exact LCS on its compiled code: cycles a token, and how many cells a second that makes on a whole GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.speed.latency_paths import Launch, launches, run_launch
from benchmarks.speed.sass import Program
from benchmarks.speed.sass_memory import Latencies
from benchmarks.speed.sass_warp import Trace

#: Of an H100 or H200: multiprocessors, their schedulers, and what a multiprocessor holds.
NUM_SMS, SCHEDULERS = 132, 4
WARPS, REGISTERS, SHARED, PROGRAMS = 64, 65_536, 227 * 1024, 32

#: Prediction lengths that are run, and the context lengths; cycles between the latter are those of a token.
SIZES = (1024, 4096)
TOKENS = (64, 192)
#: The batch and context of the throughput that is not at full occupancy.
BATCH, CONTEXT = 256, 4096


@dataclass(frozen=True)
class Compiled:
    """A kernel's instructions, and what a program of it takes from a multiprocessor."""

    program: Program
    registers: int
    shared: int

    def programs(self, num_warps: int) -> int:
        """Programs that a multiprocessor holds at once."""
        registers = -(-self.registers // 8) * 8 * 32 * num_warps
        shared = SHARED // self.shared if self.shared else PROGRAMS
        return max(min(PROGRAMS, WARPS // num_warps, REGISTERS // registers, shared), 1)


def record(num_tokens: int, num_prediction: int) -> tuple[list[Launch], torch.Tensor, int]:
    """``(launches, the tensor of the length, what it should be)`` of `lcs_length` for one pair.

    Tokens are drawn as code has them: half of them from fifty.
    """
    from gpu_align.ops import lcs as launch
    from gpu_align.ops.kernels import lcs as kernels

    rng = np.random.default_rng(num_prediction)
    often, seldom = (rng.integers(0, n, num_prediction + max(TOKENS), np.int32) for n in (50, 40_000))
    text = torch.from_numpy(np.where(rng.random(len(often)) < 0.5, often, seldom)).reshape(1, -1)
    context = text[:, num_prediction : num_prediction + num_tokens].contiguous()
    prediction = text[:, :num_prediction].contiguous()
    lengths = [torch.tensor([t.shape[1]], dtype=torch.int32) for t in (context, prediction)]
    out = torch.zeros(1, dtype=torch.int32)
    inputs = context, lengths[0], prediction, lengths[1]
    expected = int(launch.lcs_length(*inputs, backend="reference"))
    with patch.object(launch, "resolve_backend", lambda *_: "triton"):
        found = launches(kernels, lambda: launch.lcs_length(*inputs, out=out))
    return found, out, expected


def measure_lcs(compiler: Any, target: str, size: int) -> dict[str, float]:
    """The row of a prediction length.

    cycles: of a token, in programs alone, of both kernels; instructions: of a warp and token, of both; registers:
    the more; tcups_batch and tcups_full: 10**12 cells a second at 1 GHz, for `BATCH` pairs with contexts of
    `CONTEXT` tokens, and for as many pairs as the GPU holds. One kernel runs after the other. Programs of a
    multiprocessor take as long as one alone or, where that is more, as long as the busiest pipe takes for all of
    them.

    Raises:
        AssertionError: a length is not the reference's.
    """
    runs = [_run(compiler, target, num_tokens, size) for num_tokens in TOKENS]
    pairs = list(zip(*runs, strict=True))  # of each kernel: the two runs
    cells = size * CONTEXT
    kernels = [_Kernel(*pair) for pair in pairs]
    batch = sum(kernel.cycles(BATCH) for kernel in kernels)
    full = NUM_SMS * max(kernel.held for kernel in kernels)
    step = TOKENS[1] - TOKENS[0]
    return {
        "cycles": round(sum((b.cycles - a.cycles) / step for (a, _, _), (b, _, _) in pairs), 1),
        "instructions": round(
            sum((b.count.total() - a.count.total()) / step / c.num_warps for (a, _, _), (b, _, c) in pairs), 1
        ),
        "registers": max(kernel.compiled.registers for kernel in kernels),
        "tcups_batch": round(BATCH * cells / batch / 1e3, 2),
        "tcups_full": round(full * cells / sum(kernel.cycles(full) for kernel in kernels) / 1e3, 2),
    }


def _run(compiler: Any, target: str, num_tokens: int, size: int) -> list[tuple[Trace, Compiled, Launch]]:
    """Every kernel of one call, run one after the other."""
    found, out, expected = record(num_tokens, size)
    runs = []
    for launch in found:
        compiled = compiler(launch)
        runs.append((run_launch(launch, compiled.program, target, Latencies()), compiled, launch))
    assert int(out) == expected, f"LCS: expected {expected}, found {int(out)}"
    return runs


class _Kernel:
    """What `CONTEXT` tokens take in one kernel, by two runs with `TOKENS`."""

    def __init__(self, first: tuple[Trace, Compiled, Launch], last: tuple[Trace, Compiled, Launch]) -> None:
        (a, self.compiled, launch), (b, _, _) = first, last
        self.alone = _whole(a.cycles, b.cycles)
        self.bound = max(_whole(a.load(pipe), b.load(pipe)) for pipe in b.busy)
        self.held = self.compiled.programs(launch.num_warps)

    def cycles(self, batch: int) -> float:
        """Of a batch: one program a pair, as many at once as the multiprocessors hold."""
        few = min(self.held, -(-batch // NUM_SMS))
        waves = -(-batch // (NUM_SMS * few))
        return waves * max(self.alone, few * self.bound)


def _whole(a: float, b: float) -> float:
    """What a run of `CONTEXT` tokens takes, by the two that were made."""
    return a + (b - a) / (TOKENS[1] - TOKENS[0]) * (CONTEXT - TOKENS[0])

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
TOKENS = (64, 96)
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
    from gpu_align.ops.lcs import kernels, launch

    rng = np.random.default_rng([num_tokens, num_prediction])
    often, seldom = (rng.integers(0, n, num_tokens + num_prediction, np.int32) for n in (50, 40_000))
    text = torch.from_numpy(np.where(rng.random(len(often)) < 0.5, often, seldom)).reshape(1, -1)
    context, prediction = text[:, :num_tokens].contiguous(), text[:, num_tokens:].contiguous()
    lengths = [torch.tensor([t.shape[1]], dtype=torch.int32) for t in (context, prediction)]
    out = torch.zeros(1, dtype=torch.int32)
    inputs = context, lengths[0], prediction, lengths[1]
    expected = int(launch.lcs_length(*inputs, backend="reference"))
    with patch.object(launch, "resolve_backend", lambda *_: "triton"):
        found = launches(kernels, lambda: launch.lcs_length(*inputs, out=out))
    return found, out, expected


def measure_lcs(compiler: Any, target: str, size: int) -> dict[str, float]:
    """The row of a prediction length.

    cycles: of a token, in a program alone; instructions: of a word and token; registers; tcups_batch and
    tcups_full: 10**12 cells a second at 1 GHz, for `BATCH` pairs with contexts of `CONTEXT` tokens, and for as
    many pairs as the GPU holds. Programs of a multiprocessor take as long as one alone or, where that is more, as
    long as the busiest pipe takes for all of them.

    Raises:
        AssertionError: a length is not the reference's.
    """
    traces: list[Trace] = []
    for num_tokens in TOKENS:
        [launch], out, expected = record(num_tokens, size)
        compiled = compiler(launch)
        traces.append(run_launch(launch, compiled.program, target, Latencies()))
        assert int(out) == expected, f"LCS: expected {expected}, found {int(out)}"
    first, last = traces
    step, more = TOKENS[1] - TOKENS[0], CONTEXT - TOKENS[0]

    def whole(a: float, b: float) -> float:
        return a + (b - a) / step * more

    alone = whole(first.cycles, last.cycles)
    bound = max(whole(first.load(pipe), last.load(pipe)) for pipe in last.busy)
    held = compiled.programs(launch.num_warps)
    few = min(held, -(-BATCH // NUM_SMS))
    waves = -(-BATCH // (NUM_SMS * few))
    cells = size * CONTEXT
    rate_batch = BATCH * cells / (waves * max(alone, few * bound)) / 1e3
    rate_full = NUM_SMS * held * cells / max(alone, held * bound) / 1e3
    return {
        "cycles": round((last.cycles - first.cycles) / step, 1),
        "instructions": round((last.count.total() - first.count.total()) / step / launch.num_warps, 1),
        "registers": compiled.registers,
        "tcups_batch": round(rate_batch, 2),
        "tcups_full": round(rate_full, 2),
    }

"""The host's cost of an eager step, without a GPU: ``python -m benchmarks.compiled.host_cost``.

The kernels are compiled for sm_90 and launched there, with a driver in between that only remembers what it was
asked to launch: all that Python does is timed, and nothing of what CUDA does. First the step's launch is compared
with Triton's: the same kernel, grid and arguments. Exit code 1: they differ.
"""

from __future__ import annotations

import time
import timeit

import torch
from triton.runtime import driver

from benchmarks.compiled.launches import NoDevice
from benchmarks.compiled.static_check import uninterpreted
from gpu_align import Drafter

BATCH, CONTEXT = 64, 8192
#: A launcher gets three sizes of the grid, stream, function, metadata, this and two hooks, then the kernel's own.
LAUNCH_METADATA = 6


def main() -> None:
    uninterpreted()
    device = NoDevice("sm_90")
    driver.set_active(device)
    from gpu_align.ops import backend
    from gpu_align.ops.step import StepLaunch
    from gpu_align.ops.step.kernel import step_kernel

    # Views at odd addresses, of other strides and sizes, as an engine may have them.
    wide = torch.zeros((BATCH, CONTEXT + 3), dtype=torch.int32)
    odd = torch.ones(BATCH + 1, dtype=torch.int32)[1:]
    drafter = Drafter(
        wide[:, 1 : CONTEXT + 1], odd, max_prediction_len=4096, num_draft_tokens=16, vocab_size=131_072
    )
    bound = drafter._state, drafter._tables, drafter._recipes, drafter._draft, drafter._settings
    drafter._step = step = StepLaunch(*bound, drafter.token_ids, drafter.total_len)
    slots, num_sampled = torch.arange(BATCH), torch.ones(BATCH, dtype=torch.int32)
    calls = [(slots, num_sampled), (slots[1:8], odd[:7]), (slots[:1], num_sampled[:1])]

    def as_triton() -> None:
        """Nothing is kept from the call before: Triton asks all of its questions."""
        backend._compiled.clear()
        step._compiled = None

    drafter.propose(*calls[0])
    for call in calls:
        drafter.propose(*call)
    for call in calls:
        as_triton()
        drafter.propose(*call)
    ours, theirs = device.launches[1 : len(calls) + 1], device.launches[len(calls) + 1 :]
    kernels = step_kernel.device_caches[device.get_current_device()][0]
    assert len(kernels) == 1, f"expected one kernel for all calls, found {len(kernels)}"
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        for i, (mine, other) in enumerate(zip(*pair, strict=True)):
            # Only what profilers get is made for each launch.
            same = mine is other or mine == backend.pointers(other)
            assert same or i == LAUNCH_METADATA, f"call {number}: expected {other}, found {mine}"
            assert i <= LAUNCH_METADATA or not isinstance(mine, torch.Tensor), f"call {number}: a tensor, {i}"
    print(f"{len(calls)} calls launch what Triton launches: the same kernel, grid and arguments")

    device.listens = False
    timed = {
        "launch, as Triton does it": lambda: (as_triton(), step(*calls[0])),
        "launch, as StepLaunch does": lambda: step(*calls[0]),
        "Drafter.propose, checks too": lambda: drafter.propose(*calls[0]),
    }
    for name, run in timed.items():
        run()
        fastest = min(timeit.repeat(run, number=500, repeat=20, timer=time.process_time)) / 500 * 1e6
        print(f"{name:27} {fastest:6.1f} µs")


if __name__ == "__main__":
    main()

"""Device time of a few microseconds' work, without the host's launch in it.

An event that is recorded on an idle GPU gets its time at once. The interval to the next event then contains
the time that the host takes to launch the work, 6 to 12 µs for a CUDA graph: more than a step takes. So

1. a kernel that spins keeps the GPU busy while the host enqueues start event, graph and end event. The start event
   must still be pending when the host has enqueued them all; otherwise the interval is discarded and the next
   spin is twice as long;
2. a graph holds N steps, so that the resolution of an event (up to 0.5 µs) is divided by N;
3. the same graph without the steps, the *floor*, is timed in turn with it and subtracted: what is left for each
   step is its kernel and the gap between two nodes of a graph::

       step = (median(interval of the graph) - median(interval of the floor)) / N

On the CPU both are loops, and the clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]

#: Cycles that the first spin takes, about 0.5 ms, and the longest, about 0.1 s.
SPIN_CYCLES, MAX_SPIN_CYCLES = 1_000_000, 200_000_000


def record(works: Sequence[Work], device: str) -> Work:
    """One call that does all `works` in order: a CUDA graph's replay, on the CPU a loop.

    Each of the works must have run before on this device: a kernel that is loaded during a capture breaks it.
    Nothing runs here.
    """
    if device != "cuda":
        return lambda: [work() for work in works]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return graph.replay


class Clock:
    """Microseconds of single intervals on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.spin_cycles = SPIN_CYCLES
        #: Intervals discarded because the GPU was idle before all of them was enqueued.
        self.num_late = 0

    def interval(self, work: Work) -> float | None:
        """Time of one call; None if it has to be discarded."""
        if self.device != "cuda":
            begin = time.perf_counter_ns()
            work()
            return (time.perf_counter_ns() - begin) / 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(self.spin_cycles)
        start.record()
        work()
        end.record()
        is_late = start.query()
        end.synchronize()
        if is_late:
            self.num_late += 1
            self.spin_cycles = min(2 * self.spin_cycles, MAX_SPIN_CYCLES)
            return None
        return start.elapsed_time(end) * 1e3

    def compare(
        self, work: Work, floor: Work, before: Work, repeats: int, warm_up: int = 5
    ) -> tuple[list[float], list[float]]:
        """`repeats` intervals of `work` and of `floor`, in turn; `before` runs ahead of each `work`, untimed."""
        times: list[float] = []
        floors: list[float] = []
        for _ in range(5 * (repeats + warm_up)):
            before()
            pair = self.interval(work), self.interval(floor)
            if pair[0] is not None and pair[1] is not None:
                times.append(pair[0])
                floors.append(pair[1])
            if len(times) == repeats + warm_up:
                return times[warm_up:], floors[warm_up:]
        raise RuntimeError(f"the host enqueues too slowly: {self.num_late} intervals discarded")


def time_device(call: Work, before: Work, repeats: int) -> list[float]:
    """Device microseconds of `call`; `before` runs ahead of each and is not timed."""
    return Clock("cuda").compare(call, lambda: None, before, repeats, repeats // 4)[0]

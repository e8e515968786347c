"""Times the steps of a model runner: by two events of the device around each, or by the clock of the host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..seams.guard import Guard, first_to_tell, guarded, logger
from ..seams.install import install
from ..wire.reports import StepTime

#: Steps whose events may be under way at once.
MOST = 8
#: Where no request is drafted for, one step in so many is timed.
SELDOM = 16


class WallClock:
    """A `torch.cuda.Event` of a host that runs the step itself."""

    at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: WallClock) -> float:
        return (end.at - self.at) * 1e3


class _Step:
    """A pair of events, and the step that is between them."""

    def __init__(self, is_cuda: bool) -> None:
        event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True) if is_cuda else WallClock
        self.start, self.end = event(), event()
        self.tokens, self.in_graph = 0, False


class StepTimer:
    """Milliseconds of the steps of a runner.

        timer.begin(scheduler_output)     # before the inputs of a step are made
        timer.end(runner)                 # after its tokens are sampled, and the next drafts made
        times = timer.take()              # of the steps that have ended by now, the oldest first

    Nothing here waits. A step without an end (an empty batch) has no time, nor one that begins while `MOST` are
    under way. `take` may be called by another thread. num_stages: of a pipeline; with several no step is timed.
    """

    def __init__(self, device: torch.device | str, num_stages: int = 1) -> None:
        self.guard = Guard("step times", "measures no step times")
        self.pending: deque[_Step] = deque()
        self._free: list[_Step] = []
        self._open: _Step | None = None
        self._count, self._lock = 0, threading.Lock()
        kind = torch.device(device).type
        reason = "" if kind in ("cpu", "cuda") else f"no events on {kind}"
        reason = "pipeline stages see a part of each step" if num_stages > 1 else reason
        if reason and first_to_tell(line := f"gpu_align measures no step times: {reason}"):
            logger.warning("%s", line)
        if reason := reason or install("times"):
            self.guard.end(reason)
        else:
            self._free = self.guard.run(lambda: [_Step(kind == "cuda") for _ in range(MOST)]) or []

    @guarded
    def begin(self, scheduler_output: Any, idle: bool = False) -> None:
        """The step of this plan begins. idle: no request is drafted for."""
        self._count += 1
        with self._lock:
            if self._open is not None:
                self._free.append(self._open)
                self._open = None
            if idle and self._count % SELDOM:
                return
            if not self._free and self.pending and self.pending[0].end.query():
                self._free.append(self.pending.popleft())  # of a rank whose outputs are not used
            if self._free:
                self._open = self._free.pop()
        if (step := self._open) is not None:
            step.tokens = scheduler_output.total_num_scheduled_tokens
            step.start.record()

    def end(self, runner: Any) -> None:
        """The step that has begun has sampled its tokens."""
        if self._open is not None:
            self._end(runner)

    def take(self) -> Sequence[StepTime]:
        """Of the steps that have ended since the last call."""
        return (self._take() or ()) if self.pending else ()

    @guarded
    def _end(self, runner: Any) -> None:
        step, self._open = self._open, None
        if step is None:
            return
        timing = getattr(runner, "step_timing", None)
        if timing is not None:  # V2, whose device may have trimmed drafts
            step.in_graph, step.tokens, _ = timing._batch
        step.end.record()
        self.pending.append(step)

    @guarded
    def _take(self) -> Sequence[StepTime]:
        times: list[StepTime] = []
        with self._lock:
            while self.pending and self.pending[0].end.query():
                step = self.pending.popleft()
                ms = step.start.elapsed_time(step.end)
                times.append(StepTime(ms, step.tokens, bool(step.in_graph)))
                self._free.append(step)
        return times

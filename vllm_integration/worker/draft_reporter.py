"""Copies each step's drafts from the device to the scheduler's report; waits for copies of earlier steps alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ..seams.guard import Guard
from ..wire.reports import DraftReport, Ints, StepDrafts, survival_levels

#: Steps whose copies may be under way at once, beyond the batches that the engine has in flight.
_SPARE = 3


class StepCopies:
    """Pinned host memory for what one step copies, and the event after which it is there; None without CUDA.

    columns: name → [max_reqs, …] on the host. req_ids: of the step; its first rows are theirs. rows: [B] their
    rows in `total_len`. trims: whether the step has `query_ends`.
    """

    def __init__(self, max_reqs: int, num_draft_tokens: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.event: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        zeros = partial(torch.zeros, pin_memory=is_cuda)
        self.columns = {
            "length": zeros(max_reqs, dtype=torch.int32),
            "source": zeros(max_reqs, dtype=torch.int8),
            "confidence": zeros((max_reqs, num_draft_tokens), dtype=torch.float32),
            "total_len": zeros(max_reqs, dtype=torch.int32),
            "query_ends": zeros(max_reqs + 1, dtype=torch.int32),
        }
        self.step = 0
        self.req_ids: Sequence[str] = ()
        self.rows: Ints = np.zeros(0, dtype=np.int64)
        self.trims = False

    def copy(self, size: int, **device: torch.Tensor) -> None:
        """Start to copy the first `size` rows of each tensor into the column of its name."""
        for name, tensor in device.items():
            self.columns[name][:size].copy_(tensor[:size], non_blocking=True)

    def host(self, name: str) -> Any:
        """[B, …] what a column has of the requests of the step, a view."""
        return self.columns[name][: len(self.req_ids)].numpy()

    def arrived(self, wait: bool) -> bool:
        if self.event is not None and wait:
            self.event.synchronize()
        return self.event is None or bool(self.event.query())


class DraftReporter:
    """A short queue of device-to-host copies.

        reporter.begin_step()                            # in propose, before the drafter is launched
        reporter.copy(req_ids, rows, draft, total_len)   # after it
        step = reporter.step                             # after propose
        report = reporter.report(step)                   # when the output leaves the worker

    batches_in_flight: how many steps the engine may have started and not finished.

    `report` has what has arrived by then of this step, and all of earlier ones. It waits for those of step t − 1,
    which began before step t, so that the draft that step t verified is always in the report; of step t only where
    vLLM trims drafts on the device (`copy` got `query_ends`). Another thread may call it. README.md says what is
    copied on which stream.
    """

    def __init__(
        self, max_reqs: int, num_draft_tokens: int, device: torch.device, batches_in_flight: int = 1
    ) -> None:
        self.step = 0
        #: As of `DraftReport`, once the runner has decided.
        self.plain_graphs_alone = False
        sizes, number = (max_reqs, num_draft_tokens), batches_in_flight + _SPARE
        self.free = [StepCopies(*sizes, device) for _ in range(number)]
        self.in_flight: deque[StepCopies] = deque()  # the oldest first
        self._device, self._lock = device, threading.Lock()
        self._trimming = Guard("trimmed drafts", "counts drafts that the device trimmed as rejected")
        self._side: Any = None
        if device.type == "cuda":
            self._side, self._drafted = torch.cuda.Stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        #: Behind the last copies that the engine's stream has not waited for.
        self._copied: Any = None

    def begin_step(self) -> None:
        """The next step begins. The drafter may be launched."""
        self.step += 1
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def copy(
        self,
        req_ids: Sequence[str],
        rows: Ints,
        draft: Any,
        total_len: torch.Tensor,
        query_ends: torch.Tensor | None = None,
    ) -> None:
        """Start the copy of this step's drafts, in the order of `req_ids`; all but `rows` is on the device.

        rows: [B] their rows in `total_len` [max_reqs] int32. query_ends: [B + 1] int32, 0 and where each request's
        verified positions end (its drafts and one more), if the device has trimmed drafts.

        Where every buffer is in use, the oldest copy that has arrived gives its buffer up; without a free one this
        step is not reported.
        """
        with self._lock:
            if not self.free and self.in_flight[0].arrived(wait=False):
                self.free.append(self.in_flight.popleft())
            if not self.free:
                return
            size, step = len(req_ids), self.free.pop()
            step.step, step.req_ids, step.rows, step.trims = self.step, req_ids, rows, query_ends is not None
            self.in_flight.append(step)
            # The engine overwrites these, or frees them, before the drafter is launched again.
            step.copy(len(total_len), total_len=total_len)
            if query_ends is not None:
                step.copy(size + 1, query_ends=query_ends)
            with self._beside_the_engine(step.event):
                step.copy(size, length=draft.length, source=draft.source, confidence=draft.confidence)

    @contextmanager
    def _beside_the_engine(self, event: Any) -> Iterator[None]:
        """Copies that begin after the engine's work so far, on a stream of their own; then `event` is recorded."""
        if self._side is None:
            yield
            return
        self._drafted.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._drafted)
        with torch.cuda.stream(self._side):
            yield
        event.record(self._side)
        self._copied = event

    def report(self, now: int) -> DraftReport:
        """Report what has arrived from step `now` or earlier ones."""
        drafts: list[StepDrafts] = []
        trimmed: dict[str, int] = {}
        with self._lock:
            while self.in_flight and (step := self.in_flight[0]).step <= now:
                if not step.arrived(wait=step.step < now or step.trims):
                    break
                drafts.append(_read(step, now))
                if step.step == now and step.trims:
                    trimmed = self._trimming.run(_slots_left, step) or {}
                self.free.append(self.in_flight.popleft())
        return DraftReport(drafts, trimmed, plain_graphs_alone=self.plain_graphs_alone)


def _slots_left(step: StepCopies) -> dict[str, int]:
    """A request has one verified position more than drafts."""
    widths = np.diff(step.columns["query_ends"][: len(step.req_ids) + 1].numpy()) - 1
    return dict(zip(step.req_ids, widths.tolist(), strict=True))


def _read(step: StepCopies, now: int) -> StepDrafts:
    """Survival is multiplied on the host: confidences are copied as they are, no kernel computes it."""
    length = step.host("length").copy()
    return StepDrafts(
        step.req_ids,
        now - step.step,
        step.columns["total_len"].numpy()[step.rows],
        length,
        step.host("source").copy(),
        survival_levels(np.cumprod(step.host("confidence"), axis=1), length),
    )


def when_it_leaves(output: Any, then: Callable[[Any], None]) -> Any:
    """`output` of a step, for which `then(ModelRunnerOutput)` is called before it goes to the scheduler: at once,
    or, where vLLM still waits for the device, in its `get_output()`."""
    get_output = getattr(output, "get_output", None)
    if get_output is None:
        then(output)
        return output

    def with_report(*args: Any, **kwargs: Any) -> Any:
        finished = get_output(*args, **kwargs)
        then(finished)
        return finished

    output.get_output = with_report
    return output

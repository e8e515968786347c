"""What a step leaves on the device, on its way to the host: late, and waited for only by who asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class EngineStream:
    """Copies to the host in line with the engine's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(device)

    def event(self) -> Any:
        """An event to record behind a step's copies; None without CUDA, where a copy has ended when it returns."""
        return torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def copies_behind(self, event: Any) -> Iterator[None]:
        """A `with` block whose copies begin after the engine's work so far; `event` is recorded behind them."""
        yield
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let the engine's work from here on begin after these copies."""


class SideStream(EngineStream):
    """The same on a stream of their own, so that the engine's goes on without them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._drafted = self.event()
        #: Behind the last copies that the engine's stream has not waited for.
        self._copied: Any = None

    @contextmanager
    def copies_behind(self, event: Any) -> Iterator[None]:
        self._drafted.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._drafted)
        with torch.cuda.stream(self._stream):
            yield
        event.record(self._stream)
        self._copied = event

    def wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


class StepCopies:
    """Pinned host memory for what one step copies, and the event after which it is there.

    columns: name → [max_reqs, …] on the host. req_ids: of the step; its first rows are theirs. rows: [B] their
    rows in the engine's table, where that was copied whole. trims: whether the device trims the step's drafts.
    """

    def __init__(
        self, columns: Mapping[str, tuple[tuple[int, ...], torch.dtype]], stream: EngineStream
    ) -> None:
        self.event = stream.event()
        pinned = self.event is not None
        self.columns = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
            for name, (shape, dtype) in columns.items()
        }
        self.step = 0
        self.req_ids: Sequence[str] = ()
        self.rows: npt.NDArray[np.integer[Any]] = np.zeros(0, dtype=np.int64)
        self.trims = False

    def copy(self, size: int, **device: torch.Tensor) -> None:
        """Start to copy the first `size` rows of each tensor into the column of its name."""
        for name, tensor in device.items():
            self.columns[name][:size].copy_(tensor[:size], non_blocking=True)

    def host(self, name: str) -> Any:
        """[B, …] what a column has of the requests of the step, a view."""
        return self.columns[name][: len(self.req_ids)].numpy()

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class CopyQueue:
    """The buffers of so many steps: `free` ones, and those `in_flight`, the oldest first.

    columns: name → shape and dtype, see `StepCopies`.
    """

    def __init__(
        self, columns: Mapping[str, tuple[tuple[int, ...], torch.dtype]], steps: int, stream: EngineStream
    ) -> None:
        self.free = [StepCopies(columns, stream) for _ in range(steps)]
        self.in_flight: deque[StepCopies] = deque()

    def begin(self, step: int, req_ids: Sequence[str]) -> StepCopies | None:
        """A buffer for this step, the last in flight; None where all are in use. Then the oldest whose copies have
        arrived gives its buffer up, read or not."""
        if not self.free and self.in_flight[0].arrived():
            self.release()
        if not self.free:
            return None
        buffer = self.free.pop()
        buffer.step, buffer.req_ids = step, req_ids
        self.in_flight.append(buffer)
        return buffer

    def release(self) -> None:
        """The oldest step in flight has been read."""
        self.free.append(self.in_flight.popleft())

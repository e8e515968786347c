"""What each request was proposed, on its way from the device to the scheduler: late, but never waited for."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..seams.install import DraftingGuard, off_reason
from ..wire.reports import DraftReport, StepDrafts, attach, survival_levels

#: Steps whose copies may be under way at once, beyond the batches that the engine has in flight.
_SPARE = 3


class _EngineStream:
    """Copies to the host in line with the engine's work; all there is without CUDA."""

    def event(self) -> Any:
        """An event to record behind a step's copies; None where a copy has ended when it returns."""
        return None

    @contextmanager
    def copies_behind(self, event: Any) -> Iterator[None]:
        """A `with` block whose copies begin after the engine's work so far; `event` is recorded behind them."""
        yield

    def wait(self) -> None:
        """Let the engine's work from here on begin after these copies."""


class _SideStream(_EngineStream):
    """The same on a stream of their own, so that the engine's goes on without them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._drafted = self.event()
        #: Behind the last copies that the engine's stream has not waited for.
        self._copied: Any = None

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

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


class _InFlight:
    """Pinned host memory for one step's drafts, and the event after which they are in it."""

    def __init__(self, max_reqs: int, num_draft_tokens: int, stream: _EngineStream) -> None:
        self.event = stream.event()

        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=self.event is not None)

        self.length = pinned(max_reqs)
        self.source = pinned(max_reqs, dtype=torch.int8)
        self.total_len = pinned(max_reqs)
        self.query_ends = pinned(max_reqs + 1)
        self.confidence = pinned(max_reqs, num_draft_tokens, dtype=torch.float32)
        self.step = 0
        self.req_ids: Sequence[str] = ()
        self.rows: npt.NDArray[np.integer[Any]] = np.zeros(0, dtype=np.int64)
        self.trims = False

    def start(
        self,
        step: int,
        req_ids: Sequence[str],
        rows: npt.NDArray[np.integer[Any]],
        draft: Any,
        total_len: torch.Tensor,
        query_ends: torch.Tensor | None,
        stream: _EngineStream,
    ) -> None:
        self.step, self.req_ids, self.rows, self.trims = step, req_ids, rows, query_ends is not None
        num_reqs = len(req_ids)
        # The engine overwrites these, or frees them, before the drafter is launched again.
        _copy(self.total_len, total_len, len(total_len))
        if query_ends is not None:
            _copy(self.query_ends, query_ends, num_reqs + 1)
        with stream.copies_behind(self.event):
            _copy(self.length, draft.length, num_reqs)
            _copy(self.source, draft.source, num_reqs)
            _copy(self.confidence, draft.confidence, num_reqs)

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def read(self, now: int) -> StepDrafts:
        """Survival is multiplied on the host: confidences are copied as they are, no kernel computes it."""
        num_reqs = len(self.req_ids)
        length = self.length[:num_reqs].numpy().copy()
        survival = np.cumprod(self.confidence[:num_reqs].numpy(), axis=1)
        return StepDrafts(
            self.req_ids,
            now - self.step,
            self.total_len.numpy()[self.rows],
            length,
            self.source[:num_reqs].numpy().copy(),
            survival_levels(survival, length),
        )

    def verified(self) -> dict[str, int]:
        """Draft slots that the device kept in this step: a request has one position more."""
        widths = np.diff(self.query_ends[: len(self.req_ids) + 1].numpy()) - 1
        return dict(zip(self.req_ids, widths.tolist(), strict=True))


def _copy(host: torch.Tensor, device: torch.Tensor, size: int) -> None:
    host[:size].copy_(device[:size], non_blocking=True)


class DraftReporter:
    """A short queue of device-to-host copies.

        reporter.begin_step()                            # in propose, before the drafter is launched
        reporter.copy(req_ids, rows, draft, total_len)   # after it
        step = reporter.step                             # after propose
        reporter.attach(output, step)                    # when the output leaves the worker

    max_reqs, num_draft_tokens: sizes of a batch. device: where the drafts are.
    batches_in_flight: how many steps the engine may have started and not finished.

    On CUDA the drafter's tensors are copied on a stream beside the engine's. The copies of step t begin behind the
    drafter of step t, and the engine's stream waits for them before the drafter of the next step rewrites what
    they read. The engine's own tensors, which it changes before that, are copied on its stream.

    `attach` adds what has arrived by then of this step, and all of earlier ones, with its age in steps. vLLM calls
    it for step t when it has itself waited for what step t sampled. The copies of step t − 1 have been under way
    since before step t began, so `attach` waits for them, in general for nothing: the draft that step t verified
    is always in the report. Of step t it waits for the copies only where vLLM trims drafts on the device (`copy`
    got `query_ends`); they end with the drafter's kernels. Another thread may call it.
    """

    def __init__(
        self, max_reqs: int, num_draft_tokens: int, device: torch.device, batches_in_flight: int = 1
    ) -> None:
        self._stream = _SideStream(device) if torch.device(device).type == "cuda" else _EngineStream()
        buffers = batches_in_flight + _SPARE
        self._free = [_InFlight(max_reqs, num_draft_tokens, self._stream) for _ in range(buffers)]
        self._in_flight: deque[_InFlight] = deque()
        self.step = 0
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """The next step begins; it has no drafts yet. The drafter may be launched."""
        self.step += 1
        self._stream.wait()

    def copy(
        self,
        req_ids: Sequence[str],
        rows: npt.NDArray[np.integer[Any]],
        draft: Any,
        total_len: torch.Tensor,
        query_ends: torch.Tensor | None = None,
    ) -> None:
        """Start the copy of this step's drafts, in the order of `req_ids`; all but `rows` is on the device.

        rows: [B] their rows in `total_len` [max_reqs] int32. draft: `length` [B], `source` [B],
        `confidence` [B, K]. query_ends: [B + 1] int32, 0 and where each request's verified positions end (its
        drafts and one more), if the device has trimmed drafts.

        Where every buffer is still in use, the oldest copy that has arrived gives its buffer up (on ranks whose
        outputs are not used nobody asks for any); if there is none, this step is not reported.
        """
        with self._lock:
            if not self._free and self._in_flight[0].arrived():
                self._free.append(self._in_flight.popleft())
            if self._free:
                buffer = self._free.pop()
                buffer.start(self.step, req_ids, rows, draft, total_len, query_ends, self._stream)
                self._in_flight.append(buffer)

    def attach(self, model_runner_output: Any, step: int, refused: Mapping[str, str] | None = None) -> None:
        """Attach to the output of `step` what has arrived from it or from earlier ones."""
        drafts, trimmed = self._arrived_by(step)
        report = DraftReport(drafts, trimmed, refused or {}, off=off_reason() is not None)
        attach(model_runner_output, report)

    def _arrived_by(self, step: int) -> tuple[list[StepDrafts], dict[str, int]]:
        drafts: list[StepDrafts] = []
        trimmed: dict[str, int] = {}
        with self._lock:
            while self._in_flight and self._in_flight[0].step <= step:
                oldest = self._in_flight[0]
                if oldest.step < step or oldest.trims:
                    oldest.wait()
                if not oldest.arrived():
                    break
                drafts.append(oldest.read(step))
                if oldest.step == step and oldest.trims:
                    trimmed = oldest.verified()
                self._free.append(self._in_flight.popleft())
        return drafts, trimmed


def when_it_leaves(output: Any, then: Callable[[Any], None]) -> Any:
    """`output` of a model runner's step, for which `then(ModelRunnerOutput)` is called before it goes to the
    scheduler: at once, or, where vLLM still waits for the device, when it has.

    vLLM asks an `AsyncModelRunnerOutput` for nothing but `get_output()`. Where `then` fails, drafting is turned
    off and the output goes as it is.
    """
    if not hasattr(output, "get_output"):
        _tell(then, output)
        return output
    try:
        return _async_output_class()(output, then)
    except Exception as error:
        _guard.fail(_REPORTS, error)
        return output


_guard, _REPORTS = DraftingGuard(), "drafts are not reported"


def _tell(then: Callable[[Any], None], output: Any) -> None:
    try:
        then(output)
    except Exception as error:
        _guard.fail(_REPORTS, error)
        with suppress(Exception):  # so that the scheduler grants no slots any more
            attach(output, DraftReport(off=True))


@functools.cache
def _async_output_class() -> Any:
    """Made late: the rest of this module works without vLLM."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class OutputWithReport(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is not typed for us
        def __init__(self, output: Any, then: Callable[[Any], None]) -> None:
            self._output, self._then = output, then

        def get_output(self) -> Any:
            finished = self._output.get_output()
            _tell(self._then, finished)
            return finished

    return OutputWithReport

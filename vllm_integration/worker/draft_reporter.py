"""What each request was proposed, on its way from the device to the scheduler: late, but never waited for."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_integration.seams.install import off_reason, strict, turn_off
from vllm_integration.seams.log_text import shown_error
from vllm_integration.wire.reports import DraftReport, StepDrafts, attach, survival_levels

#: Steps whose copies may be under way at once, beyond the batches that the engine has in flight.
_SPARE = 3


class _InFlight:
    """Pinned host memory for one step's drafts, and the event after which they are in it."""

    def __init__(self, max_reqs: int, num_draft_tokens: int, on_cuda: bool) -> None:
        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=on_cuda)

        self.length = pinned(max_reqs)
        self.source = pinned(max_reqs, dtype=torch.int8)
        self.total_len = pinned(max_reqs)
        self.query_ends = pinned(max_reqs + 1)
        self.confidence = pinned(max_reqs, num_draft_tokens, dtype=torch.float32)
        self.event: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
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
    ) -> None:
        self.step, self.req_ids, self.rows, self.trims = step, req_ids, rows, query_ends is not None
        num_reqs = len(req_ids)
        for host, device, size in (
            (self.length, draft.length, num_reqs),
            (self.source, draft.source, num_reqs),
            (self.confidence, draft.confidence, num_reqs),
            (self.total_len, total_len, len(total_len)),
            (self.query_ends, query_ends, num_reqs + 1),
        ):
            if device is not None:
                host[:size].copy_(device[:size], non_blocking=True)
        if self.event is not None:
            self.event.record()

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


class DraftReporter:
    """A short queue of device-to-host copies on the engine's stream.

        reporter.begin_step(); reporter.copy(req_ids, rows, draft, total_len)  # in propose
        step = reporter.step                                                   # after it
        reporter.attach(output, step)                                          # when the output leaves the worker

    max_reqs, num_draft_tokens: sizes of a batch. device: where the drafts are.
    batches_in_flight: how many steps the engine may have started and not finished.

    `attach` adds what has arrived by then of this step and of earlier ones, with its age in steps. vLLM calls it
    for step t when it has itself waited for what step t sampled, and the copies of step t − 1 come before that on
    the stream: the draft that step t verified is always among what has arrived. Another thread may call it.
    Nothing waits, with one exception: where vLLM trims drafts on the device (`copy` got `query_ends`),
    `attach` waits for its step's own copy, which ends with the drafter's kernels.
    """

    def __init__(
        self, max_reqs: int, num_draft_tokens: int, device: torch.device, batches_in_flight: int = 1
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        buffers = batches_in_flight + _SPARE
        self._free = [_InFlight(max_reqs, num_draft_tokens, on_cuda) for _ in range(buffers)]
        self._in_flight: deque[_InFlight] = deque()
        self.step = 0
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """The next step begins; it has no drafts yet."""
        self.step += 1

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
                buffer.start(self.step, req_ids, rows, draft, total_len, query_ends)
                self._in_flight.append(buffer)

    def attach(self, model_runner_output: Any, step: int, refused: Mapping[str, str] | None = None) -> None:
        """Attach to the output of `step` what has arrived from it or from earlier ones.

        A failure turns drafting off; the output goes to the scheduler as it is.
        """
        try:
            drafts, trimmed = self._arrived_by(step)
        except Exception as error:
            if strict():
                raise
            turn_off(f"drafts are not reported, {shown_error(error)}")
            drafts, trimmed = [], {}
        report = DraftReport(drafts, trimmed, refused or {}, off=off_reason() is not None)
        attach(model_runner_output, report)

    def _arrived_by(self, step: int) -> tuple[list[StepDrafts], dict[str, int]]:
        drafts: list[StepDrafts] = []
        trimmed: dict[str, int] = {}
        with self._lock:
            while self._in_flight and self._in_flight[0].step <= step:
                oldest = self._in_flight[0]
                trims = oldest.trims and oldest.step == step
                if trims:
                    oldest.wait()
                if not oldest.arrived():
                    break
                drafts.append(oldest.read(step))
                if trims:
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
        _no_report(error)
        return output


def _tell(then: Callable[[Any], None], output: Any) -> None:
    try:
        then(output)
    except Exception as error:
        _no_report(error)
        with suppress(Exception):  # so that the scheduler grants no slots any more
            attach(output, DraftReport(off=True))


def _no_report(error: Exception) -> None:
    if strict():
        raise error
    turn_off(f"drafts are not reported, {shown_error(error)}")


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

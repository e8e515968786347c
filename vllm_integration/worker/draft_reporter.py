"""What each request was proposed, on its way from the device to the scheduler: late, but never waited for."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

#: The attribute of vLLM's `ModelRunnerOutput` that carries a `Report` to the scheduler's process.
ATTRIBUTE = "gpu_align_draft_counts"
#: Steps whose copies may be under way at once, beyond the batches that the engine has in flight.
_SPARE = 3


class Proposed(NamedTuple):
    """One draft of one request.

    length: drafts. age: steps since then. source: value of `gpu_align.Source`, 0 without drafts.
    position: tokens of the request when it was made, prompt and output: the place of the first of them.
    survival: a byte a draft, the drafter's estimate that it and all before it are accepted, see
    `survival_levels`; empty where nobody schedules by it (V1).
    """

    length: int
    age: int
    source: int = 0
    position: int = -1
    survival: bytes = b""


def survival_levels(survival: npt.NDArray[np.floating[Any]], lengths: Sequence[int]) -> list[bytes]:
    """Survival of every draft as a byte, in units of 1/255, rounded down, but at least 1.

    survival: [B, K], 0 to 1, no row rises. lengths: B, drafts of each row. Row b has lengths[b] bytes.
    """
    levels = np.maximum(survival * 255, 1).astype(np.uint8)
    width, joined = levels.shape[1], levels.tobytes()
    return [joined[row * width : row * width + length] for row, length in enumerate(lengths)]


class Report(NamedTuple):
    """What one step's output carries besides vLLM's own.

    proposed: drafts whose lengths have become known, in the order in which they were made.
    trimmed: request → draft slots that this step really verified, where the device trims them.
    refused: request → why its prediction is not used, or is cut (see `predictions`).
    """

    proposed: Sequence[tuple[str, Proposed]] = ()
    trimmed: Mapping[str, int] = {}
    refused: Mapping[str, str] = {}


class _Latest(NamedTuple):
    """References to one step's drafts on the device; `rows` are the requests' rows of `total_len`."""

    req_ids: Sequence[str]
    rows: npt.NDArray[np.integer[Any]]
    draft: Any
    total_len: torch.Tensor
    query_ends: torch.Tensor | None


class _InFlight:
    """Pinned host memory for one step's counts, and the event after which they are in it."""

    def __init__(self, max_reqs: int, num_draft_tokens: int, on_cuda: bool) -> None:
        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=on_cuda)

        self.length = pinned(max_reqs)
        self.source = pinned(max_reqs, dtype=torch.int8)
        self.total_len = pinned(max_reqs)
        self.query_ends = pinned(max_reqs + 1)
        self.confidence = pinned(max_reqs, num_draft_tokens, dtype=torch.float32)
        self.event: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.req_ids: Sequence[str] = ()
        self.rows: npt.NDArray[np.integer[Any]] = np.zeros(0, dtype=np.int64)
        self.step = 0
        self.trims = False

    def start(self, latest: _Latest, step: int) -> None:
        self.req_ids, self.rows, self.step = latest.req_ids, latest.rows, step
        self.trims = latest.query_ends is not None
        num_reqs = len(latest.req_ids)
        for host, device, size in (
            (self.length, latest.draft.length, num_reqs),
            (self.source, latest.draft.source, num_reqs),
            (self.confidence, latest.draft.confidence, num_reqs),
            (self.total_len, latest.total_len, len(latest.total_len)),
            (self.query_ends, latest.query_ends, num_reqs + 1),
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

    def read(self, now: int) -> list[tuple[str, Proposed]]:
        """Survival is multiplied on the host: confidences are copied as they are, by nobody's kernel."""
        num_reqs = len(self.req_ids)
        lengths, sources = self.length[:num_reqs].tolist(), self.source[:num_reqs].tolist()
        survival = survival_levels(np.cumprod(self.confidence[:num_reqs].numpy(), axis=1), lengths)
        positions = self.total_len.numpy()[self.rows].tolist()
        age = now - self.step
        return [
            (req_id, Proposed(length, age, source, position, levels))
            for req_id, length, source, position, levels in zip(
                self.req_ids, lengths, sources, positions, survival, strict=True
            )
        ]

    def verified(self) -> dict[str, int]:
        """Draft slots that the device kept in this step: a request has one position more."""
        if not self.trims:
            return {}
        widths = np.diff(self.query_ends[: len(self.req_ids) + 1].numpy()) - 1
        return dict(zip(self.req_ids, widths.tolist(), strict=True))


class DraftCounts:
    """A short queue of device-to-host copies on the engine's stream.

        counts.forget(); counts.remember(req_ids, rows, draft, total_len)  # in propose: keeps references
        step = counts.start()                                              # after it: starts a copy
        counts.attach(output, step)                                        # when the output leaves the worker

    max_reqs, num_draft_tokens: sizes of a batch. device: where the drafts are.
    batches_in_flight: how many steps the engine may have started and not finished.

    `attach` adds what has arrived by then of this step and of earlier ones, with its age in steps. vLLM calls it
    for step t when it has itself waited for what step t sampled, and the copies of step t − 1 come before that on
    the stream: the draft that step t verified is always among what has arrived. It may be another thread's.
    Nothing waits, with one exception: where vLLM trims drafts on the device (`remember` got `query_ends`),
    `attach` waits for its step's own copy, which ends with the drafter's kernels.
    """

    def __init__(
        self, max_reqs: int, num_draft_tokens: int, device: torch.device, batches_in_flight: int = 1
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        buffers = batches_in_flight + _SPARE
        self._free = [_InFlight(max_reqs, num_draft_tokens, on_cuda) for _ in range(buffers)]
        self._in_flight: deque[_InFlight] = deque()
        self._latest: _Latest | None = None
        self._step = 0
        self._lock = threading.Lock()

    def forget(self) -> None:
        """This step has no drafts (yet)."""
        self._latest = None
        self._step += 1

    def remember(
        self,
        req_ids: Sequence[str],
        rows: npt.NDArray[np.integer[Any]],
        draft: Any,
        total_len: torch.Tensor,
        query_ends: torch.Tensor | None = None,
    ) -> None:
        """This step's drafts, in the order of `req_ids`; everything but `rows` is on the device.

        rows: [B] their rows in `total_len` [max_reqs] int32. draft: `length` [B], `source` [B],
        `confidence` [B, K]. query_ends: [B + 1] int32, 0 and where each request's verified positions end (its
        drafts and one more), if the device has trimmed drafts.
        """
        self._latest = _Latest(req_ids, rows, draft, total_len, query_ends)

    def start(self) -> int:
        """Start this step's copy; the number of the step.

        Where every buffer is still under way the copies nobody asked for any more (of ranks whose outputs are
        not used) give theirs up; otherwise this step is not reported.
        """
        with self._lock:
            if self._latest is not None:
                if not self._free and self._in_flight[0].arrived():
                    self._free.append(self._in_flight.popleft())
                if self._free:
                    copy = self._free.pop()
                    copy.start(self._latest, self._step)
                    self._in_flight.append(copy)
            self._latest = None
            return self._step

    def attach(self, model_runner_output: Any, step: int, refused: Mapping[str, str] | None = None) -> None:
        """Attach to the output of `step` what has arrived from it or from earlier ones."""
        proposed: list[tuple[str, Proposed]] = []
        trimmed: dict[str, int] = {}
        with self._lock:
            while self._in_flight and self._in_flight[0].step <= step:
                copy = self._in_flight[0]
                if copy.step == step and copy.trims:
                    copy.wait()
                if not copy.arrived():
                    break
                proposed += copy.read(step)
                if copy.step == step:
                    trimmed = copy.verified()
                self._free.append(self._in_flight.popleft())
        attach(model_runner_output, Report(proposed, trimmed, refused or {}))


def attach(model_runner_output: Any, report: Report) -> None:
    """Let a step's output carry a report, if there is anything in it."""
    if model_runner_output is not None and any(report):
        setattr(model_runner_output, ATTRIBUTE, report)


def received(model_runner_output: Any) -> Report:
    """The report that came with an output; an empty one when there is none."""
    report: Report | None = getattr(model_runner_output, ATTRIBUTE, None)
    return Report() if report is None else report


def when_it_leaves(output: Any, then: Callable[[Any], None]) -> Any:
    """`output` of a model runner's step, for which `then(ModelRunnerOutput)` is called before it goes to the
    scheduler: at once, or, where vLLM still waits for the device, when it has.

    vLLM asks an `AsyncModelRunnerOutput` for nothing but `get_output()`.
    """
    if not hasattr(output, "get_output"):
        then(output)
        return output
    return _async_output_class()(output, then)


@functools.cache
def _async_output_class() -> Any:
    """Made late: the rest of this module works without vLLM."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class OutputWithReport(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is not typed for us
        def __init__(self, output: Any, then: Callable[[Any], None]) -> None:
            self._output, self._then = output, then

        def get_output(self) -> Any:
            finished = self._output.get_output()
            self._then(finished)
            return finished

    return OutputWithReport

"""What each request was proposed, on its way from the device to the scheduler: late, but never waited for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ..seams.install import DraftingGuard, off_reason
from ..wire.reports import DraftReport, Ints, StepDrafts, attach, survival_levels
from .copies import CopyQueue, EngineStream, SideStream, StepCopies

#: Steps whose copies may be under way at once, beyond the batches that the engine has in flight.
_SPARE = 3


class DraftReporter:
    """A short queue of device-to-host copies.

        reporter.begin_step()                            # in propose, before the drafter is launched
        reporter.copy(req_ids, rows, draft, total_len)   # after it
        step = reporter.step                             # after propose
        reporter.attach(output, step)                    # when the output leaves the worker

    max_reqs, num_draft_tokens: sizes of a batch. device: where the drafts are.
    batches_in_flight: how many steps the engine may have started and not finished.

    `attach` adds what has arrived by then of this step, and all of earlier ones, with its age in steps. The copies
    of step t − 1 have been under way since before step t began, so it waits for them, in general for nothing: the
    draft that step t verified is always in the report. Of step t it waits only where vLLM trims drafts on the
    device (`copy` got `query_ends`). Another thread may call it. README.md says what is copied on which stream.
    """

    def __init__(
        self, max_reqs: int, num_draft_tokens: int, device: torch.device, batches_in_flight: int = 1
    ) -> None:
        device = torch.device(device)
        self._stream = (SideStream if device.type == "cuda" else EngineStream)(device)
        columns = {
            "length": ((max_reqs,), torch.int32),
            "source": ((max_reqs,), torch.int8),
            "confidence": ((max_reqs, num_draft_tokens), torch.float32),
            "total_len": ((max_reqs,), torch.int32),
            "query_ends": ((max_reqs + 1,), torch.int32),
        }
        self.queue = CopyQueue(columns, batches_in_flight + _SPARE, self._stream)
        self.step = 0
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """The next step begins; it has no drafts yet. The drafter may be launched."""
        self.step += 1
        self._stream.wait()

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

        Where every buffer is in use, the oldest copy that has arrived gives its buffer up (on ranks whose outputs
        are not used nobody asks for any); if there is none, this step is not reported.
        """
        with self._lock:
            step = self.queue.begin(self.step, req_ids)
            if step is None:
                return
            step.rows, step.trims = rows, query_ends is not None
            # The engine overwrites these, or frees them, before the drafter is launched again.
            step.copy(len(total_len), total_len=total_len)
            if query_ends is not None:
                step.copy(len(req_ids) + 1, query_ends=query_ends)
            with self._stream.copies_behind(step.event):
                step.copy(len(req_ids), length=draft.length, source=draft.source, confidence=draft.confidence)

    def attach(self, model_runner_output: Any, step: int, refused: Mapping[str, str] | None = None) -> None:
        """Attach to the output of `step` what has arrived from it or from earlier ones."""
        drafts, trimmed = self._arrived_by(step)
        report = DraftReport(drafts, trimmed, refused or {}, off=off_reason() is not None)
        attach(model_runner_output, report)

    def _arrived_by(self, now: int) -> tuple[list[StepDrafts], dict[str, int]]:
        drafts: list[StepDrafts] = []
        trimmed: dict[str, int] = {}
        with self._lock:
            while self.queue.in_flight and (step := self.queue.in_flight[0]).step <= now:
                if step.step < now or step.trims:
                    step.wait()
                if not step.arrived():
                    break
                drafts.append(_read(step, now))
                if step.step == now and step.trims:
                    # A request has one verified position more than drafts.
                    widths = np.diff(step.columns["query_ends"][: len(step.req_ids) + 1].numpy()) - 1
                    trimmed = dict(zip(step.req_ids, widths.tolist(), strict=True))
                self.queue.release()
        return drafts, trimmed


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
    """`output` of a model runner's step, for which `then(ModelRunnerOutput)` is called before it goes to the
    scheduler: at once, or, where vLLM still waits for the device, in `get_output()`, all that vLLM asks it
    for. Where `then` fails, drafting is turned off and the output goes as it is."""
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

"""Steps of a `Drafter` apart from `propose`: prepared beside the prefill, and replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..ops.layout import Draft, allocate_draft
from ..ops.step import StepCall


class Preparation:
    """Steps of single slots, whose drafts are not read; on CUDA they run on a stream of their own.

    A draft does not depend on how tokens were split over steps, so a step may run early. It then finds the context
    in the index and the output aligned. make: gives a step that writes to its `out`.
    """

    def __init__(
        self, make: Callable[..., StepCall], max_slots: int, num_draft_tokens: int, device: torch.device
    ) -> None:
        self._device = device
        self._step = make(out=allocate_draft(max_slots, num_draft_tokens, device))
        self._slots = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._total_len = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self._num_sampled = torch.ones(max_slots, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        #: Recorded after the last start, until `join`.
        self._done: torch.cuda.Event | None = None

    def start(self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: Sequence[int]) -> None:
        """Run a step of `slots`, after what the current stream holds by now. Arguments as in `Drafter.prepare`."""
        self.join()
        # The engine adds tokens while this runs; what it has now is what is processed.
        self._total_len.copy_(total_len)
        chosen, ones = self._slots[: len(slots)], self._num_sampled[: len(slots)]
        source = torch.tensor(slots, dtype=torch.int64)
        if self._stream is None:
            self._step(token_ids, self._total_len, chosen.copy_(source), ones)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            chosen.copy_(source.pin_memory(), non_blocking=True)
            self._step(token_ids, self._total_len, chosen, ones)
            self._done = self._stream.record_event()

    def finish(self) -> None:
        """The host waits for what was started: its memory is about to be freed."""
        if self._done is not None:
            self._done.synchronize()

    def join(self) -> None:
        """Make the current stream wait for the prepared step. The host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None


class CapturedStep:
    """A step of a `Drafter` that an engine replays, to `draft`: no arguments, no checks, one launch."""

    def __init__(
        self, propose: Callable[..., Draft], preparation: Preparation, *inputs: torch.Tensor
    ) -> None:
        *others, num_sampled = inputs
        self._preparation = preparation
        self._propose = partial(propose, *inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        # Nothing sampled: the kernel is compiled and runs once, and leaves every slot as it is.
        self.draft = propose(*others, torch.zeros_like(num_sampled))
        if num_sampled.is_cuda:
            torch.cuda.current_stream(num_sampled.device).synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._propose()

    def replay(self) -> Draft:
        """Run the step with what the captured tensors hold now."""
        if self._graph is None:
            return self._propose()
        self._preparation.join()
        self._graph.replay()
        return self.draft

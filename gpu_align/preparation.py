"""What a step would do first for a new request, done beside the engine's prefill instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .ops.draft import Draft, allocate_draft
from .ops.step import Step


class Preparation:
    """Steps of single slots, whose drafts nobody reads; on CUDA they run on a stream of their own.

    A draft does not depend on how tokens were split over steps, so a step may run early. It then finds the context
    in the index and the output aligned.

    Args:
        make: a step that writes to the `Draft` that it is given; it shares all other tensors with the drafter's.
        max_slots: the most slots at a time.
        num_draft_tokens: K.
        device: where the drafter is.
    """

    def __init__(
        self, make: Callable[[Draft], Step], max_slots: int, num_draft_tokens: int, device: torch.device
    ) -> None:
        self._device = device
        self._step = make(allocate_draft(max_slots, num_draft_tokens, device))
        self._slots = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._total_len = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self._num_sampled = torch.ones(max_slots, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        #: Recorded behind the last start, until `join`.
        self._done: torch.cuda.Event | None = None

    def start(self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: Sequence[int]) -> None:
        """Run a step of `slots`, after what the current stream holds by now. Arguments as in `Drafter.prepare`."""
        self.join()
        # The engine adds tokens while this runs; what it has now is what is processed.
        self._total_len.copy_(total_len)
        if self._stream is None:
            self._run(token_ids, slots)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(token_ids, slots)
            self._done = self._stream.record_event()

    def _run(self, token_ids: torch.Tensor, slots: Sequence[int]) -> None:
        num_slots = len(slots)
        source = torch.tensor(slots, dtype=torch.int64)
        if self._stream is not None:
            source = source.pin_memory()
        self._slots[:num_slots].copy_(source, non_blocking=True)
        self._step(token_ids, self._total_len, self._slots[:num_slots], self._num_sampled[:num_slots])

    def join(self) -> None:
        """What follows on the current stream comes after what was started. The host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

"""How many drafts each request got, on its way from the device to the scheduler: late, but never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

#: The attribute of vLLM's `ModelRunnerOutput` that carries the counts to the scheduler's process.
ATTRIBUTE = "gpu_align_draft_counts"
_MAX_IN_FLIGHT = 4


class Proposed(NamedTuple):
    """What a request was last known to have been proposed.

    length: drafts. expected: how many of them the drafter expects to be accepted. age: steps since then.
    """

    length: int
    expected: float
    age: int


class _InFlight:
    """Pinned host memory for one step's counts, and the event after which they are in it."""

    def __init__(self, max_reqs: int, num_draft_tokens: int, on_cuda: bool) -> None:
        self.length = torch.zeros(max_reqs, dtype=torch.int32, pin_memory=on_cuda)
        self.confidence = torch.zeros((max_reqs, num_draft_tokens), dtype=torch.float32, pin_memory=on_cuda)
        self.event: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.req_ids: Sequence[str] = ()
        self.step = 0

    def start(
        self, req_ids: Sequence[str], length: torch.Tensor, confidence: torch.Tensor, step: int
    ) -> None:
        self.req_ids, self.step = req_ids, step
        self.length[: len(req_ids)].copy_(length, non_blocking=True)
        self.confidence[: len(req_ids)].copy_(confidence, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def read(self, now: int) -> dict[str, Proposed]:
        """Expected acceptances are the sum over k of the probability that the first k are all accepted."""
        num_reqs = len(self.req_ids)
        expected = np.cumprod(self.confidence[:num_reqs].numpy(), axis=1).sum(axis=1)
        return {
            req_id: Proposed(int(length), float(value), now - self.step)
            for req_id, length, value in zip(
                self.req_ids, self.length[:num_reqs].numpy(), expected, strict=True
            )
        }


class DraftCounts:
    """A short queue of device-to-host copies on the engine's stream.

        counts.forget(); counts.remember(req_ids, length, confidence)      # in propose: keeps references
        counts.publish(output)                                             # after it: starts a copy

    `publish` attaches the newest counts that have arrived, with their age in steps; when all buffers are
    still on their way it starts no further copy. It never waits.
    """

    def __init__(self, max_reqs: int, num_draft_tokens: int, device: torch.device) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self._free = [_InFlight(max_reqs, num_draft_tokens, on_cuda) for _ in range(_MAX_IN_FLIGHT)]
        self._in_flight: deque[_InFlight] = deque()
        self._latest: tuple[Sequence[str], torch.Tensor, torch.Tensor] | None = None
        self._step = 0

    def forget(self) -> None:
        """This step has no drafts (yet)."""
        self._latest = None
        self._step += 1

    def remember(self, req_ids: Sequence[str], length: torch.Tensor, confidence: torch.Tensor) -> None:
        """This step's drafts: [B] int32 and [B, K] float32 on the device, in the order of `req_ids`."""
        self._latest = (req_ids, length, confidence)

    def publish(self, output: Any) -> None:
        """Start this step's copy, and attach to `output` what has arrived from it or from earlier ones."""
        if self._latest is not None and self._free:
            copy = self._free.pop()
            copy.start(*self._latest, self._step)
            self._in_flight.append(copy)
        self._latest = None
        arrived: dict[str, Proposed] = {}
        while self._in_flight and self._in_flight[0].arrived():
            copy = self._in_flight.popleft()
            arrived.update(copy.read(self._step))
            self._free.append(copy)
        carrier = getattr(output, "model_runner_output", output)
        if arrived and carrier is not None:
            setattr(carrier, ATTRIBUTE, arrived)


def received(model_runner_output: Any) -> Mapping[str, Proposed]:
    """The counts that came with an output; empty when there are none."""
    counts: Mapping[str, Proposed] | None = getattr(model_runner_output, ATTRIBUTE, None)
    return counts or {}

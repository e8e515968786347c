"""Rules that say how many drafts of each request a step verifies; the serving model compares them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.serving.trace import ONE
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests, likeliest
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, survival_levels

Ints = npt.NDArray[np.int64]
#: Steps in which a rule that learns gets to know the requests of a batch.
WARM_UP = 300


class Batch(NamedTuple):
    """What a rule may look at before a step of B requests.

    length: [B] drafts proposed. survival: [B, K] the drafter's estimates in units of 1/`ONE`, 0 beyond `length`.
    request: [B] a number that changes when another request takes the place.
    """

    length: Ints
    survival: npt.NDArray[np.uint16]
    request: Ints


class Rule(Protocol):
    """Grants draft slots. A slot costs a verified token, whether or not there is a draft in it. A rule that learns
    from what was accepted has a `settle` as well, which is told after each step; see `Plugin`."""

    @property
    def name(self) -> str: ...

    def grant(self, batch: Batch) -> Ints:
        """[B] slots, ``0 <= slots <= K``."""


@dataclass(frozen=True)
class FixedK:
    """K slots for every request, prediction or not: what vLLM schedules on its own; with 0 there are no drafts."""

    k: int

    @property
    def name(self) -> str:
        return f"fixed {self.k}" if self.k else "none"

    def grant(self, batch: Batch) -> Ints:
        return np.full(len(batch.length), self.k, dtype=np.int64)


@dataclass(frozen=True)
class Lengths:
    """What the drafter proposes, all of it."""

    name: str = "lengths"

    def grant(self, batch: Batch) -> Ints:
        return batch.length.astype(np.int64)


@dataclass(frozen=True)
class Worth:
    """As many drafts as make ``expected tokens / step time`` largest, the step-time curve being known.

    ``n`` that maximises ``(B + sum of the n largest survivals) / ms(B, B + n)``; the fewest of equally good. An
    upper bound for rules that do not know the machine.
    """

    ms: Callable[[int, npt.ArrayLike], npt.NDArray[np.float64]]
    name: str = "known curve"

    def grant(self, batch: Batch) -> Ints:
        size = len(batch.length)
        falling = np.sort(batch.survival[batch.survival > 0])[::-1] / ONE
        tokens = size + np.concatenate([[0.0], np.cumsum(falling)])
        times = self.ms(size, size + np.arange(len(tokens)))
        return likeliest(batch.survival, int(np.argmax(tokens / times)))


class Plugin:
    """The plugin's own policy, `DraftBudget` with its defaults, run as its schedulers run it.

    late: steps since what is known when the next step is planned. 0: synchronous scheduling. 1 or 2: asynchronous
    scheduling, where a step is planned while the one before it runs; 2 if its drafts' copies are not there by the
    time when its tokens are. What a step accepted is known with its tokens: one step late in either case. Limits
    are half of vLLM's `max_num_batched_tokens` on an H100 and a largest CUDA graph of 512 tokens.
    """

    def __init__(self, num_draft_tokens: int, late: int = 0) -> None:
        self.num_draft_tokens, self.late = num_draft_tokens, late
        self.name = f"plugin, late by {late}" if late else "plugin"
        self._requests = DraftedRequests(False, num_draft_tokens)
        self._budget = DraftBudget(self._requests, num_draft_tokens, 4096, captured=512)
        self._told: deque[StepDrafts] = deque()
        self._ids: list[str] = []
        self._ended: deque[tuple[list[str], Ints, Ints]] = deque()

    def grant(self, batch: Batch) -> Ints:
        ids = [f"{place}:{number}" for place, number in enumerate(batch.request.tolist())]
        requests = [_request(req_id) for req_id in ids]
        self._requests.keep_only(dict.fromkeys(ids))
        for request in requests:
            self._requests.add(request)
        self._ids = ids
        if len(self._ended) > min(self.late, 1):
            before, slots, accepted = self._ended.popleft()
            self._budget.settle(self._requests.rows_of(before), slots, accepted + 1)
        levels = np.zeros((len(ids), self.num_draft_tokens), dtype=np.uint8)
        levels[:, : batch.survival.shape[1]] = survival_levels(batch.survival / ONE, batch.length)
        unknown = np.zeros_like(batch.length)
        self._told.append(StepDrafts(ids, self.late, unknown, batch.length, unknown, levels))
        told = [self._told.popleft()] if len(self._told) > self.late else []
        self._requests.take(DraftReport(told))
        granted = self._budget.grant(requests, exact=not self.late, batch_size=len(ids))
        return np.array(granted, dtype=np.int64)

    def settle(self, slots: Ints, accepted: Ints) -> None:
        """[B] each: what the step of the last `grant` verified, and what of it is output."""
        self._ended.append((self._ids, slots, accepted))


def _request(req_id: str) -> Any:
    """As much of a vLLM request as the policy looks at; it never comes near its last token."""
    params = SimpleNamespace(extra_args={wire.KEY: True}, max_tokens=1 << 30)
    return SimpleNamespace(request_id=req_id, sampling_params=params, output_token_ids=())

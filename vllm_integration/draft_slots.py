"""Draft slots only where there is something to verify: the policy. Knows requests, imports no vLLM."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from vllm_integration.accounts import has_prediction
from vllm_integration.draft_counts import Proposed

#: Slots for a request whose last known draft was empty, and how many such reports in a row end them.
FEW = 4
PATIENCE = 2


@dataclass
class _Known:
    """What the scheduler knows of one request's drafts."""

    proposed: Proposed | None = None
    empty: int = 0  # reports in a row without drafts


class DraftSlots:
    """How many draft slots each request gets in its next step.

    num_draft_tokens: K. budget: the most slots of a whole batch.

        wanted(request) = 0                                  without a prediction
                          K                                  before the first report
                          length                             when the report is about this very step
                          min(K, 2 * length + FEW)           when it is older and length > 0
                          FEW, then 0                        after 1 .. PATIENCE, then more empty reports

    never more than can still become output under `max_tokens`. When the batch wants more than the budget,
    requests are served in the order of expected acceptances a slot, ties in batch order.
    """

    def __init__(self, num_draft_tokens: int, budget: int, draft_without_prediction: bool) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.budget = budget
        self._draft_without_prediction = draft_without_prediction
        self._known: dict[str, _Known] = {}

    def report(self, counts: Iterable[tuple[str, Proposed]]) -> None:
        """Take in what the worker has reported."""
        for req_id, proposed in counts:
            known = self._known.setdefault(req_id, _Known())
            known.proposed = proposed
            known.empty = 0 if proposed.length else known.empty + 1

    def keep_only(self, alive: Container[str]) -> None:
        """Forget requests that are not in `alive`."""
        for req_id in [req_id for req_id in self._known if req_id not in alive]:
            del self._known[req_id]

    def wanted(self, request: Any, *, exact: bool) -> int:
        """Slots of one request before the budget. exact: a report of age 0 is about the step to come."""
        if not self._draft_without_prediction and not has_prediction(request):
            return 0
        room = int(request.max_tokens) - int(request.num_output_tokens) - 1
        limit = max(0, min(self.num_draft_tokens, room))
        known = self._known.get(request.request_id)
        if known is None or known.proposed is None:
            return limit
        length = known.proposed.length
        if exact and known.proposed.age == 0:
            return min(limit, length)
        if length:
            return min(limit, 2 * length + FEW)
        return min(limit, FEW) if known.empty <= PATIENCE else 0

    def grant(self, requests: Iterable[Any], *, exact: bool) -> dict[str, int]:
        """Request id → slots, for every request given; their sum is within the budget."""
        slots = {request.request_id: self.wanted(request, exact=exact) for request in requests}
        left = self.budget - sum(slots.values())
        if left >= 0:
            return slots
        left = self.budget
        for req_id in sorted(slots, key=self._value, reverse=True):  # stable: ties stay in batch order
            slots[req_id] = min(slots[req_id], left)
            left -= slots[req_id]
        return slots

    def _value(self, req_id: str) -> float:
        """Expected acceptances a slot; a request that nothing is known of counts as certain."""
        known = self._known.get(req_id)
        if known is None or known.proposed is None:
            return 1.0
        return known.proposed.expected / max(1, known.proposed.length)

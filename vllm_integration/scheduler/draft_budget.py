"""Draft slots only where there is something to verify: the policy. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_integration.config.settings import FILL_TOKENS, SURE, SURE_LATE
from vllm_integration.scheduler import credit as rule
from vllm_integration.scheduler.drafted_requests import LENGTH, NEVER, DraftedRequests

Ints = npt.NDArray[np.int64]

#: Slots beyond the drafts of an older report, where the step has room: the draft may have grown since.
FEW = 4


class DraftBudget:
    """How many draft slots each request gets in its next step. A slot costs a verified token, whether or not
    there is a draft in it.

    drafted_requests: what is known of each request's draft.
    num_draft_tokens: K. max_slots: the most slots of a whole batch.
    free_tokens: tokens of a step up to which drafts count as free.
    always_verify, always_verify_late: the survival from which a draft is verified in any batch, by reports about
    the step to come and by older ones. (Survival: see `wire.reports.survival_levels`.)
    learns: whether what was accepted of a request corrects what it gets (`credit`). `settle` then has to be called
    with every step.

    A request has a row of K survivals::

        without a prediction                  none
        before its first report               all certain, none of them above the threshold
        its last report is about this step    those of its drafts
        its last report is older              those of its drafts then, and FEW behind them of the least value

    cut where drafts can no longer become output under `max_tokens`, and, where its credit is below that of a new
    request, to those drafts that the credit covers. Then, B being the requests of the step::

        slots = the likeliest max(0, free_tokens - B) of all rows
        slots[request] = max(slots[request], its drafts above the threshold that its credit covers)
        if sum(slots) > max_slots: the likeliest `max_slots` of these
        credit -= what they promise; nothing before the first report

    Ties are served in batch order. A draft is reported whether or not its request had slots, so that one which
    gets none has its slots back as soon as its drafts are worth them.
    """

    def __init__(
        self,
        drafted_requests: DraftedRequests,
        num_draft_tokens: int,
        max_slots: int,
        *,
        free_tokens: int = FILL_TOKENS,
        always_verify: float = SURE,
        always_verify_late: float = SURE_LATE,
        learns: bool = True,
    ) -> None:
        self.learns = learns
        self._most = np.float32(rule.most(num_draft_tokens))
        self._requests = drafted_requests
        self._max_slots = max_slots
        self._free_tokens = free_tokens
        # Of few bytes, as what it is compared with: NumPy then compares several times as fast.
        self._place = np.arange(num_draft_tokens, dtype=np.uint16)[:, None]
        # 1 is the level of the least likely draft, 0 stands where there is none: a share of 0 means all drafts.
        self._threshold, self._threshold_late = (
            np.uint8(max(1, np.ceil(share * 255))) for share in (always_verify, always_verify_late)
        )

    def grant(self, requests: Sequence[Any], *, exact: bool, batch_size: int | None = None) -> list[int]:
        """Slots of every request given, in their order.

        exact: a draft made by the last step is what the step to come verifies.
        batch_size: requests of that step, where they are more than those that may get slots.
        """
        if not requests:
            return []
        rows = self._requests.rows_of([request.request_id for request in requests], requests)
        known, place = self._requests.table.take(rows), self._place
        length, made = known["drafts"][:, 0, LENGTH], known["made"]
        fresh = (made == self._requests.reports) & exact
        grown = (made != NEVER) & ~fresh
        num = np.where(grown, length + FEW, length).astype(np.uint16)
        # [K, B]: along the requests NumPy counts several times as fast as along K.
        survival = known["survival"].T.copy()
        np.maximum(survival, place < num, out=survival)
        near = np.flatnonzero(known["far_until"] < self._requests.reports)
        if near.size:
            survival[:, near] *= place < self._remaining([requests[i] for i in near.tolist()], rows[near])
        threshold = np.where(fresh, self._threshold, self._threshold_late)
        # Levels never rise along a draft: both counts are of its first tokens.
        always = np.minimum((survival >= threshold).sum(axis=0), length)
        size = len(requests) if batch_size is None else batch_size
        free_slots = self._free_tokens - size
        if self.learns:
            credit = rule.refilled(known["credit"], free_slots, size)
            self._keep_to(credit, survival, always)
        slots = np.maximum(likeliest(survival.T, free_slots), always)
        if int(slots.sum()) > self._max_slots:
            survival *= place < slots.astype(np.uint16)
            slots = likeliest(survival.T, self._max_slots)
        if self.learns:
            credit -= rule.promised(survival, slots) * (made != NEVER)
            self._requests.table["credit"][rows] = np.minimum(np.maximum(credit, 0), self._most)
        granted: list[int] = slots.tolist()
        return granted

    def settle(self, rows: Ints, slots: Ints, sampled: Ints) -> None:
        """Pay for accepted drafts. [B] each: the rows of a step's requests, their slots, the tokens sampled."""
        column = self._requests.table["credit"]
        accepted = np.minimum(np.maximum(sampled - 1, 0), slots)
        column[rows] = np.minimum(column[rows] + np.float32(rule.EARNED) * accepted, self._most)

    def _keep_to(self, credit: rule.Floats, survival: npt.NDArray[np.uint8], always: Ints) -> None:
        """Take away, in place, what credits do not cover. Most requests have enough for any draft."""
        short = np.flatnonzero((credit < len(self._place)) & (credit >= 1))
        if short.size:
            few = credit[short]
            covered = rule.covered(survival[:, short], few)
            always[short] = np.minimum(always[short], covered)
            poor = few < rule.START
            survival[:, short[poor]] *= self._place < covered[poor].astype(np.uint16)
        has = credit >= 1
        if not has.all():
            survival *= has
            always *= has

    def _remaining(self, requests: Sequence[Any], rows: Ints) -> npt.NDArray[np.uint16]:
        """How many drafts of each request can become output. Where these are all for a while, the table says so:
        with each report come at most K + 1 tokens. (Only of a request that is resumable `max_tokens` may fall.)"""
        K = len(self._place)
        remaining = np.array([request.max_tokens - request.num_output_tokens - 1 for request in requests])
        resumable = np.array([getattr(request, "resumable", False) for request in requests])
        far_until = self._requests.reports + (remaining - K) // (K + 1)
        self._requests.table["far_until"][rows] = np.where(resumable, -1, far_until)
        return np.clip(remaining, 0, K).astype(np.uint16)


def likeliest(survival: npt.NDArray[np.integer[Any]], count: int) -> Ints:
    """[B] how many of each row are among the `count` largest entries above 0 of a [B, K] table of small numbers
    whose rows never rise; ties go to the first rows."""
    if count <= 0:
        return np.zeros(len(survival), dtype=np.int64)
    entries = np.bincount(survival.ravel(order="K"), minlength=1)
    entries[0] = 0
    at_least = np.cumsum(entries[::-1])  # entry i: how many are at least the (i + 1)th largest level
    if at_least[-1] <= count:
        return np.asarray((survival > 0).sum(axis=1))
    last = len(entries) - 1 - int(np.searchsorted(at_least, count))
    above, level = (survival > last).sum(axis=1), (survival == last).sum(axis=1)
    left = count - int(above.sum())
    granted: Ints = above + np.clip(left - (np.cumsum(level) - level), 0, level)
    return granted

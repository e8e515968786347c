"""Draft slots only where there is something to verify: the policy. Knows requests, imports no vLLM."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_integration.config.settings import FILL_TOKENS, SURE, SURE_LATE
from vllm_integration.scheduler.verification_ledger import has_prediction
from vllm_integration.worker.draft_reporter import Proposed

Ints = npt.NDArray[np.int64]

#: Slots beyond the drafts of an older report, where the step has room: the draft may have grown since.
FEW = 4
_CERTAIN = 255


class DraftSlots:
    """How many draft slots each request gets in its next step. A slot costs a verified token, whether or not
    there is a draft in it.

    num_draft_tokens: K. budget: the most slots of a whole batch. fill: tokens of a step up to which drafts
    count as free. sure, sure_late: the survival (the drafter's estimate that a draft and all before it are
    accepted) from which a draft is verified in any batch, by reports about the step to come and by older ones.

    A request has a row of K survivals::

        without a prediction                  none
        before its first report               all certain, none of them sure
        its last report is about this step    those of its drafts
        its last report is older              those of its drafts then, and FEW behind them of the least value

    cut where drafts can no longer become output under `max_tokens`. Then, B being the requests of the step::

        slots = the likeliest max(0, fill - B) of all rows
        slots[request] = max(slots[request], its sure ones)
        if sum(slots) > budget: the likeliest `budget` of these

    Ties are served in batch order. A draft is reported whether or not its request had slots, so that one which
    gets none has its slots back as soon as its drafts are worth them.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        budget: int,
        draft_without_prediction: bool,
        *,
        fill: int = FILL_TOKENS,
        sure: float = SURE,
        sure_late: float = SURE_LATE,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.budget = budget
        self.fill = fill
        self._draft_without_prediction = draft_without_prediction
        # 1 is the level of the least likely draft, 0 stands where there is none: a share of 0 means all drafts.
        self._sure, self._sure_late = (max(1, int(np.ceil(share * 255))) for share in (sure, sure_late))
        self._known: dict[str, tuple[Proposed, int]] = {}  # the last report, and which call brought it
        self._reports = 0

    def report(self, counts: Iterable[tuple[str, Proposed]]) -> None:
        """Take in what the worker has reported; to be called once a step, also when that is nothing."""
        self._reports += 1
        for req_id, proposed in counts:
            self._known[req_id] = (proposed, self._reports)

    def keep_only(self, alive: Container[str]) -> None:
        """Forget requests that are not in `alive`."""
        for req_id in [req_id for req_id in self._known if req_id not in alive]:
            del self._known[req_id]

    def grant(self, requests: Iterable[Any], *, exact: bool, batch_size: int | None = None) -> dict[str, int]:
        """Request id → slots, for every request given.

        exact: a report of age 0 that came with the last step's output is about the step to come.
        batch_size: requests of that step, where they are more than those that may get slots.
        """
        requests = list(requests)
        if not requests:
            return {}
        rows, lengths, levels = zip(*(self._row(request, exact) for request in requests), strict=True)
        table = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(requests), self.num_draft_tokens)
        place = np.arange(self.num_draft_tokens)
        sure = ((table >= np.array(levels)[:, None]) & (place < np.array(lengths)[:, None])).sum(axis=1)
        size = len(requests) if batch_size is None else batch_size
        slots = np.maximum(likeliest(table, self.fill - size), sure)
        if int(slots.sum()) > self.budget:
            slots = likeliest(np.where(place < slots[:, None], table, 0), self.budget)
        return {request.request_id: n for request, n in zip(requests, slots.tolist(), strict=True)}

    def _row(self, request: Any, exact: bool) -> tuple[bytes, int, int]:
        """K survivals of one request in units of 1/255, how many of them were proposed, and from which level on
        those are sure."""
        K = self.num_draft_tokens
        if not self._draft_without_prediction and not has_prediction(request):
            return bytes(K), 0, 0
        proposed, when = self._known.get(request.request_id, (None, 0))
        if proposed is None:
            row, length, level = bytes([_CERTAIN]) * K, 0, 0
        elif exact and proposed.age == 0 and when == self._reports:
            row, length, level = proposed.survival, proposed.length, self._sure
        else:
            row, length, level = proposed.survival + b"\x01" * FEW, proposed.length, self._sure_late
        room = int(request.max_tokens) - int(request.num_output_tokens) - 1
        return row[: max(0, min(K, room))].ljust(K, b"\0"), length, level


def likeliest(survival: npt.NDArray[np.unsignedinteger[Any]], count: int) -> Ints:
    """[B] how many of each row are among the `count` largest entries above 0 of a [B, K] table whose rows never
    rise; ties go to the first rows."""
    if int(np.count_nonzero(survival)) <= count:
        return np.asarray((survival > 0).sum(axis=1))
    if count <= 0:
        return np.zeros(len(survival), dtype=np.int64)
    flat = survival.ravel()
    last = np.partition(flat, flat.size - count)[flat.size - count]
    above, level = (survival > last).sum(axis=1), (survival == last).sum(axis=1)
    left = count - int(above.sum())
    granted: Ints = above + np.clip(left - (np.cumsum(level) - level), 0, level)
    return granted

"""Draft slots only where there is something to verify: the policy. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.settings import FILL_TOKENS, SURE
from ..wire import request as wire
from ..wire.reports import DRAFT_MODEL, REFUSALS, DraftReport

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.integer[Any]]

#: Of a new request: so many drafts may be rejected before it gets no more than single ones.
START = 3.0
#: What an accepted draft earns: a quarter of what is promised has to come true.
EARNED = 4.0
#: A slot promises at least this, however little its draft does: drafts that are never accepted run out as well.
LEAST = 0.2
#: What every step gives back: in any batch, and of its share of the slots that are free.
REFILL, REFILL_OF_FREE = 0.001, 0.005


def covered(survival: Levels, credit: Floats) -> Ints:
    """[B] the largest k of each request with ``promised(survival, k) <= credit``.

    survival: [K, B] in units of 1/255, 0 after the last draft.
    """
    # No sum passes 255 * K, and K is at most 256.
    sums = survival.astype(np.uint16)
    # Row by row: NumPy's own sum along the first axis takes ten times as long.
    for k in range(1, len(sums)):
        sums[k] += sums[k - 1]
    count: Ints = (sums <= credit * 255).sum(axis=0)
    return np.minimum(count, (credit / np.float32(LEAST)).astype(np.int64))


def promised(survival: Levels, slots: Ints) -> Floats:
    """[B] ``max(sum(survival[i] for i in range(slots)), LEAST * slots)`` of each request."""
    few = slots.astype(np.uint16)
    depth = np.arange(few.max(initial=0), dtype=np.uint16)[:, None]
    sums = (survival[: len(depth)] * (depth < few)).sum(axis=0, dtype=np.uint16)
    return np.asarray(np.maximum(sums / np.float32(255), few * np.float32(LEAST)), dtype=np.float32)


#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
#: What is remembered of each.
POSITION, LENGTH, SOURCE = range(3)
#: Survival of every slot of a request that nothing is known of yet.
CERTAIN = 255
#: `made` of such a request.
NEVER = np.iinfo(np.int64).min


class DraftedRequests:
    """One row of `table` for each request that is drafted for; row 0 stands for all others, and stays blank.
    False where there are none: then nothing has to be done in a step.

    draft_without_prediction: whether requests without a prediction have one. num_draft_tokens: K.
    beside_model: whether the model's own drafter drafts for all others, which then have rows, too.

        drafts     [DEPTH, 3] POSITION, LENGTH, SOURCE of the last, newest first; position −1: none
        made       number of the report that the newest draft comes with if it is not late; NEVER: none yet
        survival   [K] of the newest draft; all CERTAIN before the first report
        far_until  until this many reports a whole draft can become output, whatever the request samples
        credit     rejections that its drafts may still cost
        refused    index of REFUSALS; 0 when the front end knows of it
        ours       whether it is ours, and not the model's own drafter's

    off: whether the worker drafts nothing. plain_graphs_alone: as of `DraftReport`.
    `reports` counts reports: a draft is as new as can be where `made == reports`.
    """

    def __init__(
        self, draft_without_prediction: bool, num_draft_tokens: int = 0, beside_model: bool = False
    ) -> None:
        self._draft_without_prediction, self.beside_model = draft_without_prediction, beside_model
        drafts = ("drafts", np.int32, (DEPTH, 3))
        numbers = [("made", np.int64), ("far_until", np.int64), ("credit", np.float32)]
        numbers += [("refused", np.int8), ("ours", np.int8)]
        survival = ("survival", np.uint8, (num_draft_tokens,))
        self.table = np.zeros(64, dtype=np.dtype([drafts, *numbers, survival], align=True))
        self.reports = 0
        self.off = False
        self.plain_graphs_alone = False
        self._rows: dict[str, int] = {}
        self._free = list(range(1, len(self.table)))
        self._blank(np.arange(len(self.table)))
        self._nobody = self.table[:1].copy()

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, req_ids: Sequence[str]) -> Ints:
        """[N] the rows of requests, 0 for those that have none."""
        return np.fromiter(map(self._rows.get, req_ids, repeat(0)), np.int64, len(req_ids))

    def take(self, report: DraftReport, req_ids: Sequence[str] = (), rows: Ints | None = None) -> None:
        """Take in what came with a step's output, once a step, be it nothing. req_ids, rows: of the step, if
        the caller has looked them up: the drafts of that very step come with the same list."""
        self.reports += 1
        self.plain_graphs_alone |= report.plain_graphs_alone
        table = self.table
        for drafts in report.drafts:
            at = rows if rows is not None and drafts.req_ids is req_ids else self.rows_of(drafts.req_ids)
            known = table.take(at)
            known["drafts"][:, 1:] = known["drafts"][:, :-1]
            known["drafts"][:, 0] = np.stack([drafts.position, drafts.length, drafts.source], axis=1)
            known["survival"] = drafts.survival
            known["made"] = self.reports - drafts.age
            table.put(at, known)
        for req_id, reason in report.refused.items():
            table["refused"][self._rows.get(req_id, 0)] = REFUSALS.index(reason)
        table[:1] = self._nobody

    def keep_only(self, alive: Mapping[str, Any]) -> list[int]:
        """Forget requests that are not in `alive`; the rows they had."""
        gone = [] if self._rows.keys() <= alive.keys() else self._rows.keys() - alive.keys()
        rows = list(map(self._rows.pop, gone))
        if rows:
            self._blank(np.array(rows))
            self._free += rows
        return rows

    def add(self, request: Any) -> None:
        """A request of vLLM's has come, or its next turn: it gets a row if it is drafted for and has none."""
        is_ours = is_drafted_for(request, self._draft_without_prediction)
        if request.request_id in self._rows or not (is_ours or self.beside_model):
            return
        if not self._free:
            size = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free = list(range(size, 2 * size))
            self._blank(np.arange(size, 2 * size))
        row = self._rows[request.request_id] = self._free.pop()
        self.table["ours"][row] = is_ours

    def is_theirs(self, req_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """[N] whether the model's own drafter makes a request's next draft: it is not ours, or ours made none."""
        known = self.table.take(self.rows_of(req_ids))
        return np.asarray((known["ours"] == 0) | (known["drafts"][:, 0, SOURCE] == DRAFT_MODEL))

    def _blank(self, rows: Ints) -> None:
        self.table[rows] = np.zeros(1, dtype=self.table.dtype)
        self.table["drafts"][rows, :, POSITION] = -1
        self.table["made"][rows] = NEVER
        self.table["credit"][rows] = START
        self.table["far_until"][rows] = np.where(rows > 0, -1, np.iinfo(np.int64).max)
        self.table["survival"][rows] = np.where(rows > 0, CERTAIN, 0)[:, None]


def is_drafted_for(request: Any, even_without: bool) -> bool:
    """Whether a vLLM request is: it brought a prediction, or `even_without`, and did not ask for no drafts."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    given = extra_args.get(wire.KEY)
    return even_without if given is None else getattr(given, "drafts", None) is not False


#: Slots beyond the drafts of an older report, where the step has room: the draft may have grown since.
FEW = 4
#: A step over the largest CUDA graph by at most this share of it is cut to it. Others measured that steps take
#: 6.6 to 21.6 % longer without their FULL graphs: more than drafts of this share bring, be they all accepted.
OVER = 1 / 16
#: Where plain steps have FULL graphs and those of mixed lengths have none: what drafts have to promise, in tokens
#: for each request of the step; without it no request gets slots.
WORTH = 0.2


class DraftBudget:
    """How many draft slots each request gets in its next step.

    max_slots: of a whole batch. captured: tokens of the largest CUDA graph, or 0. free_tokens: tokens of a step up
    to which drafts count as free. sure: the survival (`wire.reports.survival_levels`) from which a draft is
    verified in any batch. learns: whether what was accepted corrects what a request gets; then call `settle`.

    A request has a row of K survivals::

        without a prediction                  none
        before its first report               all certain, none of them sure
        its last report is about this step    those of its drafts
        its last report is older              those of its drafts then, and FEW after them of the least value

    cut where drafts can no longer become output under `max_tokens`, and, where its credit is below that of a new
    request, to those drafts that the credit covers. Then, B being the requests of the step::

        covered = the drafts of all last reports that credits cover
        sure_from(t) = sure * (1 + clip((t - free_tokens) / (3 * free_tokens), 0, 1)) / 2
        threshold = the least s with s >= sure_from(B + how many of `covered` have a survival of s or more)
        slots = the likeliest max(0, free_tokens - B) of all rows; ties go in batch order
        slots[request] = max(slots[request], how many of `covered` it has from the threshold on)
        if B <= captured < B + sum(slots) <= captured * (1 + OVER): the likeliest ``captured - B`` of these
        if sum(slots) > max_slots: the likeliest `max_slots` of these
        if drafts cost the step its graph and all these promise less than WORTH * B: none
        credit -= what they promise; nothing before the first report
    """

    def __init__(
        self,
        drafted_requests: DraftedRequests,
        num_draft_tokens: int,
        max_slots: int,
        *,
        captured: int = 0,
        free_tokens: int = FILL_TOKENS,
        sure: float = SURE,
        learns: bool = True,
    ) -> None:
        self.learns = learns
        self._most = np.float32(2 * num_draft_tokens)  # credit for two whole drafts
        self._requests = drafted_requests
        self._max_slots, self._captured = max_slots, captured
        self._free_tokens = free_tokens
        # Of few bytes, as what it is compared with: NumPy then compares several times as fast.
        self._place = np.arange(num_draft_tokens, dtype=np.uint16)[:, None]
        self._sure = sure

    def grant(self, requests: Sequence[Any], *, exact: bool, batch_size: int | None = None) -> list[int]:
        """Slots of every request. exact: what the last step drafted is what the step to come verifies. batch_size:
        requests of that step, where they are more than these."""
        if not requests:
            return []
        rows = self._requests.rows_of([request.request_id for request in requests])
        known, place = self._requests.table.take(rows), self._place
        length, made = known["drafts"][:, 0, LENGTH], known["made"]
        grown = (made != NEVER) & ((made != self._requests.reports) | (not exact))
        num = np.where(grown, length + FEW, length).astype(np.uint16)
        # [K, B]: along the requests NumPy counts several times as fast as along K.
        survival = known["survival"].T.copy()
        np.maximum(survival, place < num, out=survival)
        near = np.flatnonzero(known["far_until"] < self._requests.reports)
        if near.size:
            survival[:, near] *= place < self._remaining([requests[i] for i in near.tolist()], rows[near])
        size = batch_size or len(requests)
        free_slots = self._free_tokens - size
        if self.learns:
            credit = known["credit"] + np.float32(min(REFILL + REFILL_OF_FREE * max(free_slots, 0) / size, 1))
            length = np.minimum(length, self._keep_to(credit, survival))
        drafts = survival * (place < length.astype(np.uint16))
        # Levels never rise along a draft: both counts are of its first tokens.
        sure = (drafts >= self._threshold(drafts, size)).sum(axis=0)
        slots = np.maximum(likeliest(survival.T, free_slots), sure)
        total, most, in_graph = int(slots.sum()), self._max_slots, self._captured - size
        if 0 <= in_graph < total <= in_graph + OVER * self._captured:
            most = min(most, in_graph)
        if total > most:
            survival *= place < slots.astype(np.uint16)
            slots = likeliest(survival.T, most)
        if self.learns:
            promise = promised(survival, slots)
            if self._requests.plain_graphs_alone and promise.sum() < WORTH * size:
                slots, promise = slots * 0, promise * 0
            credit -= promise * (made != NEVER)
            self._requests.table["credit"][rows] = np.minimum(np.maximum(credit, 0), self._most)
        granted: list[int] = slots.tolist()
        return granted

    def _threshold(self, drafts: Levels, size: int) -> int:
        """The level from which drafts are sure in a step of `size` requests: 255 is in any, 0 is no draft."""
        free, low, high = self._free_tokens, 1, 255
        while low < high:
            level = (low + high) // 2
            over = (size + np.count_nonzero(drafts >= level) - free) / (3 * max(free, 1))
            sure_from = 255 * self._sure * (1 + min(max(over, 0), 1)) / 2
            low, high = (low, level) if level >= sure_from else (level + 1, high)
        return low

    def settle(self, rows: Ints, slots: Ints, sampled: Ints) -> None:
        """Pay for accepted drafts. [B] each: the rows of a step's requests, their slots, the tokens sampled."""
        column = self._requests.table["credit"]
        accepted = np.minimum(np.maximum(sampled - 1, 0), slots)
        column[rows] = np.minimum(column[rows] + np.float32(EARNED) * accepted, self._most)

    def _keep_to(self, credit: Floats, survival: npt.NDArray[np.uint8]) -> Ints:
        """[B] how many drafts credits cover; where a credit is below a new request's, the others go, in place."""
        most = np.full(len(credit), len(self._place))
        short = np.flatnonzero(credit < len(self._place))
        if short.size:
            few = credit[short]
            most[short] = covered(survival[:, short], few) * (few >= 1)
            poor = short[few < START]
            survival[:, poor] *= self._place < most[poor].astype(np.uint16)
        return most

    def _remaining(self, requests: Sequence[Any], rows: Ints) -> npt.NDArray[np.uint16]:
        """How many drafts of each request can become output. With each report come at most K + 1 tokens: the table
        says for how long these are all. (Only of a request that is resumable `max_tokens` may fall.)"""
        K = len(self._place)
        most = np.array([request.sampling_params.max_tokens for request in requests])
        remaining = most - [len(request.output_token_ids) for request in requests] - 1
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

"""Draft slots only where there is something to verify: the policy. Imports no vLLM."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..budget.compiled import Bytes2, Floats1, Floats2, Ints1, Ints2, Ints3, Loop
from ..budget.rule import ONE, choose
from ..budget.step_times import StepTimes
from ..config.settings import MAX_SLOWDOWN
from ..wire import request as wire
from ..wire.reports import DRAFT_MODEL, REFUSALS, DraftReport, StepTime

#: Credit of a request, in tokens of a step without drafts: what its drafts may cost until they earn it back. Of a
#: new request, where this server accepts half of its drafts or more, and the most.
START, MOST = 5.0, 32.0
#: A new request of a server that accepts fewer begins with `START` times the square of twice the share, which
#: counts as this at least. It is the share of so many of the latest drafts, or of all in about the last 160 steps
#: where these are more.
LEAST_SHARE, LATEST = 0.3, 200.0
#: What is paid for a draft that seems to be free, as a share of the dearest: where all steps have one size,
#: nothing says what others take.
LEAST_PAID = 1 / 4
#: What each step gives back, over the square root of its requests; and what an accepted draft earns.
REFILL, EARNED = 0.01, 2.0
#: Classes of survivals that `Calibration` learns about; what share it believes, as if it had seen so many
#: drafts of each; what older ones count after 16 steps, so that it believes again in what it does not try; and of
#: about how many requests a step it learns.
CLASSES, BELIEF, PRIOR, KEPT, ENOUGH = 32, 0.9, 30.0, 0.9, 64
#: Levels that are guessed for drafts which no report is about: after the drafts of an older report, which may have
#: grown since, that of the first one, and how much less each of the next is; and all before the first report.
GROWN, LESS, UNKNOWN = 26, 2, 102
#: A prompt may take so many times the steps that it takes without drafts, and a step that holds some of one so
#: many times its time.
PROMPTS = 1.25
#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
#: Most steps of a request that the front end is told together.
TOGETHER = 8
#: What is remembered of each.
POSITION, LENGTH, SOURCE, REPORT = range(4)
#: Columns of the table of requests, see `DraftedRequests`; the first three as of a draft.
MADE, _, _, REFUSED, REMAINING, FAR_UNTIL, OURS, TOKENS, EVERY, HELD, UNTOLD, PLACE, SLOTS = range(13)
#: `MADE` before the first report, and reports that never come.
NEVER, FOREVER = -(1 << 62), 1 << 62


class DraftedRequests:
    """One row of `table` for each request that is drafted for; row 0 stands for all others, none of whose drafts
    can become output. False where there are none: then nothing has to be done in a step.

    draft_without_prediction: whether requests without a prediction have one. num_draft_tokens: K.
    beside_model: whether the model's own drafter drafts for all others, which then have rows, too.

        MADE       number of the report that the newest draft comes with if it is not late; NEVER: none yet
        LENGTH     of the newest draft
        SOURCE     of the newest draft
        REFUSED    index of REFUSALS; 0 when the front end knows of it
        REMAINING  drafts that could still become output when these were counted; more than K: perhaps fewer by now
        FAR_UNTIL  until this many reports K of them can, whatever the request samples
        OURS       whether it is ours, and not the model's own drafter's
        TOKENS     that it had after the last step of which outputs came; −1: not known
        EVERY      so many steps are told to the front end together
        HELD       steps that are not told yet
        UNTOLD     tokens of their outputs
        PLACE      in the last step that it was in
        SLOTS      that `VerificationLedger.begin` reads, else 0

    credit: [rows] rejections that its drafts may still cost.
    survival: [rows, K] of the newest draft; all `UNKNOWN` before the first report.
    drafts: [DEPTH, rows, 4] of report n at n modulo `DEPTH`; position −1: none.
    start: the credit of a new request. off: whether the worker drafts nothing.
    plain_graphs_alone: as of `DraftReport`.
    `reports` counts reports: a draft is as new as can be where `MADE` is so much.
    """

    def __init__(
        self, draft_without_prediction: bool, num_draft_tokens: int = 0, beside_model: bool = False
    ) -> None:
        self._draft_without_prediction, self.beside_model = draft_without_prediction, beside_model
        self.table = np.zeros((64, SLOTS + 1), dtype=np.int64)
        self.credit = np.zeros(64)
        self.survival = np.zeros((64, num_draft_tokens), dtype=np.uint8)
        self.drafts = np.zeros((DEPTH, 64, 4), dtype=np.int64)
        self.reports, self.taken, self.start = 0, 0, START
        self.off = False
        self.plain_graphs_alone = False
        self._rows: dict[str, int] = {}
        #: The last lists that were looked up, and their rows. Most steps have the requests of the last one.
        self._known: deque[tuple[list[Any], Ints1]] = deque(maxlen=4)
        #: Requests of vLLM's when it was last asked which are gone, and −1 when one has come since.
        self._alive = -1
        self._free = list(range(1, len(self.table)))
        self._blank(np.array(self._free))
        self.table[0, FAR_UNTIL] = FOREVER

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, requests: Sequence[Any]) -> Ints1:
        """[N] the rows of requests, or of their ids, 0 for those that have none; read-only."""
        for known, rows in self._known:
            if known == requests:
                return rows
        ids = [each if isinstance(each, str) else each.request_id for each in requests]
        rows = np.fromiter(map(self._rows.get, ids, repeat(0)), np.int64, len(ids))
        self._known.append((list(requests), rows))
        return rows

    def take(self, report: DraftReport) -> None:
        """Take in what came with a step's output, once a step, be it nothing."""
        self.reports += 1
        self.plain_graphs_alone |= report.plain_graphs_alone
        for drafts in report.drafts:
            rows, self.taken = self.rows_of(drafts.req_ids), self.taken + 1
            made = np.array([drafts.position, drafts.length, drafts.source], dtype=np.int64)
            if made.shape[1] != len(rows) or drafts.survival.shape != (len(rows), self.survival.shape[1]):
                found = f"{made.shape[1]} with survivals {list(drafts.survival.shape)}"
                raise ValueError(
                    f"draft report: expected {len(rows)} drafts of {self.survival.shape[1]}, found {found}"
                )
            numbers = self.taken, self.reports - drafts.age
            _take(rows, made, drafts.survival, *numbers, self.table, self.survival, self.drafts)
        for req_id, reason in report.refused.items():
            self.table[self._rows.get(req_id, 0), REFUSED] = REFUSALS.index(reason)

    def keep_only(self, alive: Mapping[str, Any]) -> list[int]:
        """Forget requests that are not in `alive`; the rows they had."""
        if len(alive) == self._alive:
            return []
        self._alive = len(alive)
        rows = list(map(self._rows.pop, self._rows.keys() - alive.keys()))
        if rows:
            self._known.clear()
            self._blank(np.array(rows))
            self._free += rows
        return rows

    def add(self, request: Any) -> None:
        """A request of vLLM's has come, or its next turn: it gets a row if it is drafted for and has none."""
        self._alive = -1
        given = (getattr(request.sampling_params, "extra_args", None) or {}).get(wire.KEY)
        is_ours = (
            self._draft_without_prediction if given is None else getattr(given, "drafts", None) is not False
        )
        if request.request_id in self._rows or not (is_ours or self.beside_model):
            return
        if not self._free:
            size = len(self.table)
            for name in ("table", "credit", "survival", "drafts"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=int(name == "drafts")))
            self._free = list(range(size, 2 * size))
            self._blank(np.arange(size, 2 * size))
        self._known.clear()
        row = self._rows[request.request_id] = self._free.pop()
        self.credit[row] = self.start
        # Where a stop string ends an output, the front end alone knows that it was the last. And not all requests
        # that come together tell in the same step.
        is_cut = getattr(request.sampling_params, "stop", None)
        self.table[row, [OURS, EVERY]] = is_ours, 1 if is_cut else TOGETHER - row % 4

    def is_theirs(self, req_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """[N] whether the model's own drafter makes a request's next draft: it is not ours, or ours made none."""
        known = self.table[self.rows_of(req_ids)]
        return np.asarray((known[:, OURS] == 0) | (known[:, SOURCE] == DRAFT_MODEL))

    def _blank(self, rows: Ints1) -> None:
        self.table[rows] = 0
        self.table[rows[:, None], (MADE, REMAINING, FAR_UNTIL, TOKENS)] = NEVER, FOREVER, -1, -1
        self.survival[rows], self.drafts[:, rows, POSITION] = UNKNOWN, -1


@Loop
def _take(
    rows: Ints1,
    made: Ints2,
    levels: Bytes2,
    number: int,
    newest: int,
    table: Ints2,
    survival: Bytes2,
    drafts: Ints3,
) -> None:
    """Remember the drafts of a report. made: [3, B] as of a draft. newest: `MADE` of them."""
    for i in range(len(rows)):
        row, draft = rows[i], drafts[number % DEPTH, rows[i]]
        for field in range(REPORT):
            draft[field] = table[row, field] = made[field, i]
        draft[REPORT], table[row, MADE] = number, newest
        for k in range(survival.shape[1]):
            survival[row, k] = levels[i, k]


class Granted(NamedTuple):
    """A step's grants: [B] rows and slots, [B, K] levels as they were reported, or guessed."""

    rows: Ints1
    slots: Ints1
    survival: Bytes2


class Calibration:
    """`levels`: [256] the survival of a draft that is reported with so much, learned from what this server
    accepted. In asynchronous scheduling the report is a step old, and about another draft."""

    def __init__(self) -> None:
        self._at = (np.arange(CLASSES) + 0.5) * 256 / CLASSES
        #: [2, CLASSES] drafts that were verified, and accepted.
        self._counts = np.zeros((2, CLASSES))
        #: [2] the same of the latest drafts, whatever their class.
        self._latest = np.full(2, PRIOR)
        self._steps = 0
        self._look_up()

    def _look_up(self) -> None:
        tried, accepted = self._counts
        share = (accepted + PRIOR * BELIEF * self._at / 256) / (tried + PRIOR)
        rising, falling = np.maximum.accumulate(share), np.minimum.accumulate(share[::-1])[::-1]
        levels = np.rint(np.interp(np.arange(256), self._at, 255 * (rising + falling) / 2))
        self.levels = np.maximum(levels, 1).astype(np.uint8)
        self.levels[0] = 0

    @property
    def kept(self) -> float:
        """The share of the latest drafts that were accepted, 1 where there are none."""
        return float(self._latest[1] / self._latest[0])

    def learn(self, granted: Granted, done: Ints2, table: Ints2) -> None:
        """From a step, as of `DraftBudget.settle`; writes `PLACE`. Of a large batch some requests do."""
        self._steps += 1
        _learn(*granted, self._steps, done, table, self._counts, self._latest)
        if self._steps % 16 == 0:
            self._counts *= KEPT
            self._latest *= max(KEPT, min(LATEST / self._latest[0], 1.0))
            self._look_up()


@Loop
def _learn(
    rows: Ints1,
    slots: Ints1,
    survival: Bytes2,
    step: int,
    done: Ints2,
    table: Ints2,
    counts: Floats2,
    latest: Floats1,
) -> None:
    for place in range(done.shape[1]):
        table[done[0, place], PLACE] = place
        latest[0] += done[2, place]
        latest[1] += min(max(done[3, place] - 1, 0), done[2, place])
    every = max(len(rows) // ENOUGH, 1)
    for i in range(step % every, len(rows), every):
        place = table[rows[i], PLACE]
        if place < done.shape[1] and done[0, place] == rows[i]:
            for k in range(min(slots[i], done[2, place])):
                level = survival[i, k] // (256 // CLASSES)
                counts[0, level] += 1
                counts[1, level] += k < done[3, place] - 1


def room_for_drafts(free: int, prompts: Sequence[int]) -> int:
    """How many of the `free` tokens of a step drafts may take, where prompts that wait need so many, in their
    order: each then takes at most `PROMPTS` times the steps until its first token."""
    left, need = free, 0
    for prompt in prompts:
        need += prompt
        steps = -(-need // max(free, 1))
        left = min(left, free - -(-need // int(PROMPTS * steps)))
    return max(left, 0)


class DraftBudget:
    """How many draft slots each request gets in its next step.

    captured: tokens of the largest CUDA graph, or 0. max_slowdown: how much longer a step with drafts may take for
    requests that have none. learns: whether what was accepted corrects what a request gets; then call `settle`.

    A request has a row of K survivals::

        without a prediction                  none
        before its first report               all `UNKNOWN`
        its last report is about this step    those of its drafts
        its last report is older              those of its drafts then, and `GROWN` after them

    each corrected by what such drafts became on this server (`Calibration`), cut where drafts can no longer
    become output under `max_tokens`, and to those that its credit covers. `budget.rule.choose` takes the best.
    They cost credit by the time that the step takes longer, in equal shares; accepted ones earn some back. Credit
    covers as many as it does where each is as dear as can be: the first ones of a step are often nearly free.
    """

    def __init__(
        self,
        drafted_requests: DraftedRequests,
        num_draft_tokens: int,
        *,
        captured: int = 0,
        max_slowdown: float = MAX_SLOWDOWN,
        learns: bool = True,
    ) -> None:
        self.learns = learns
        self.times, self.calibration = StepTimes(captured), Calibration()
        #: What the last `grant` gave.
        self.granted: Granted | None = None
        self._requests, self._max_slowdown = drafted_requests, max_slowdown
        #: What a draft costs at most, in tokens of a step without drafts; 0: not known yet.
        self._dearest = 0.0
        self._num_draft_tokens = num_draft_tokens

    def observe(self, times: Sequence[StepTime]) -> None:
        """Steps that have run took so long."""
        for step in times:
            self.times.observe(step.tokens, step.ms, step.in_graph)

    def grant(
        self,
        requests: Sequence[Any],
        *,
        exact: bool,
        batch_size: int | None = None,
        prefill: int = 0,
        room: int | None = None,
    ) -> list[int]:
        """Slots of every request. exact: the step to come verifies what the last one drafted. batch_size: requests
        of that step, where they are more than these. prefill: tokens of prompts in it. room: for drafts, or
        None."""
        self.granted = None
        if not requests:
            return []
        known, K = self._requests, self._num_draft_tokens
        rows = known.rows_of(requests)
        self._count_remaining(requests, rows)
        survival, size = known.survival.take(rows, axis=0), batch_size or len(requests)
        refill, dearest = REFILL / math.sqrt(size) * self.learns, self._dearest * self.learns
        all_drafted = _correct(
            rows, exact, known.reports, refill, dearest, known.table, known.credit, survival
        )
        # A request without drafts waits for those of others.
        others = size > len(requests) or not all_drafted
        ratio = self._max_slowdown if others else math.inf
        found = choose(
            survival,
            size,
            prefill,
            size * K if room is None else room,
            self.times,
            min(ratio, PROMPTS) if prefill else ratio,
            in_graph=not known.plain_graphs_alone,
            stands_for=self.calibration.levels,
        )
        if self.learns:
            plain = self.times.ms(size, size) if prefill else found.without
            self._dearest = max(found.dearest / plain * size, 1e-6)
            cost = (found.ms - found.without) / max(found.total, 1) / plain * size
            _pay(rows, found.slots, max(cost, LEAST_PAID * self._dearest), known.credit)
        self.granted = Granted(rows, found.slots, survival)
        granted: list[int] = found.slots.tolist()
        return granted

    def settle(self, done: Ints2, granted: Granted | None = None) -> None:
        """Pay for accepted drafts. done: [4, B] of a step's requests, see `VerificationLedger.begin`."""
        _earn(done, self._requests.credit)
        if granted is not None:
            self.calibration.learn(granted, done, self._requests.table)
            self._requests.start = START * min(max(2 * self.calibration.kept, LEAST_SHARE), 1.0) ** 2

    def _count_remaining(self, requests: Sequence[Any], rows: Ints1) -> None:
        """How many drafts can become output, of requests that are near their end. With each report come at most
        K + 1 tokens. (Only of a request that is resumable `max_tokens` may fall.)"""
        K, table, reports = self._num_draft_tokens, self._requests.table, self._requests.reports
        near = _near_end(rows, reports, table)
        for i in np.flatnonzero(table[rows, FAR_UNTIL] < reports).tolist() if near else ():
            request = requests[i]
            remaining = request.sampling_params.max_tokens - len(request.output_token_ids) - 1
            until = -1 if getattr(request, "resumable", False) else reports + (remaining - K) // (K + 1)
            table[rows[i], [REMAINING, FAR_UNTIL]] = remaining, until


@Loop
def _pay(rows: Ints1, slots: Ints1, cost: float, credit: Floats1) -> None:
    for i in range(len(rows)):
        credit[rows[i]] = min(max(credit[rows[i]] - cost * slots[i], 0.0), MOST)


@Loop
def _earn(done: Ints2, credit: Floats1) -> None:
    for i in range(done.shape[1]):
        accepted = min(max(done[3, i] - 1, 0), done[2, i])
        credit[done[0, i]] = min(max(credit[done[0, i]] + EARNED * accepted, 0.0), MOST)


@Loop
def _near_end(rows: Ints1, reports: int, table: Ints2) -> int:
    """How many are perhaps near their ends by now."""
    near = 0
    for i in range(len(rows)):
        near += table[rows[i], FAR_UNTIL] < reports
    return near


@Loop
def _correct(
    rows: Ints1,
    exact: bool,
    reports: int,
    refill: float,
    dearest: float,
    table: Ints2,
    credit: Floats1,
    survival: Bytes2,
) -> bool:
    """Guess [B, K] `survival` beyond older reports, refill the credit, and end both where drafts cannot become
    output and where no credit covers them. Returns whether each request has a draft."""
    K, all_drafted = survival.shape[1], True
    for i in range(len(rows)):
        row = rows[i]
        if table[row, MADE] != NEVER and not (exact and table[row, MADE] == reports):
            length = table[row, LENGTH]
            last = int(survival[i, length - 1]) if length > 0 else ONE
            for k in range(length, K):
                survival[i, k] = max(survival[i, k], min(max(GROWN - LESS * (k - length), 0), last))
        credit[row] += refill
        most = min(max(table[row, REMAINING], 0), K)
        if dearest > 0:
            most = min(most, int(min(credit[row] / dearest, float(K))))
        survival[i, most:] = 0
        all_drafted = all_drafted and K > 0 and survival[i, 0] > 0
    return all_drafted

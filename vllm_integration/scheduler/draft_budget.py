"""Draft slots only where there is something to verify: the policy. Imports no vLLM."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..budget.rule import Levels, choose
from ..budget.step_times import StepTimes
from ..config.settings import MAX_SLOWDOWN
from ..wire import request as wire
from ..wire.reports import DRAFT_MODEL, REFUSALS, DraftReport, Ints, StepTime

#: Credit of a request, in tokens of a step without drafts: what its drafts may cost until they earn it back. Of a
#: new request, where this server accepts half of its drafts or more, and the most.
START, MOST = 5.0, 32.0
#: What each step gives back, over the square root of its requests; and what an accepted draft earns.
REFILL, EARNED = 0.01, 2.0
#: Classes of survivals that `Calibration` learns about; what share it believes, as if it had seen so many
#: drafts of each; what older ones count after 16 steps, so that it believes again in what it does not try; and of
#: about how many requests a step it learns.
CLASSES, BELIEF, PRIOR, KEPT, ENOUGH = 32, 0.9, 30.0, 0.9, 64
#: Levels that are guessed for drafts which no report is about: those after the drafts of an older report, which
#: may have grown since, and all of a request before its first report.
GROWN, UNKNOWN = np.array([*range(26, 0, -2), 0], dtype=np.uint8), 102
#: A prompt may take so many times the steps that it takes without drafts, and a step that holds some of one so
#: many times its time.
PROMPTS = 1.25
#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
#: Most steps of a request that the front end is told together.
TOGETHER = 8
#: What is remembered of each.
POSITION, LENGTH, SOURCE, REPORT = range(4)
#: `made` of such a request.
NEVER = np.iinfo(np.int64).min


class DraftedRequests:
    """One row of `table` for each request that is drafted for; row 0 stands for all others, and stays blank.
    False where there are none: then nothing has to be done in a step.

    draft_without_prediction: whether requests without a prediction have one. num_draft_tokens: K.
    beside_model: whether the model's own drafter drafts for all others, which then have rows, too.

        made       number of the report that the newest draft comes with if it is not late; NEVER: none yet
        length     of the newest draft
        source     of the newest draft
        far_until  until this many reports a whole draft can become output, whatever the request samples
        credit     rejections that its drafts may still cost
        refused    index of REFUSALS; 0 when the front end knows of it
        ours       whether it is ours, and not the model's own drafter's
        tokens     that it had after the last step of which outputs came; −1: not known
        every      so many steps are told to the front end together
        held       steps that are not told yet, and tokens of their outputs
        untold

    survival: [rows, K] of the newest draft; all `UNKNOWN` before the first report.
    drafts: [rows, DEPTH, 4] of the last reports, in no order; position −1: none.
    start: the credit of a new request. off: whether the worker drafts nothing.
    plain_graphs_alone: as of `DraftReport`.
    `reports` counts reports: a draft is as new as can be where `made == reports`.
    """

    def __init__(
        self, draft_without_prediction: bool, num_draft_tokens: int = 0, beside_model: bool = False
    ) -> None:
        self._draft_without_prediction, self.beside_model = draft_without_prediction, beside_model
        numbers = [("made", np.int64), ("far_until", np.int64), ("credit", np.float32), ("length", np.int32)]
        numbers += [(name, np.int32) for name in ("tokens", "held", "untold")]
        numbers += [(name, np.int8) for name in ("source", "refused", "ours", "every")]
        self.table = np.zeros(64, dtype=numbers)
        self.survival = np.zeros((64, num_draft_tokens), dtype=np.uint8)
        self.drafts = np.zeros((64, DEPTH, 4), dtype=np.int32)
        self.reports, self._taken, self.start = 0, 0, START
        self.off = False
        self.plain_graphs_alone = False
        self._rows: dict[str, int] = {}
        #: The last lists that were looked up, and their rows. Most steps have the requests of the last one.
        self._known: deque[tuple[list[str], Ints]] = deque(maxlen=3)
        self._free = list(range(1, len(self.table)))
        self._blank(np.arange(len(self.table)))

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, req_ids: Sequence[str]) -> Ints:
        """[N] the rows of requests, 0 for those that have none; read-only."""
        req_ids = list(req_ids)
        for known, rows in self._known:
            if known == req_ids:
                return rows
        rows = np.fromiter(map(self._rows.get, req_ids, repeat(0)), np.int64, len(req_ids))
        rows.flags.writeable = False
        self._known.append((req_ids, rows))
        return rows

    def take(self, report: DraftReport, req_ids: Sequence[str] = (), rows: Ints | None = None) -> None:
        """Take in what came with a step's output, once a step, be it nothing. req_ids, rows: of the step, if
        the caller has looked them up: the drafts of that very step come with the same list."""
        self.reports += 1
        self.plain_graphs_alone |= report.plain_graphs_alone
        table = self.table
        for drafts in report.drafts:
            at = rows if rows is not None and drafts.req_ids is req_ids else self.rows_of(drafts.req_ids)
            self._taken += 1
            made = np.full((4, len(at)), self._taken)
            made[:3] = drafts.position, drafts.length, drafts.source
            self.drafts[at, self._taken % DEPTH] = made.T
            self.survival[at] = drafts.survival
            table["made"][at], table["length"][at] = self.reports - drafts.age, drafts.length
            table["source"][at] = drafts.source
        for req_id, reason in report.refused.items():
            table["refused"][self._rows.get(req_id, 0)] = REFUSALS.index(reason)
        self.survival[0], table["made"][0] = 0, NEVER

    def keep_only(self, alive: Mapping[str, Any]) -> list[int]:
        """Forget requests that are not in `alive`; the rows they had."""
        gone = [] if self._rows.keys() <= alive.keys() else self._rows.keys() - alive.keys()
        rows = list(map(self._rows.pop, gone))
        if rows:
            self._known.clear()
            self._blank(np.array(rows))
            self._free += rows
        return rows

    def add(self, request: Any) -> None:
        """A request of vLLM's has come, or its next turn: it gets a row if it is drafted for and has none."""
        given = (getattr(request.sampling_params, "extra_args", None) or {}).get(wire.KEY)
        is_ours = (
            self._draft_without_prediction if given is None else getattr(given, "drafts", None) is not False
        )
        if request.request_id in self._rows or not (is_ours or self.beside_model):
            return
        if not self._free:
            size = len(self.table)
            for name in ("table", "survival", "drafts"):
                setattr(self, name, np.concatenate([(old := getattr(self, name)), np.zeros_like(old)]))
            self._free = list(range(size, 2 * size))
            self._blank(np.arange(size, 2 * size))
        self._known.clear()
        row = self._rows[request.request_id] = self._free.pop()
        self.table["ours"][row], self.table["credit"][row] = is_ours, self.start
        # Where a stop string ends an output, the front end alone knows that it was the last. And not all requests
        # that come together tell in the same step.
        is_cut = getattr(request.sampling_params, "stop", None)
        self.table["every"][row] = 1 if is_cut else TOGETHER - row % 4

    def is_theirs(self, req_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """[N] whether the model's own drafter makes a request's next draft: it is not ours, or ours made none."""
        known = self.table.take(self.rows_of(req_ids))
        return np.asarray((known["ours"] == 0) | (known["source"] == DRAFT_MODEL))

    def _blank(self, rows: Ints) -> None:
        table = self.table
        table[rows] = np.zeros(1, dtype=table.dtype)
        table["made"][rows] = NEVER
        table["tokens"][rows] = np.where(rows > 0, -1, 0)
        table["far_until"][rows] = np.where(rows > 0, -1, np.iinfo(np.int64).max)
        self.survival[rows] = np.where(rows > 0, UNKNOWN, 0)[:, None]
        self.drafts[rows, :, POSITION] = -1


class Granted(NamedTuple):
    """A step's grants: [B] rows and slots, [B, K] levels as they were reported, or guessed."""

    rows: Ints
    slots: Ints
    survival: Levels


class Calibration:
    """`levels`: [256] the survival of a draft that is reported with so much, learned from what this server
    accepted. In asynchronous scheduling the report is a step old, and about another draft."""

    def __init__(self) -> None:
        self._at = (np.arange(CLASSES) + 0.5) * 256 / CLASSES
        self._tried, self._accepted = np.zeros((2, CLASSES))
        self._steps = 0
        self._look_up()

    def _look_up(self) -> None:
        share = (self._accepted + PRIOR * BELIEF * self._at / 256) / (self._tried + PRIOR)
        rising, falling = np.maximum.accumulate(share), np.minimum.accumulate(share[::-1])[::-1]
        levels = np.rint(np.interp(np.arange(256), self._at, 255 * (rising + falling) / 2))
        self.levels = np.maximum(levels, 1).astype(np.uint8)
        self.levels[0] = 0

    @property
    def kept(self) -> float:
        """The share of the latest drafts that were accepted, 1 where there are none."""
        return float((self._accepted.sum() + PRIOR) / (self._tried.sum() + PRIOR))

    def learn(self, survival: Levels, tried: Ints, accepted: Ints) -> None:
        """survival: [B, K] levels. tried, accepted: [B] drafts, the first of each. Of a large batch some do."""
        self._steps += 1
        every = max(len(survival) // ENOUGH, 1)
        some = slice(self._steps % every, None, every)
        classes, place = survival[some] // (256 // CLASSES), np.arange(survival.shape[1], dtype=np.uint16)
        for found, until in ((self._tried, tried[some]), (self._accepted, accepted[some])):
            found += np.bincount(classes[place < until[:, None].astype(np.uint16)], minlength=CLASSES)
        if self._steps % 16 == 0:
            self._tried *= KEPT
            self._accepted *= KEPT
            self._look_up()


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
    They cost credit by the time that the step takes longer, in equal shares; accepted ones earn some back.
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
        #: What a draft of the last step cost, in tokens of a step without drafts.
        self._cost = 0.0
        K = num_draft_tokens
        # Of few bytes, as what it is compared with: NumPy then compares several times as fast.
        self._places = np.arange(K, dtype=np.uint16)
        grown = np.pad(GROWN, K)
        #: [K + 1, K] the levels that are guessed after so many drafts of an older report.
        self._grown = np.lib.stride_tricks.sliding_window_view(grown, K)[K::-1].copy()

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
        rows = self._requests.rows_of([request.request_id for request in requests])
        survival = levels = self._survival_of(requests, rows, exact)
        size, credit = batch_size or len(requests), self._requests.table["credit"].take(rows)
        K = len(self._places)
        if self.learns:
            credit += np.float32(REFILL / math.sqrt(size))
            if credit.min() < K * self._cost:
                poor = np.flatnonzero(credit < K * self._cost)
                few = np.minimum(np.maximum(credit[poor] / self._cost, 0), K).astype(np.uint16)
                levels = survival.copy()
                levels[poor] *= self._places < few[:, None]
        # A request without drafts waits for those of others.
        others = size > len(requests) or not levels[:, 0].all()
        ratio = self._max_slowdown if others else math.inf
        found = choose(
            levels,
            size,
            prefill,
            size * K if room is None else room,
            self.times,
            min(ratio, PROMPTS) if prefill else ratio,
            in_graph=not self._requests.plain_graphs_alone,
            stands_for=self.calibration.levels,
        )
        if self.learns:
            if total := int(found.slots.sum()):
                plain = self.times.ms_of_one(size, size) if prefill else found.without
                self._cost = max((found.ms - found.without) / total / plain * size, 1e-6)
                credit -= found.slots * np.float32(self._cost)
            self._requests.table["credit"][rows] = np.minimum(np.maximum(credit, 0), MOST)
        self.granted = Granted(rows, found.slots, survival)
        granted: list[int] = found.slots.tolist()
        return granted

    def _survival_of(self, requests: Sequence[Any], rows: Ints, exact: bool) -> Levels:
        """[B, K] levels."""
        reports, table = self._requests.reports, self._requests.table
        survival: Levels = self._requests.survival.take(rows, axis=0)
        made = table["made"].take(rows)
        old = made != NEVER
        if exact:
            old &= made != reports
        if old.any():
            length = np.where(old, table["length"].take(rows), len(self._places))
            last = survival[np.arange(len(rows)), length - 1]
            last[length == 0] = 255
            survival = np.maximum(survival, np.minimum(self._grown.take(length, axis=0), last[:, None]))
        if (far_until := table["far_until"].take(rows)).min() < reports:
            near = np.flatnonzero(far_until < reports)
            remaining = self._remaining([requests[i] for i in near.tolist()], rows[near])
            survival[near] *= self._places < remaining[:, None]
        return survival

    def settle(self, rows: Ints, slots: Ints, sampled: Ints, granted: Granted | None = None) -> None:
        """Pay for accepted drafts. [B] each: the rows of a step's requests, their slots, the tokens sampled."""
        column = self._requests.table["credit"]
        accepted = np.minimum(np.maximum(sampled - 1, 0), slots)
        column[rows] = np.minimum(column[rows] + np.float32(EARNED) * accepted, MOST)
        if granted is not None:
            found = np.zeros((2, len(self._requests.table)), dtype=np.int64)
            found[:, rows] = slots, accepted
            tried, accepted = np.minimum(found[:, granted.rows], granted.slots)
            self.calibration.learn(granted.survival, tried, accepted)
            self._requests.start = START * min(2 * self.calibration.kept, 1.0)

    def _remaining(self, requests: Sequence[Any], rows: Ints) -> npt.NDArray[np.uint16]:
        """How many drafts of each request can become output. With each report come at most K + 1 tokens: the table
        says for how long these are all. (Only of a request that is resumable `max_tokens` may fall.)"""
        K = len(self._places)
        most = np.array([request.sampling_params.max_tokens for request in requests])
        remaining = most - [len(request.output_token_ids) for request in requests] - 1
        resumable = np.array([getattr(request, "resumable", False) for request in requests])
        far_until = self._requests.reports + (remaining - K) // (K + 1)
        self._requests.table["far_until"][rows] = np.where(resumable, -1, far_until)
        return np.clip(remaining, 0, K)

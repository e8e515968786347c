"""Draft slots only where there is something to verify: the policy. Imports no vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..budget.rule import choose
from ..budget.step_times import StepTimes
from ..config.settings import MAX_SLOWDOWN
from ..wire import request as wire
from ..wire.reports import DRAFT_MODEL, REFUSALS, DraftReport, StepTime

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.integer[Any]]

#: Credit of a request, in tokens of a step without drafts: what its drafts may cost until they earn it back. Of a
#: new request, and the most.
START, MOST = 8.0, 32.0
#: What each step gives back, over the square root of its requests; and what an accepted draft earns.
REFILL, EARNED = 0.015, 2.0
#: Classes of survivals that `Calibration` learns about; what share it believes, as if it had seen so many
#: drafts of each; what older ones count after 16 steps, so that it believes again in what it does not try.
CLASSES, BELIEF, PRIOR, KEPT = 32, 0.9, 30.0, 0.9
#: Levels that are guessed for drafts which no report is about: those after the drafts of an older report, which
#: may have grown since, and all of a request before its first report.
GROWN, UNKNOWN = np.array([*range(26, 0, -2), 0], dtype=np.uint8), 102
#: A prompt may take so many times the steps that it takes without drafts, and a step that holds some of one so
#: many times its time.
PROMPTS = 1.25


#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
#: What is remembered of each.
POSITION, LENGTH, SOURCE = range(3)
#: `made` of such a request.
NEVER = np.iinfo(np.int64).min


class DraftedRequests:
    """One row of `table` for each request that is drafted for; row 0 stands for all others, and stays blank.
    False where there are none: then nothing has to be done in a step.

    draft_without_prediction: whether requests without a prediction have one. num_draft_tokens: K.
    beside_model: whether the model's own drafter drafts for all others, which then have rows, too.

        drafts     [DEPTH, 3] POSITION, LENGTH, SOURCE of the last, newest first; position −1: none
        made       number of the report that the newest draft comes with if it is not late; NEVER: none yet
        survival   [K] of the newest draft; all `UNKNOWN` before the first report
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
        self.table["survival"][rows] = np.where(rows > 0, UNKNOWN, 0)[:, None]


def is_drafted_for(request: Any, even_without: bool) -> bool:
    """Whether a vLLM request is: it brought a prediction, or `even_without`, and did not ask for no drafts."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    given = extra_args.get(wire.KEY)
    return even_without if given is None else getattr(given, "drafts", None) is not False


class Granted(NamedTuple):
    """A step's grants: [B] rows and slots, [K, B] levels as they were reported, or guessed."""

    rows: Ints
    slots: Ints
    survival: Levels


class Calibration:
    """[256] the survival of a draft that is reported with so much, learned from what this server accepted. In
    asynchronous scheduling the report is a step old, and about another draft."""

    def __init__(self) -> None:
        self._at = (np.arange(CLASSES) + 0.5) * 256 / CLASSES
        self._tried, self._accepted = np.zeros((2, CLASSES))
        self._steps = 0
        self._look_up()

    def _look_up(self) -> None:
        share = (self._accepted + PRIOR * BELIEF * self._at / 256) / (self._tried + PRIOR)
        rising, falling = np.maximum.accumulate(share), np.minimum.accumulate(share[::-1])[::-1]
        levels = np.interp(np.arange(256), self._at, 255 * (rising + falling) / 2)
        self.levels = np.clip(np.rint(levels), 1, 255).astype(np.uint8)
        self.levels[0] = 0

    def learn(self, survival: Levels, tried: Ints, accepted: Ints) -> None:
        """survival: [K, B] levels. tried, accepted: [B] drafts, the first of each."""
        depth = np.arange(len(survival), dtype=np.uint16)[:, None]
        for found, until in ((self._tried, tried), (self._accepted, accepted)):
            classes = survival[depth < until.astype(np.uint16)] // (256 // CLASSES)
            found += np.bincount(classes, minlength=CLASSES)
        self._steps += 1
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
        # Of few bytes, as what it is compared with: NumPy then compares several times as fast.
        self._place = np.arange(num_draft_tokens, dtype=np.uint16)[:, None]

    def observe(self, times: Sequence[StepTime]) -> None:
        """Steps that have run took so long."""
        for step in times:
            self.times.observe(step.requests, step.tokens, step.ms, step.in_graph)

    def grant(
        self,
        requests: Sequence[Any],
        *,
        exact: bool,
        batch_size: int | None = None,
        prefill: int = 0,
        room: int | None = None,
    ) -> list[int]:
        """Slots of every request. exact: what the last step drafted is what the step to come verifies. batch_size:
        requests of that step, where they are more than these. prefill: tokens of prompts in it. room: drafts that
        it has room for, or None."""
        self.granted = None
        if not requests:
            return []
        rows = self._requests.rows_of([request.request_id for request in requests])
        survival = self._survival_of(requests, rows, exact)
        size, credit = batch_size or len(requests), self._requests.table["credit"][rows]
        levels = survival
        if self.learns:
            credit += np.float32(REFILL / math.sqrt(size))
            levels = self.calibration.levels[survival]
            poor = np.flatnonzero(credit < len(levels) * self._cost)
            if poor.size:
                few = np.clip(credit[poor] / self._cost, 0, len(levels)).astype(np.uint16)
                levels[:, poor] *= self._place < few
        # A request without drafts waits for those of others.
        others = size > len(requests) or not levels[:1].all()
        ratio = self._max_slowdown if others else math.inf
        found = choose(
            levels,
            size,
            prefill,
            size * len(levels) if room is None else room,
            self.times,
            min(ratio, PROMPTS) if prefill else ratio,
            in_graph=not self._requests.plain_graphs_alone,
        )
        if self.learns:
            if total := int(found.slots.sum()):
                plain = float(self.times.ms(size, size)) / size
                self._cost = max((found.ms - found.without) / total / plain, 1e-6)
                credit -= found.slots * np.float32(self._cost)
            self._requests.table["credit"][rows] = np.clip(credit, -START, MOST)
        self.granted = Granted(rows, found.slots, survival)
        granted: list[int] = found.slots.tolist()
        return granted

    def _survival_of(self, requests: Sequence[Any], rows: Ints, exact: bool) -> npt.NDArray[np.uint8]:
        """[K, B] levels: along the requests NumPy counts several times as fast as along K."""
        known, place = self._requests.table.take(rows), self._place
        length, made = known["drafts"][:, 0, LENGTH], known["made"]
        survival: npt.NDArray[np.uint8] = known["survival"].T.copy()
        old = np.flatnonzero((made != NEVER) & ((made != self._requests.reports) | (not exact)))
        if old.size:
            after = place - length[old]
            last = np.where(length[old] > 0, known["survival"][old, length[old] - 1], 255)
            grown = np.minimum(GROWN[np.clip(after, 0, len(GROWN) - 1)], last)
            survival[:, old] = np.where(after >= 0, grown, survival[:, old])
        near = np.flatnonzero(known["far_until"] < self._requests.reports)
        if near.size:
            survival[:, near] *= place < self._remaining([requests[i] for i in near.tolist()], rows[near])
        return survival

    def settle(self, rows: Ints, slots: Ints, sampled: Ints, granted: Granted | None = None) -> None:
        """Pay for accepted drafts. [B] each: the rows of a step's requests, their slots, the tokens sampled.
        granted: what that step was granted."""
        column = self._requests.table["credit"]
        accepted = np.minimum(np.maximum(sampled - 1, 0), slots)
        column[rows] = np.minimum(column[rows] + np.float32(EARNED) * accepted, MOST)
        if granted is not None:
            found = np.zeros((2, len(self._requests.table)), dtype=np.int64)
            found[:, rows] = slots, accepted
            tried, accepted = np.minimum(found[:, granted.rows], granted.slots)
            self.calibration.learn(granted.survival, tried, accepted)

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

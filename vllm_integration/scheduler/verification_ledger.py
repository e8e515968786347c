"""The verified drafts of each step: the scheduler knows slots, tokens and output of a step; the worker reports how
many of the slots hold drafts, and who proposed them. Here the two meet. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..budget.compiled import Ints1, Ints2, Ints3, Loop, Shorts1, Shorts3, helper
from ..wire.reports import DRAFT_MODEL
from ..wire.steps import HEADER, count_verified, encode
from . import draft_budget as of
from .draft_budget import DEPTH, TOGETHER, DraftedRequests

helper(count_verified)


class VerificationLedger:
    """Joins the steps of the scheduler with the drafts of the worker, a batch at a time.

        begun = ledger.begin(requests, scheduler_output, output, trimmed)   # before vLLM looks at the output
        drafted_requests.take(report)                                      # what came with the output
        ledger.settle(begun, engine_core_outputs)                          # after vLLM
        ledger.forget(drafted_requests.keep_only(requests))

    The draft of a step is the one that was made at the request's tokens before it; `count_verified` is the rule.
    Drafts are reported in the order in which they were made. So a step that had slots waits for its draft until
    one that was made later is reported; then it never had one.

    The front end is told with a request's last output, and before that with one in up to `TOGETHER`. Where a stop
    string may end an output, the front end alone knows that it was the last: there with each.
    """

    def __init__(self, drafted_requests: DraftedRequests) -> None:
        self._requests = drafted_requests
        #: Row, tokens before the step, draft slots, tokens sampled, tokens kept: first of the steps that wait; the
        #: others, and the last row, are used inside `settle`.
        self._steps: Ints2 = np.zeros((6, 0), dtype=np.int64)
        self._waits = 0
        #: [rows, width, 4] `Steps` that are not told yet, `HELD` of each row, `_most` of a row so far.
        self._held: Shorts3 = np.zeros((0, 0, 4), dtype=np.int16)
        self._most = TOGETHER

    def __len__(self) -> int:
        """Steps that wait for their drafts."""
        return self._waits

    def begin(
        self, requests: Mapping[str, Any], scheduler_output: Any, output: Any, trimmed: Mapping[str, int]
    ) -> Ints2:
        """[4, B] row, tokens before the step (−1: not known), draft slots and tokens sampled of its requests."""
        req_ids, planned = output.req_ids, scheduler_output.scheduled_spec_decode_tokens
        begun = np.empty((4, len(req_ids)), dtype=np.int64)
        begun[3] = _lengths(output.sampled_token_ids) if output.sampled_token_ids else 0
        rows, rows_planned = self._requests.rows_of(req_ids), self._requests.rows_of(list(planned))
        unknown = _begin(rows, rows_planned, _lengths(planned.values()), self._requests.table, begun)
        for req_id, invalid in (scheduler_output.num_invalid_spec_tokens or {}).items():
            begun[2, output.req_id_to_index[req_id]] -= invalid
        if trimmed:
            begun[2] = np.minimum(begun[2], list(map(trimmed.get, req_ids, begun[2].tolist())))
        if unknown:
            for index in np.flatnonzero(begun[1] < 0).tolist():
                # It may have been aborted while its step ran.
                request = requests.get(req_ids[index])
                begun[1, index] = -1 if request is None else request.num_tokens
        return begun

    def settle(self, begun: Ints2, outputs: Sequence[Any]) -> None:
        """Attach to `EngineCoreOutput`s what is now known about their requests."""
        known, waited, size = self._requests, len(self), len(outputs)
        rows, kept = known.rows_of([output.request_id for output in outputs]), np.full(size, -1)
        if (reasons := [output.finish_reason for output in outputs]).count(None) < size:
            for index in (index for index, reason in enumerate(reasons) if reason is not None):
                kept[index] = len(outputs[index].new_token_ids)
        most = self._most + 1 + (int(np.bincount(self._steps[0, :waited]).max()) if waited else 0)
        grow = max(len(known.table) - len(self._held), 0), max(most - self._held.shape[1], 0)
        if any(grow):
            self._held = np.pad(self._held, ((0, grow[0]), (0, grow[1]), (0, 0)))
        if waited + size > self._steps.shape[1]:
            self._steps = np.concatenate([self._steps, np.zeros((6, waited + size), dtype=np.int64)], axis=1)
        numbers, ends = np.empty(size * (4 * most + 2), dtype=np.int16), np.empty((2, size), dtype=np.int64)
        drafts = known.drafts, known.taken, known.table, known.off
        batch = begun, rows, kept, self._steps, waited
        self._waits, told, most = _settle(*batch, *drafts, self._held, numbers, ends)
        self._most = max(self._most, most)
        if told:
            until, places = ends[:, :told].tolist()
            for i, text in zip(places, encode(numbers[: until[-1]], until), strict=True):
                output = outputs[i]
                others = output.trace_headers
                output.trace_headers = {HEADER: text} if others is None else {**others, HEADER: text}

    def forget(self, rows: Sequence[int]) -> None:
        """The requests of these rows are gone."""
        if len(self) and rows:
            left = self._steps[:, : self._waits][:, ~np.isin(self._steps[0, : self._waits], rows)]
            self._waits = left.shape[1]
            self._steps[:, : self._waits] = left


def _lengths(lists: Collection[Sequence[int]]) -> Ints1:
    try:
        return np.frombuffer(bytes(map(len, lists)), dtype=np.uint8).astype(np.int64)
    except ValueError:  # more than 255
        return np.fromiter(map(len, lists), np.int64, len(lists))


@Loop
def _begin(rows: Ints1, rows_planned: Ints1, slots: Ints1, table: Ints2, begun: Ints2) -> bool:
    """Fill in rows, tokens, and slots of those that are planned to have some; whether tokens are not known."""
    unknown = False
    for j in range(len(rows_planned)):
        table[rows_planned[j], of.SLOTS] = slots[j] if rows_planned[j] else 0
    for i in range(len(rows)):
        row = rows[i]
        begun[0, i], begun[1, i], begun[2, i] = row, table[row, of.TOKENS], table[row, of.SLOTS]
        table[row, of.PLACE] = i
        unknown = unknown or begun[1, i] < 0
    for j in range(len(rows_planned)):
        table[rows_planned[j], of.SLOTS] = 0
    return unknown


@Loop
def _settle(
    begun: Ints2,
    rows: Ints1,
    kept: Ints1,
    steps: Ints2,
    waited: int,
    drafts: Ints3,
    number: int,
    table: Ints2,
    off: bool,
    held: Shorts3,
    numbers: Shorts1,
    ends: Ints2,
) -> tuple[int, int, int]:
    """Join steps with their drafts: `waited` ones, the first of `steps`, and those of outputs, which come next.
    kept: [S] tokens that are kept of a request's last output; −1: it is not the last. number: of the last report.
    numbers: of all messages; ends: [2, M] where each message ends, and the place of its output. Returns how many
    steps wait, now the first of `steps`; M; and the most steps that were held of a request."""
    end = waited
    for i in range(len(rows)):
        row, place = rows[i], table[rows[i], of.PLACE]
        # Not one of another request or step, which has no place in this one, and not without drafts or tokens.
        if row == 0 or place >= begun.shape[1] or begun[0, place] != row:
            continue
        if begun[1, place] < 0 or begun[3, place] == 0:
            continue
        for field in range(4):
            steps[field, end] = begun[field, place]
        is_last, sampled = kept[i] >= 0, begun[3, place]
        steps[4, end], steps[5, end] = kept[i] if is_last else sampled, i
        # The next turn of a request may take tokens back.
        table[row, of.TOKENS] = -1 if is_last else begun[1, place] + sampled
        end += 1
    waits = told = count = most = 0
    for s in range(end):
        row, position, slots, output = steps[0, s], steps[1, s], max(steps[2, s], 0), steps[5, s]
        source, length, newest, latest = 0, 0, -1, -1
        for back in range(len(drafts)):
            draft = drafts[(number - back) % DEPTH, row]
            latest = max(latest, draft[of.POSITION])
            if draft[of.POSITION] == position and draft[of.REPORT] > newest:
                source, length, newest = draft[of.SOURCE], draft[of.LENGTH], draft[of.REPORT]
            if newest >= number - back:  # those further back are older
                break
        if table[row, of.OURS] == 0:  # of which no draft is reported
            source, length, newest = DRAFT_MODEL, slots, 0
        is_known = newest >= 0 or slots == 0 or off or latest > position
        if is_known:
            verified, accepted = count_verified(slots, length, steps[3, s], steps[4, s])
            step = held[row, table[row, of.HELD]]
            step[0], step[1], step[2], step[3] = source, length, verified, accepted
            table[row, of.HELD] += 1
            most = max(most, table[row, of.HELD])
        if s >= waited and (kept[output] >= 0 or table[row, of.HELD] >= table[row, of.EVERY]):
            for h in range(table[row, of.HELD]):
                for field in range(4):
                    numbers[count] = held[row, h, field]
                    count += 1
            numbers[count], numbers[count + 1] = table[row, of.UNTOLD], is_known + 2 * table[row, of.REFUSED]
            count += 2
            ends[0, told], ends[1, told] = count, output
            told += 1
            table[row, of.HELD] = table[row, of.UNTOLD] = table[row, of.REFUSED] = 0
        elif s >= waited:
            table[row, of.UNTOLD] += steps[4, s]
        if not is_known:
            for field in range(6):
                steps[field, waits] = steps[field, s]
            waits += 1
    return waits, told, most

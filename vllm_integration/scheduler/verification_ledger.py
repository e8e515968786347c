"""The verified drafts of each step: the scheduler knows slots, tokens and output of a step; the worker reports how
many of the slots hold drafts, and who proposed them. Here the two meet. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..wire.reports import DRAFT_MODEL, Ints
from ..wire.steps import HEADER, Messages, Steps, count_verified, encode
from .draft_budget import POSITION, REPORT, TOGETHER, DraftedRequests


class Begun(NamedTuple):
    """A step that has run, before vLLM has looked for the end of each output.

    place: [R] row in the table of requests → place in `columns`; −1 where nothing was drafted for or sampled.
    columns: [4, B] row, tokens before the step, draft slots, tokens sampled.
    """

    req_ids: Sequence[str]
    place: Ints
    columns: Ints


class VerificationLedger:
    """Joins the steps of the scheduler with the drafts of the worker, a batch at a time.

        begun = ledger.begin(requests, scheduler_output, output, trimmed)   # before vLLM looks at the output
        drafted_requests.take(report, begun.req_ids, begun.columns[0])     # what came with the output
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
        self._waiting: Ints = np.zeros((5, 0), dtype=np.int64)  # columns of `Begun`, and tokens kept
        #: [rows, width, 4] `Steps` that are not told yet; `table["held"]` of each row are.
        self._held = np.zeros((0, 2 * TOGETHER, len(Steps._fields)), dtype=np.int16)

    def __len__(self) -> int:
        """Steps that wait for their drafts."""
        return int(self._waiting.shape[1])

    def begin(
        self, requests: Mapping[str, Any], scheduler_output: Any, output: Any, trimmed: Mapping[str, int]
    ) -> Begun:
        req_ids, size = output.req_ids, len(output.req_ids)
        rows = self._requests.rows_of(req_ids)
        sampled = _lengths(output.sampled_token_ids or repeat((), size), size)
        slots = _lengths(map(scheduler_output.scheduled_spec_decode_tokens.get, req_ids, repeat(())), size)
        for req_id, invalid in (scheduler_output.num_invalid_spec_tokens or {}).items():
            slots[output.req_id_to_index[req_id]] -= invalid
        if trimmed:
            slots = np.minimum(slots, list(map(trimmed.get, req_ids, slots.tolist())))
        positions, place = self._requests.table["tokens"].take(rows), np.full(len(self._requests.table), -1)
        for index in np.flatnonzero(positions < 0).tolist():
            # It may have been aborted while its step ran.
            request = requests.get(req_ids[index])
            positions[index] = -1 if request is None else request.num_tokens
        place[rows] = np.where((positions >= 0) & (sampled > 0), np.arange(size), -1)
        place[0] = -1
        return Begun(req_ids, place, np.array([rows, positions, slots, sampled]))

    def settle(self, begun: Begun, outputs: Sequence[Any]) -> None:
        """Attach to `EngineCoreOutput`s what is now known about their requests."""
        table = self._requests.table
        places = begun.place[self._requests.rows_of([output.request_id for output in outputs])]
        if places.min(initial=0) < 0:
            outputs, places = list(compress(outputs, (places >= 0).tolist())), places[places >= 0]
        if not outputs:
            return
        steps = begun.columns[[0, 1, 2, 3, 3]].take(places, axis=1)
        (rows, positions, _, _, kept), waited = steps, len(self)
        reasons = [output.finish_reason for output in outputs]
        last = [index for index, reason in enumerate(reasons) if reason is not None]
        is_last = np.zeros(len(outputs), dtype=np.bool_)
        is_last[last] = True
        kept[last] = [len(outputs[index].new_token_ids) for index in last]
        # The next turn of a request may take tokens back.
        table["tokens"][rows] = np.where(is_last, -1, positions + kept)
        if waited:
            steps = np.concatenate([self._waiting, steps], axis=1)
        counted, done = self._count(steps)
        if done.all():
            self._hold(steps[0], counted, waited > 0)
            self._waiting = steps[:, :0]
        else:
            self._hold(steps[0, done], counted[:, done], waited > 0)
            self._waiting = steps[:, ~done]
        held, untold = table["held"].take(rows), table["untold"].take(rows)
        due = is_last | (held >= table["every"].take(rows))
        table["held"][rows], table["untold"][rows] = held * ~due, (untold + kept) * ~due
        if due.any():
            own = done[waited:].view(np.int8)
            self._tell(
                list(compress(outputs, due.tolist())), *(column[due] for column in (rows, held, untold, own))
            )

    def _tell(self, outputs: Sequence[Any], rows: Ints, held: Ints, untold: Ints, own: Ints) -> None:
        steps = self._held.take(rows, axis=0)
        steps = steps[np.arange(steps.shape[1]) < held[:, None]].T
        refused = self._requests.table["refused"].take(rows)
        self._requests.table["refused"][rows] = 0
        texts = encode(Messages(Steps(*steps), held, untold, own, refused))
        for output, text in zip(outputs, texts, strict=True):
            headers = output.trace_headers
            output.trace_headers = {HEADER: text} if headers is None else {**headers, HEADER: text}

    def _hold(self, rows: Ints, counted: Ints, is_mixed: bool) -> None:
        """[4, S] `Steps` of these rows are not told yet. is_mixed: a row may be there twice, in its order."""
        held = self._requests.table["held"]
        place = held.take(rows)
        if is_mixed:
            order = np.argsort(rows, kind="stable")
            starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
            place[order] += np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        more = max(int(place.max(initial=0)) + 1 - self._held.shape[1], 0)
        if more or len(self._held) < len(held):
            self._held = np.pad(self._held, ((0, len(held) - len(self._held)), (0, more), (0, 0)))
        self._held[rows, place] = counted.T
        held[rows] = place + 1  # the last one of a row stays

    def _count(self, steps: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """[4, S] `Steps` of S steps, and which of these need not wait any more."""
        rows, positions, slots, sampled, kept = steps
        drafts = self._requests.drafts.take(rows, axis=0)  # [S, DEPTH, 4]
        made_at = drafts[:, :, POSITION]
        newest = np.where(made_at == positions[:, None], drafts[:, :, REPORT], -1).argmax(axis=1)
        position, length, source, _ = drafts[np.arange(len(rows)), newest].T
        found = position == positions
        done = found | (slots <= 0) | self._requests.off
        if not done.all():
            done |= made_at.max(axis=1) > positions
        length, source = length * found, source * found
        if self._requests.beside_model:
            theirs = self._requests.table["ours"].take(rows) == 0  # of which no draft is reported
            done |= theirs
            length[theirs], source[theirs] = np.maximum(slots[theirs], 0), DRAFT_MODEL
        verified, accepted = count_verified(np.maximum(slots, 0), length, sampled, kept)
        return np.array([source, length, verified, accepted]), done

    def forget(self, rows: Sequence[int]) -> None:
        """The requests of these rows are gone."""
        if len(self) and rows:
            self._waiting = self._waiting[:, ~np.isin(self._waiting[0], rows)]


def _lengths(lists: Iterable[Sized], count: int) -> Ints:
    return np.fromiter(map(len, lists), np.int64, count)

"""The verified drafts of each step: the scheduler knows slots, tokens and output of a step; the worker reports how
many of the slots hold drafts, and who proposed them. Here the two meet. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..wire.reports import DRAFT_MODEL
from ..wire.steps import HEADER, Steps, count_verified, encode
from .draft_budget import POSITION, DraftedRequests, Ints


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
    """

    def __init__(self, drafted_requests: DraftedRequests) -> None:
        self._requests = drafted_requests
        self._waiting: Ints = np.zeros((5, 0), dtype=np.int64)  # columns of `Begun`, and tokens kept

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
        # A request may have been aborted while its step ran.
        positions = np.array(
            [-1 if request is None else request.num_tokens for request in map(requests.get, req_ids)],
            dtype=np.int64,
        )
        place = np.full(len(self._requests.table), -1)
        place[rows] = np.where((positions >= 0) & (sampled > 0), np.arange(size), -1)
        place[0] = -1
        return Begun(req_ids, place, np.array([rows, positions, slots, sampled]))

    def settle(self, begun: Begun, outputs: Sequence[Any]) -> None:
        """Attach to `EngineCoreOutput`s what is now known about their requests."""
        places = begun.place[self._requests.rows_of([output.request_id for output in outputs])]
        if places.min(initial=0) < 0:
            outputs, places = list(compress(outputs, (places >= 0).tolist())), places[places >= 0]
        if not outputs:
            return
        kept = _lengths([output.new_token_ids for output in outputs], len(outputs))
        steps = np.concatenate([begun.columns.take(places, axis=1), kept[None]])
        rows, waited = steps[0], len(self)
        steps = np.concatenate([self._waiting, steps], axis=1)
        counted, done = self._count(steps)
        # A step goes with the first output of its request after its draft is known.
        place = np.full(len(self._requests.table), -1)
        place[rows] = np.arange(len(rows))
        goes_with = place[steps[0]]
        sent = done & (goes_with >= 0)
        self._waiting = steps[:, ~sent]
        own, refused = done[waited:].view(np.int8), self._requests.table["refused"][rows]
        messages = encode(Steps(*counted[:, sent]), goes_with[sent], own, refused)
        for output, text in zip(outputs, messages, strict=True):
            headers = output.trace_headers
            output.trace_headers = {HEADER: text} if headers is None else {**headers, HEADER: text}
        self._requests.table["refused"][rows] = 0

    def _count(self, steps: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """[4, S] `Steps` of S steps, and which of these need not wait any more."""
        rows, positions, slots, sampled, kept = steps
        known = self._requests.table.take(rows)
        drafts = known["drafts"]  # [S, DEPTH, 3]
        made_at = drafts[:, :, POSITION]
        newest = (made_at == positions[:, None]).argmax(axis=1)
        position, length, source = drafts[np.arange(len(rows)), newest].T
        found = position == positions
        done = found | (slots <= 0) | self._requests.off
        if not done.all():
            done |= made_at.max(axis=1) > positions
        length, source = length * found, source * found
        if self._requests.beside_model:
            theirs = known["ours"] == 0  # of which no draft is reported
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

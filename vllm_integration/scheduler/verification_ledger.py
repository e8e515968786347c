"""What the engine verified, counted where it is known exactly. Imports no vLLM.

The scheduler knows how many draft slots a step had, how many tokens came out and which of them are output; the
worker reports how many of the slots hold drafts, and who proposed them. Here the two meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_integration.scheduler.drafted_requests import DraftedRequests
from vllm_integration.wire.steps import HEADER, Steps, count_verified, encode

Ints = npt.NDArray[np.int64]


class Begun(NamedTuple):
    """A step that has run, before vLLM has looked for the end of each output.

    place: request → its place in `columns`, of the requests that are drafted for and sampled tokens.
    columns: [4, B] row in the table of requests, tokens before the step, draft slots, tokens sampled.
    """

    place: Mapping[str, int]
    columns: Ints


class VerificationLedger:
    """Joins the steps of the scheduler with the drafts of the worker, a batch at a time.

        begun = ledger.begin(requests, scheduler_output, output, trimmed)   # before vLLM looks at the output
        drafted_requests.take(report)                                      # what came with the output
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
        """Note the step before vLLM appends the sampled tokens to its requests, and may cut them."""
        req_ids = output.req_ids
        found: list[Any] = list(map(requests.get, req_ids))
        rows = self._requests.rows_of(req_ids, found)
        sampled = list(map(len, output.sampled_token_ids)) or [0] * len(req_ids)
        slots = list(map(len, map(scheduler_output.scheduled_spec_decode_tokens.get, req_ids, repeat(()))))
        for req_id, invalid in (scheduler_output.num_invalid_spec_tokens or {}).items():
            slots[output.req_id_to_index[req_id]] -= invalid
        if trimmed:
            slots = [min(n, trimmed.get(req_id, n)) for req_id, n in zip(req_ids, slots, strict=True)]
        # A request may have been aborted while its step ran.
        columns = zip(found, rows.tolist(), sampled, strict=True)
        counted = [request is not None and bool(row and n) for request, row, n in columns]
        positions = [request.num_tokens if c else 0 for request, c in zip(found, counted, strict=True)]
        place = {req_id: i for i, (req_id, c) in enumerate(zip(req_ids, counted, strict=True)) if c}
        return Begun(place, np.array([rows, positions, slots, sampled], dtype=np.int64))

    def settle(self, begun: Begun, outputs: Sequence[Any]) -> None:
        """Attach to vLLM's `EngineCoreOutput`s what is now known about their requests."""
        outputs = [output for output in outputs if output.request_id in begun.place]
        if not outputs:
            return
        columns = begun.columns[:, [begun.place[output.request_id] for output in outputs]]
        kept = np.array([[len(output.new_token_ids) for output in outputs]])
        waited = len(self)
        steps = np.concatenate([self._waiting, np.concatenate([columns, kept])], axis=1)
        rows, messages, done = steps[0], *self._count(steps)
        self._waiting = steps[:, ~done]
        earlier: defaultdict[int, str] = defaultdict(str)
        for i in np.flatnonzero(done[:waited]):
            earlier[int(rows[i])] += messages[i][:-1]
        for i in np.flatnonzero(~done):
            messages[i] = messages[i][-1]
        texts = messages[waited:]
        if earlier:
            texts = [earlier[row] + text for row, text in zip(rows[waited:].tolist(), texts, strict=True)]
        for output, text in zip(outputs, texts, strict=True):
            headers = output.trace_headers
            output.trace_headers = {HEADER: text} if headers is None else {**headers, HEADER: text}
        self._requests.table["refused"][rows[waited:]] = 0

    def _count(self, steps: Ints) -> tuple[list[str], npt.NDArray[np.bool_]]:
        """The messages of S steps, and which of these need not wait any more."""
        rows, positions, slots, sampled, kept = steps
        table = self._requests.table
        known = table["position"][rows]  # [S, DEPTH]
        same = known == positions[:, None]
        newest, found = same.argmax(axis=1), same.any(axis=1)
        done = found | (slots <= 0) | (known.max(axis=1) > positions) | self._requests.off
        length = np.where(found, table["length"][rows, newest], 0)
        source = np.where(length > 0, table["source"][rows, newest], 0)
        verified, accepted = count_verified(np.maximum(slots, 0), length, sampled, kept)
        counted = Steps(source, length, verified, accepted)
        return encode(counted, done.astype(np.int64), table["refused"][rows]), done

    def forget(self, rows: Sequence[int]) -> None:
        """The requests of these rows are gone."""
        if len(self) and rows:
            self._waiting = self._waiting[:, ~np.isin(self._waiting[0], rows)]

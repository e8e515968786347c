"""The requests that are drafted for, and what the worker last reported of each. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_integration.scheduler import credit
from vllm_integration.wire import prediction as wire
from vllm_integration.wire.reports import REFUSALS, DraftReport

#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
#: What is remembered of each.
POSITION, LENGTH, SOURCE = range(3)
#: Survival of every slot of a request that nothing is known of yet.
CERTAIN = 255
#: `made` of such a request.
NEVER = np.iinfo(np.int64).min

Rows = npt.NDArray[np.int64]


class DraftedRequests:
    """One row of `table` for each request that is drafted for; row 0 stands for all others, and stays blank.

    draft_without_prediction: whether requests without a prediction are drafted for.
    num_draft_tokens: K; 0 where nobody schedules by survival (V1).

    | field | | meaning |
    |---|---|---|
    | drafts | [DEPTH, 3] int32 | `POSITION`, `LENGTH`, `SOURCE` of the last, newest first; position −1: none |
    | made | | number of the report that the newest draft comes with if it is not late; `NEVER`: no report yet |
    | survival | [K] uint8 | of the newest draft; all `CERTAIN` before the first report |
    | far_until | | until this many reports a whole draft can become output, whatever the request samples |
    | credit | | what its drafts may still promise in vain, see `credit` |
    | refused | | index of `REFUSALS`; 0 when the front end knows of it |

    `reports` counts reports: a draft is as new as can be where `made == reports`.
    """

    def __init__(self, draft_without_prediction: bool, num_draft_tokens: int = 0) -> None:
        self._draft_without_prediction = draft_without_prediction
        drafts = ("drafts", np.int32, (DEPTH, 3))
        numbers = [("made", np.int64), ("far_until", np.int64), ("credit", np.float32), ("refused", np.int8)]
        survival = ("survival", np.uint8, (num_draft_tokens,))
        self.table = np.zeros(64, dtype=np.dtype([drafts, *numbers, survival], align=True))
        self.reports = 0
        self.off = False
        self._rows: dict[str, int] = {}
        self._free = list(range(1, len(self.table)))
        self._blank(np.arange(len(self.table)))
        self._nobody = self.table[:1].copy()

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, req_ids: Sequence[str], requests: Iterable[Any] | None = None) -> Rows:
        """[N] the rows of requests; 0 for those that have none.

        requests: vLLM's, or None for one that is gone: those that nobody has met before get a row, or 0.
        """
        try:
            return np.fromiter(map(self._rows.__getitem__, req_ids), np.int64, len(req_ids))
        except KeyError:
            for req_id, request in () if requests is None else zip(req_ids, requests, strict=True):
                if req_id not in self._rows and request is not None:
                    self._add(req_id, request)
            return np.fromiter(map(self._rows.get, req_ids, repeat(0)), np.int64, len(req_ids))

    def take(self, report: DraftReport, req_ids: Sequence[str] = (), rows: Rows | None = None) -> None:
        """Take in what came with a step's output; to be called once a step, also when that is nothing.

        What is reported of requests without a row is left out: nobody has met them, or they are gone.
        req_ids, rows: the requests of the step and their rows, if somebody has looked them up. The drafts of that
        very step come with the same list of requests, and need no second look.
        """
        self.reports += 1
        self.off |= report.off
        table = self.table
        for drafts in report.drafts:
            at = rows if rows is not None and drafts.req_ids is req_ids else self.rows_of(drafts.req_ids)
            known = table.take(at)
            known["drafts"][:, 1:] = known["drafts"][:, :-1]
            for field, column in (
                (POSITION, drafts.position),
                (LENGTH, drafts.length),
                (SOURCE, drafts.source),
            ):
                known["drafts"][:, 0, field] = column
            known["survival"] = drafts.survival
            known["made"] = self.reports - drafts.age
            table.put(at, known)
        for req_id, reason in report.refused.items():
            table["refused"][self._rows.get(req_id, 0)] = REFUSALS.index(reason)
        table[:1] = self._nobody

    def keep_only(self, alive: Mapping[str, Any]) -> list[int]:
        """Forget requests that are not in `alive`; the rows they had."""
        gone = [] if self._rows.keys() <= alive.keys() else self._rows.keys() - alive.keys()
        rows = [row for row in map(self._rows.pop, gone) if row]
        if rows:
            self._blank(np.array(rows))
            self._free += rows
        return rows

    def _add(self, req_id: str, request: Any) -> None:
        row = 0
        if self._draft_without_prediction or has_prediction(request):
            if not self._free:
                size = len(self.table)
                self.table = np.concatenate([self.table, np.zeros_like(self.table)])
                self._free = list(range(size, 2 * size))
                self._blank(np.arange(size, 2 * size))
            row = self._free.pop()
        self._rows[req_id] = row

    def _blank(self, rows: Rows) -> None:
        self.table[rows] = np.zeros(1, dtype=self.table.dtype)
        self.table["drafts"][rows, :, POSITION] = -1
        self.table["made"][rows] = NEVER
        self.table["credit"][rows] = credit.START
        self.table["far_until"][rows] = np.where(rows > 0, -1, np.iinfo(np.int64).max)
        self.table["survival"][rows] = np.where(rows > 0, CERTAIN, 0)[:, None]


def has_prediction(request: Any) -> bool:
    """Whether a vLLM request brought a prediction."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    return extra_args.get(wire.KEY) is not None

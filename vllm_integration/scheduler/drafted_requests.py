"""The requests that are drafted for, and what the worker last reported of each. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_integration.wire import prediction as wire
from vllm_integration.wire.reports import REFUSALS, DraftReport

#: Drafts of a request that are remembered. One report rarely brings more than two.
DEPTH = 8
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
    | position, length, source | [DEPTH] | the last drafts, the newest first; position −1: none |
    | made | | number of the report that the newest draft comes with if it is not late; `NEVER`: no report yet |
    | survival | [K] uint8 | of the newest draft; all `CERTAIN` before the first report |
    | refused | | index of `REFUSALS`; 0 when the front end knows of it |

    `reports` counts reports: a draft is as new as can be where `made == reports`.
    """

    def __init__(self, draft_without_prediction: bool, num_draft_tokens: int = 0) -> None:
        self._draft_without_prediction = draft_without_prediction
        drafts = [(name, np.int32, (DEPTH,)) for name in ("position", "length", "source")]
        rest = [("made", np.int64), ("survival", np.uint8, (num_draft_tokens,)), ("refused", np.int8)]
        self.table = np.zeros(64, dtype=np.dtype([*drafts, *rest], align=True))
        self.reports = 0
        self.off = False
        self._rows: dict[str, int] = {}
        self._free = list(range(1, len(self.table)))
        self._blank(np.arange(len(self.table)))

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, req_ids: Sequence[str], requests: Sequence[Any]) -> Rows:
        """[N] the rows of requests, which get one where they had none. requests: vLLM's; None for one that is
        gone."""
        rows = list(map(self._rows.get, req_ids))
        if None in rows:
            rows = [
                self._add(req_id, request) if row is None else row
                for req_id, request, row in zip(req_ids, requests, rows, strict=True)
            ]
        return np.array(rows, dtype=np.int64)

    def take(self, report: DraftReport) -> None:
        """Take in what came with a step's output; to be called once a step, also when that is nothing.

        What is reported of requests without a row is left out: nobody has met them, or they are gone.
        """
        self.reports += 1
        self.off |= report.off
        table = self.table
        for drafts in report.drafts:
            rows = [self._rows.get(req_id, 0) for req_id in drafts.req_ids]
            for name in ("position", "length", "source"):
                newest, known = getattr(drafts, name)[:, None], table[name][rows]
                table[name][rows] = np.concatenate([newest, known[:, :-1]], axis=1)
            table["survival"][rows] = drafts.survival
            table["made"][rows] = self.reports - drafts.age
        for req_id, reason in report.refused.items():
            table["refused"][self._rows.get(req_id, 0)] = REFUSALS.index(reason)
        self._blank(np.zeros(1, dtype=np.int64))

    def keep_only(self, alive: Mapping[str, Any]) -> list[int]:
        """Forget requests that are not in `alive`; the rows they had."""
        gone = [self._rows.pop(req_id) for req_id in self._rows.keys() - alive.keys()]
        rows = [row for row in gone if row]
        if rows:
            self._blank(np.array(rows))
            self._free += rows
        return rows

    def _add(self, req_id: str, request: Any) -> int:
        if request is None:
            return 0
        row = 0
        if self._draft_without_prediction or has_prediction(request):
            if not self._free:
                size = len(self.table)
                self.table = np.concatenate([self.table, np.zeros_like(self.table)])
                self._free = list(range(size, 2 * size))
                self._blank(np.arange(size, 2 * size))
            row = self._free.pop()
        self._rows[req_id] = row
        return row

    def _blank(self, rows: Rows) -> None:
        self.table[rows] = np.zeros(1, dtype=self.table.dtype)
        self.table["position"][rows] = -1
        self.table["made"][rows] = NEVER
        self.table["survival"][rows] = np.where(rows > 0, CERTAIN, 0)[:, None]


def has_prediction(request: Any) -> bool:
    """Whether a vLLM request brought a prediction."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    return extra_args.get(wire.KEY) is not None

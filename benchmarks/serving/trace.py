"""What the drafter would do at every position of known outputs: the traces that the serving model replays.

A draft is a function of the prediction and the tokens so far alone, so one pass over a record, one draft a
position, says what happens under *any* rule that cuts drafts short: a step at position ``p`` that is granted
``g`` drafts accepts ``a = min(g, length[p], matched[p])`` of them and goes on at ``p + a + 1``. Nothing has to be
drafted again for another rule, batch or machine; a new drafter is traced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gpu_align
from benchmarks.processes import dealt
from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorOptions
from gpu_align.predictors.base import count_accepted
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import sizes_for

#: Confidences travel as integers over this.
ONE = 65_535


@dataclass(frozen=True)
class Trace:
    """Drafts at every position of some outputs, joined: after 1 to L - 1 tokens of each, P in all.

    Attributes:
        start: [R + 1] int64: record ``r`` has rows ``start[r]`` to ``start[r + 1]``.
        length: [P] int16: drafts proposed, ``0 <= length <= K``. Drafts behind the end of the output count:
            an engine that does not know the end verifies them.
        matched: [P] int16: how many of them, from the first, are what the output goes on with.
        survival: [P, K] uint16 in units of 1/`ONE`: the drafter's own estimate that drafts 0..k are all
            accepted; 0 beyond `length`, and at least 1 before it.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int16]
    matched: npt.NDArray[np.int16]
    survival: npt.NDArray[np.uint16]

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return int(self.survival.shape[1])

    def save(self, path: Path) -> None:
        """Write a compressed ``.npz``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls(**file)

    def rejected(self) -> Trace:
        """The same drafts, all wrong: what a prediction costs that fools the drafter at every step."""
        return replace(self, matched=np.zeros_like(self.matched))


def sample(records: Sequence[Record], max_tokens: int) -> list[Record]:
    """Every n-th record, with the smallest n that keeps their outputs within `max_tokens`; at least one."""
    for every in range(1, len(records) + 1):
        chosen = list(records[::every])
        if sum(len(r.output) for r in chosen) <= max_tokens:
            return chosen
    return [min(records, key=lambda r: len(r.output))]


def unrelated(records: Sequence[Record]) -> list[Record]:
    """The records with their predictions moved half the list on: another file, mostly of another package."""
    n = len(records)
    return [replace(r, prediction=records[(i + n // 2) % n].prediction) for i, r in enumerate(records)]


def record_trace(
    records: Sequence[Record],
    num_draft_tokens: int,
    jobs: int = 1,
    recipes: gpu_align.Recipes | None = None,
) -> Trace:
    """Draft at every position of every record that has two output tokens or more, from `recipes` as well."""
    usable = [r for r in records if len(r.output) > 1]
    if not usable:
        raise ValueError("records: expected one with two output tokens or more, found none")
    traced = partial(_rows, num_draft_tokens=num_draft_tokens, recipes=recipes)
    rows = dealt(traced, usable, jobs)
    start = np.concatenate([[0], np.cumsum([len(length) for length, _, _ in rows])]).astype(np.int64)
    return Trace(start, *(np.concatenate(columns) for columns in zip(*rows, strict=True)))


def _rows(
    records: Sequence[Record], num_draft_tokens: int, recipes: gpu_align.Recipes | None
) -> list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.uint16]]]:
    """``(length, matched, survival)`` of each record."""
    found = []
    for record in records:
        num_output = len(record.output)
        # Room behind the end: a draft that runs past it is as long as the drafter made it.
        sizes = sizes_for([record], recipes)
        room = sizes._replace(max_context_len=sizes.max_context_len + num_draft_tokens)
        ours = PredictedOutputTokenPredictor(recipes=recipes, **room._asdict())
        ours.reset(record.prompt, PredictorOptions(num_draft_tokens, prediction=tuple(record.prediction)))
        lengths, matched = np.zeros((2, num_output - 1), dtype=np.int16)
        survival = np.zeros((num_output - 1, num_draft_tokens), dtype=np.uint16)
        for p in range(1, num_output):
            ours.push_tokens(record.output[p - 1 : p])
            draft = ours.predict_tokens()
            lengths[p - 1] = len(draft)
            matched[p - 1] = count_accepted(draft, record.output[p : p + len(draft)])
            estimate = np.cumprod(np.array(ours.confidence))
            survival[p - 1, : len(draft)] = np.maximum(np.rint(estimate * ONE), 1)
        found.append((lengths, matched, survival))
    return found

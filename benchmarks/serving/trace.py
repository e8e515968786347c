"""What the drafter would do at every position of known outputs: the traces that the serving model replays.

A draft is a function of the prediction and the tokens so far alone, so one pass over a record, one draft a
position, says what happens under *any* rule that cuts drafts short: a step at position ``p`` that is granted
``g`` drafts accepts ``a = min(g, length[p], matched[p])`` of them and goes on at ``p + a + 1``. Nothing has to be
drafted again for another rule, batch or machine; a new drafter is traced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import gpu_align
from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorOptions
from gpu_align.predictors.base import count_accepted
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import sizes_for

#: Confidences travel as integers over this.
ONE = 65_535


@dataclass(frozen=True)
class Trace:
    """Drafts at every position of some outputs, joined. P is the sum of ``output tokens - 1`` over all records.

    Position ``p`` of a record is the state after its first ``p`` output tokens, ``1 <= p < L``: the prefill has
    brought the first.

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

    def __post_init__(self) -> None:
        positions = len(self.length)
        shapes = {"matched": self.matched.shape, "survival": self.survival.shape[:1]}
        for name, shape in shapes.items():
            if shape != (positions,):
                raise ValueError(
                    f"{name}: expected {positions} rows, as length has, found shape {list(shape)}"
                )
        if self.start.ndim != 1 or len(self.start) < 2 or self.start[0] != 0 or self.start[-1] != positions:
            raise ValueError(
                f"start: expected row numbers from 0 to {positions}, found {self.start.tolist()}"
            )
        if (np.diff(self.start) < 1).any():
            raise ValueError("start: expected at least one row a record")
        if (self.matched > self.length).any() or (self.length > self.num_draft_tokens).any():
            raise ValueError(f"matched, length: expected matched <= length <= {self.num_draft_tokens}")

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return int(self.survival.shape[1])

    def save(self, path: Path) -> None:
        """Write a compressed ``.npz``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(
                file, start=self.start, length=self.length, matched=self.matched, survival=self.survival
            )

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote."""
        with np.load(path) as file:
            missing = {"start", "length", "matched", "survival"} - set(file.files)
            if missing:
                raise ValueError(f"{path}: expected a trace, {sorted(missing)} are not in it")
            return cls(file["start"], file["length"], file["matched"], file["survival"])

    def rejected(self) -> Trace:
        """The same drafts, all wrong: what a prediction costs that fools the drafter at every step."""
        return Trace(self.start, self.length, np.zeros_like(self.matched), self.survival)


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
    config: gpu_align.DrafterConfig | None = None,
) -> Trace:
    """Draft at every position of every record that has two output tokens or more, from `recipes` as well.

    config: of the drafter; the defaults if None.
    """
    usable = [r for r in records if len(r.output) > 1]
    if not usable:
        raise ValueError("records: expected one with two output tokens or more, found none")
    if jobs == 1:
        _know(recipes, config)
        rows = [_rows(r, num_draft_tokens) for r in usable]
    else:
        # Longest first, so that no worker is left alone with one at the end.
        order = sorted(range(len(usable)), key=lambda i: -len(usable[i].output))
        with ProcessPoolExecutor(
            jobs, mp_context=get_context("spawn"), initializer=_know, initargs=(recipes, config)
        ) as pool:
            found = dict(
                zip(
                    order,
                    pool.map(_rows, (usable[i] for i in order), [num_draft_tokens] * len(order)),
                    strict=True,
                )
            )
        rows = [found[i] for i in range(len(usable))]
    lengths = [len(length) for length, _, _ in rows]
    return Trace(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        *(np.concatenate([row[i] for row in rows]) for i in range(3)),
    )


_RECIPES: gpu_align.Recipes | None = None
_CONFIG: gpu_align.DrafterConfig | None = None


def _know(recipes: gpu_align.Recipes | None, config: gpu_align.DrafterConfig | None = None) -> None:
    """What `_rows` of this process drafts from and how; not sent with every record, as recipes are large."""
    global _RECIPES, _CONFIG
    _RECIPES, _CONFIG = recipes, config


def _rows(
    record: Record, num_draft_tokens: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.uint16]]:
    """``(length, matched, survival)`` of one record."""
    torch.set_num_threads(1)
    num_output = len(record.output)
    # Room behind the end: a draft that runs past it is as long as the drafter made it.
    sizes = sizes_for([record], _RECIPES)
    room = sizes._replace(max_context_len=sizes.max_context_len + num_draft_tokens)
    ours = PredictedOutputTokenPredictor(config=_CONFIG, recipes=_RECIPES, **room._asdict())
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
    return lengths, matched, survival

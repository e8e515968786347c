"""Drafts at every position of known outputs: of real edits, and of predictions that are useless."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import gpu_align
from benchmarks.corpus import build as corpus
from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorOptions
from gpu_align.predictors.base import count_accepted
from gpu_align.tools.simulate.policies import sizes_for
from gpu_align.tools.simulate.replay import Record, read_records, recipes_for

Ints = npt.NDArray[np.int64]
K = 32
#: What is traced, and how many of its output tokens.
CORPUS, MAX_TOKENS = Path(".cache/corpus.jsonl.gz"), 30_000
TRACES = Path(".cache/serving")
#: Confidences travel as integers over this.
ONE = 65_535


class Trace(NamedTuple):
    """Drafts at every position of some outputs, joined: after 1 to L - 1 tokens of each, P in all.

    Attributes:
        start: [R + 1] int64: record ``r`` has rows ``start[r]`` to ``start[r + 1]``.
        length: [P] int16: drafts proposed, ``0 <= length <= K``. Drafts after the end of the output count:
            an engine that does not know the end verifies them.
        matched: [P] int16: how many of them, from the first, are what the output goes on with.
        survival: [P, K] uint16 in units of 1/`ONE`: the drafter's own estimate that drafts 0..k are all
            accepted; 0 beyond `length`, and at least 1 before it.
    """

    start: Ints
    length: npt.NDArray[np.int16]
    matched: npt.NDArray[np.int16]
    survival: npt.NDArray[np.uint16]


@lru_cache
def load_trace(mix: str) -> Trace:
    """The trace of one of `MIXES`."""
    if mix == "rejected":
        trace = load_trace("unrelated")
        return trace._replace(matched=np.zeros_like(trace.matched))
    with np.load(TRACES / f"{mix}.npz") as file:
        return Trace(**file)


def make_traces() -> None:
    """Record the traces of the drafter as it is served, with recipes; the corpus is fetched if it is not there."""
    if not CORPUS.exists():
        corpus.main([str(CORPUS)])
    records = read_records(CORPUS, "tekken")
    recipes, half = recipes_for(records), len(records) // 2
    # Predictions moved half the list on: another file, mostly of another package.
    moved = [*records[half:], *records[:half]]
    unrelated = [replace(r, prediction=other.prediction) for r, other in zip(records, moved, strict=True)]
    TRACES.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("edit", records), ("unrelated", unrelated)):
        parts = (chosen[::every] for every in range(1, len(chosen) + 1))
        few = next(part for part in parts if sum(len(r.output) for r in part) <= MAX_TOKENS)
        rows = [_rows(record, recipes) for record in few if len(record.output) > 1]
        start = np.cumsum([0, *(len(length) for length, _, _ in rows)])
        trace = Trace(start, *(np.concatenate(columns) for columns in zip(*rows, strict=True)))
        np.savez_compressed(TRACES / f"{name}.npz", **trace._asdict())


def _rows(record: Record, recipes: gpu_align.Recipes | None) -> tuple[Any, Any, Any]:
    """``(length, matched, survival)`` of a record."""
    num_output = len(record.output)
    # Room after the end: a draft that runs past it is as long as the drafter made it.
    sizes = sizes_for([record], recipes)
    room = sizes._replace(max_context_len=sizes.max_context_len + K)
    ours = PredictedOutputTokenPredictor(recipes=recipes, **room._asdict())
    ours.reset(record.prompt, PredictorOptions(K, prediction=tuple(record.prediction)))
    lengths, matched = np.zeros((2, num_output - 1), dtype=np.int16)
    survival = np.zeros((num_output - 1, K), dtype=np.uint16)
    for p in range(1, num_output):
        ours.push_tokens(record.output[p - 1 : p])
        draft = ours.predict_tokens()
        lengths[p - 1] = len(draft)
        matched[p - 1] = count_accepted(draft, record.output[p : p + len(draft)])
        estimate = np.cumprod(np.array(ours.confidence))
        survival[p - 1, : len(draft)] = np.maximum(np.rint(estimate * ONE), 1)
    return lengths, matched, survival

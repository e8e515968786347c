"""Learn the survival tables that the drafter chooses by: ``python -m benchmarks.learn.survival [OUT.json]``.

At every verification step each candidate that the drafter could have chosen is compared with what really came
next; a class's curve is the share of its candidates whose first k tokens were all right.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.corpus.kinds import MODEL
from benchmarks.quality.runs import JOBS, make_corpora, pool, read_entries
from benchmarks.tables import command
from gpu_align.drafter.config import DrafterConfig
from gpu_align.drafter.survival import SHIPPED, fit_curves
from gpu_align.ops.choose import NUM_CLASSES
from gpu_align.tools.simulate.replay import Record
from gpu_align.tools.tune import fit
from gpu_align.tools.tune.fit import NUM_DRAFT_TOKENS, ReplayCounts, at_knots, calibrate, observe
from gpu_align.tools.tune.tuning import make_table, write_table

NUM_ROUNDS = 3
MADE_BY = "python -m benchmarks.learn.survival"
#: Kinds of records to learn from: what real edits look like, and predictions of another file.
KINDS = ("python", "document", "json", "config", "sql", "unrelated")
#: What is made of a change of the ten kinds of text that confidences are calibrated with, beside the change.
MADE = (MODEL, "draft_20")


def training_records() -> list[Record]:
    """The records of `tune` that a table is learned from, in the order that `learn_table` wants."""
    chosen = (e for e in read_entries("tune") if e.kind in KINDS and e.tokens == "tekken")
    return _in_order(each.record for each in chosen)


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Long records first, dealt out in turn: equal work for every process, the same sums whatever their number."""
    return sorted((r for r in records if r.output), key=lambda r: (-len(r.output), r.id))


def _replayed(
    records: Sequence[Record], survival: npt.NDArray[np.float64], config: DrafterConfig, jobs: int
) -> list[ReplayCounts]:
    """Replay the records with these curves, a part for each process; with one it is this one.

    The context index keeps as many tokens as the context has room for: one capacity for all processes.
    """
    longest = max(len(r.output) for r in records)
    curves = fit_curves(survival, NUM_DRAFT_TOKENS)
    replay = partial(observe, survival=curves, max_context_len=longest, config=config)
    if jobs == 1:
        return [replay(records)]
    with pool(jobs) as workers:
        return workers.map(replay, [records[i::jobs] for i in range(jobs)])


def learn(runs: fit.Array) -> fit.Array:
    """Survival at every k, [NUM_CLASSES, K]: counts, smoothed from the classes with less detail down.

    Matched length alone, then with the place, then with the margin, then with the adherence.
    """
    seen, right = fit.seen_and_right(runs)
    curves = np.zeros_like(right)
    for places in fit.TEXTS:
        n, r = seen[:, :, places], right[:, :, places]
        curve = (r.sum((1, 2, 3), keepdims=True) + 0.3) / (n.sum((1, 2, 3), keepdims=True) + 1)
        for axes in ((1, 3), (3,), ()):
            count = n.sum(axes, keepdims=True) + fit.PRIOR
            curve = (r.sum(axes, keepdims=True) + fit.PRIOR * curve) / count
        curves[:, :, places] = curve
    return fit.falling(curves)


def learn_table(records: Sequence[Record], config: DrafterConfig, jobs: int = 1) -> dict[str, Any]:
    """The content of ``survival.json``, learned from `training_records` in `NUM_ROUNDS` replays.

    config: the drafter's settings; its own table is not read. The number of processes changes nothing.
    """
    curves = np.power(0.9, np.arange(1, NUM_DRAFT_TOKENS + 1))[None].repeat(NUM_CLASSES, axis=0)
    for i in range(NUM_ROUNDS):
        parts = _replayed(records, at_knots(curves).astype(np.float64), config, jobs)
        runs, drafts = (np.sum([part[field] for part in parts], axis=0) for field in range(2))
        tokens, steps, accepted, rejected = np.sum([part.total for part in parts], axis=0)
        speed = f"{tokens / steps:.2f} tokens a step, {rejected / accepted:.3f} rejected per accepted"
        print(f"round {i}: {speed}", file=sys.stderr)
        curves = learn(runs)
    return make_table(at_knots(curves), calibrate(drafts), runs.sum(axis=1), len(records), MADE_BY)


def recalibrated(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of `learn_table` with the calibration that one replay asks for: of the records of
    `training_records`, and of the ten kinds of text."""
    of_kinds = [e.record for e in read_entries("kinds-tune") if e.kind == e.text or e.kind in MADE]
    records, curves = _in_order([*training_records(), *of_kinds]), np.array(table["survival"])
    parts = _replayed(records, curves.astype(np.float64), DrafterConfig(), JOBS)
    drafts = np.sum([part.drafts for part in parts], axis=0)
    return make_table(curves, calibrate(drafts), np.array(table["seen"]), int(table["records"]), MADE_BY)


def main() -> None:
    parser = command("benchmarks.learn.survival", __doc__)
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped table")
    args = parser.parse_args()
    make_corpora("tune", "kinds-tune")
    table = recalibrated(learn_table(training_records(), DrafterConfig(), JOBS))
    write_table(table, args.out)
    print(f"wrote {args.out}; calibration {table['calibration']}")


if __name__ == "__main__":
    main()

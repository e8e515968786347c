"""Learn the survival tables that the drafter chooses by: ``python -m benchmarks.learn.survival [OUT.json]``.

Replays edit pairs of the tuning split, packages that no reported corpus contains, and predictions that belong to
another file. At every verification step each candidate that the drafter could have chosen is compared with what
really came next; a class's curve is the share of its candidates whose first k tokens were all right. The steps
are those of the drafter itself, so the replay is repeated with the table it just learned until they settle.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.corpus import build as corpus
from benchmarks.quality.runs import read_entries
from gpu_align.config import DrafterConfig
from gpu_align.ops.constants import (
    ALIGNMENT_CONTEXT,
    LENGTH_EDGES,
    MARGIN_EDGES,
    NUM_ADHERENCES,
    NUM_ALIGNMENTS,
    NUM_CLASSES,
    NUM_LENGTHS,
    NUM_MARGINS,
    SURVIVAL_ONE,
)
from gpu_align.ops.draft.reference import IS_CONTEXT, Candidates
from gpu_align.ops.draft.tables import KNOTS, NUM_BINS, SHIPPED, SurvivalTables, fit_curves, survival_units
from gpu_align.simulate import Record
from gpu_align.simulate.step_candidates import CandidateReplay

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NUM_DRAFT_TOKENS = 64
NUM_ROUNDS = 3
#: A class starts from the curve of the classes that say the same with less detail, worth this many observations.
PRIOR = 15
#: Kinds of records to learn from: what real edits look like, and predictions of another file.
KINDS = ("python", "document", "json", "config", "sql", "unrelated")


class Observed(NamedTuple):
    """What one replay of all records has shown.

    Attributes:
        runs: [C, K + 1]: candidates of class c of which just r tokens were right (K: K or more).
        drafts: [2, NUM_BINS]: drafts that were reached, by what the table promised, and how many more of them
            were accepted than promised.
        total: output tokens, steps, accepted drafts, rejected drafts.
    """

    runs: Array
    drafts: Array
    total: npt.NDArray[np.int64]


def observe(
    records: Sequence[Record],
    survival: npt.NDArray[np.int32],
    max_context_len: int,
    config: DrafterConfig,
) -> Observed:
    """Replay all records with the drafter's own choices."""
    tables = SurvivalTables.from_survival(survival, "cpu", config.min_survival, config.min_survival_lost)
    confidence = tables.confidence.numpy()
    runs, drafts = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1)), np.zeros((2, NUM_BINS))
    replay = CandidateReplay(records, NUM_DRAFT_TOKENS, config, max_context_len, tables)
    done = np.minimum(1, replay.num_output)
    total = np.array([replay.num_output.sum(), len(records), 0, 0])
    while (slots := np.flatnonzero(done < replay.num_output)).size:
        view = replay.look(slots, done[slots])
        found = view.candidates
        right = replay.right(found, slots, done[slots])
        seen = _distinct(found)
        np.add.at(runs, (found.class_id[seen], right[seen]), 1)
        left = replay.num_output[slots] - done[slots]
        drafted = np.minimum(view.length, left)
        ahead = np.arange(NUM_DRAFT_TOKENS)
        truth = np.minimum(done[slots, None] + ahead, replay.token_ids.shape[1] - 1)
        wrong = (view.draft != replay.token_ids[slots[:, None], truth]) | (ahead >= drafted[:, None])
        taken = np.where(wrong.any(axis=1), wrong.argmax(axis=1), NUM_DRAFT_TOKENS)
        reached = ahead < np.minimum(taken + 1, drafted)[:, None]
        promised = confidence[found.class_id[np.arange(len(slots)), view.lane]][reached]
        bins = np.minimum(promised * NUM_BINS, NUM_BINS - 1).astype(int)
        np.add.at(drafts[0], bins, 1)
        np.add.at(drafts[1], bins, (ahead < taken[:, None])[reached] - promised)
        total += [0, len(slots), taken.sum(), (drafted - taken).sum()]
        done[slots] = np.minimum(done[slots] + taken + 1, replay.num_output[slots])
    return Observed(runs, drafts, total)


def _distinct(found: Candidates) -> npt.NDArray[np.bool_]:
    """[R, C]: live candidates, each place once: one both matched and near the cursor counts as the match."""
    places = np.where(IS_CONTEXT, -2 - found.position, found.position)
    same = places[:, :, None] == places[:, None, :]
    earlier = np.tril(np.ones(same.shape[1:], dtype=bool), -1) & (found.remaining > 0)[:, None, :]
    distinct: npt.NDArray[np.bool_] = (found.remaining > 0) & ~(same & earlier).any(axis=2)
    return distinct


def learn(runs: Array) -> Array:
    """Survival at every k, [NUM_CLASSES, K]: counts, smoothed from the classes with less detail down.

    Matched length alone, then with the place, then with the margin, then with the trust. A match in the prediction
    and one in the context have nothing in common but their length, and share nothing.
    """
    survived = np.flip(np.flip(runs, 1).cumsum(1), 1)
    shape = NUM_LENGTHS, NUM_MARGINS, NUM_ALIGNMENTS, NUM_ADHERENCES
    seen, right = survived[:, 0].reshape(*shape, 1), survived[:, 1:].reshape(*shape, -1)
    curves = np.zeros_like(right)
    for places in (slice(0, ALIGNMENT_CONTEXT), slice(ALIGNMENT_CONTEXT, NUM_ALIGNMENTS)):
        n, r = seen[:, :, places], right[:, :, places]
        curve = (r.sum((1, 2, 3), keepdims=True) + 0.3) / (n.sum((1, 2, 3), keepdims=True) + 1)
        for axes in ((1, 3), (3,), ()):
            curve = (r.sum(axes, keepdims=True) + PRIOR * curve) / (n.sum(axes, keepdims=True) + PRIOR)
        curves[:, :, places] = curve
    # A sure match at the cursor is never weighed below one elsewhere: what the step count of a perfect prediction
    # rests on.
    curves[-1, :, 0] = np.maximum(curves[-1, :, 0], curves[-1].max((0, 1, 2)))
    return np.minimum.accumulate(np.clip(curves, 0, 1).reshape(NUM_CLASSES, -1), axis=1)


def calibrate(drafts: Array) -> list[float]:
    """[NUM_BINS]: what to add to a confidence, by the bin that it falls in.

    The candidate that looks best is more often one that looks too good, and doubtful ones the more so: of the
    drafts that are chosen fewer are accepted than of all the places that look alike.
    """
    return [round(float(p), 4) for p in drafts[1] / (drafts[0] + PRIOR)]


def at_knots(curves: Array) -> npt.NDArray[np.int64]:
    """[NUM_CLASSES, len(KNOTS)] in units of 1/`SURVIVAL_ONE`."""
    units = np.array([[survival_units(p) for p in row] for row in curves[:, np.array(KNOTS) - 1]])
    return np.minimum.accumulate(units, axis=1)


def training_records(pairs: Path) -> list[Record]:
    """The records of a corpus that a table is learned from, in the order that `learn_table` wants."""
    entries = [e for e in read_entries(pairs) if e.kind in KINDS and e.tokens == "tekken"]
    # Long records first, dealt out in turn: equal work for every process, the same sums whatever their number.
    return sorted((e.record for e in entries if e.record.output), key=lambda r: (-len(r.output), r.id))


def learn_table(
    records: Sequence[Record], config: DrafterConfig | None = None, jobs: int = 1
) -> dict[str, Any]:
    """What ``survival.json`` holds, learned from these records in `NUM_ROUNDS` replays.

    Args:
        records: of `training_records`.
        config: the drafter's settings; its own table is not read.
        jobs: processes. The table is the same whatever their number. With 1 the replays run in this process, with
            whatever constants the operations have here.
    """
    # The context index keeps as many tokens as the context has room for: one capacity for all processes.
    longest = max(len(r.output) for r in records)
    shares = [records[i::jobs] for i in range(jobs)]
    curves = np.power(0.9, np.arange(1, NUM_DRAFT_TOKENS + 1))[None].repeat(NUM_CLASSES, axis=0)
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        for i in range(NUM_ROUNDS):
            replay = partial(
                observe,
                survival=fit_curves(at_knots(curves).astype(np.float64), NUM_DRAFT_TOKENS),
                max_context_len=longest,
                config=config or DrafterConfig(),
            )
            parts = pool.map(replay, shares) if pool else list(map(replay, shares))
            runs, drafts = (np.sum([part[field] for part in parts], axis=0) for field in range(2))
            tokens, steps, accepted, rejected = np.sum([part.total for part in parts], axis=0)
            print(
                f"round {i}: {tokens / steps:.2f} tokens a step, {rejected / accepted:.3f} rejected per accepted",
                file=sys.stderr,
            )
            curves = learn(runs)
    return {
        "made_by": "python -m benchmarks.learn.survival",
        "records": len(records),
        "length_edges": list(LENGTH_EDGES),
        "margin_edges": list(MARGIN_EDGES),
        "knots": list(KNOTS),
        "unit": SURVIVAL_ONE,
        "seen": runs.sum(axis=1).astype(int).tolist(),
        "calibration": calibrate(drafts),
        "survival": at_knots(curves).tolist(),
    }


def write_table(table: dict[str, Any], path: Path) -> None:
    """Write one class a line: a new table reads as a diff."""
    text = (
        json.dumps(table, separators=(",", ":"))
        .replace('"survival":[[', '"survival":[\n[')
        .replace("],[", "],\n[")
    )
    path.write_text(text.replace("]]}", "]\n]}") + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped table")
    parser.add_argument("--pairs", type=Path, help="learn from this JSONL file instead of the tuning split")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        pairs = args.pairs or Path(folder) / "pairs.jsonl.gz"
        if args.pairs is None:
            corpus.main([str(pairs), "--set", "tune"])
        records = training_records(pairs)
    write_table(learn_table(records, jobs=args.jobs), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

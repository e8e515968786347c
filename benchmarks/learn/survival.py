"""Learn the survival tables that the drafter chooses by: ``python -m benchmarks.learn.survival [OUT.json]``.

Replays edit pairs of the tuning split, packages that no reported corpus contains, and predictions that belong to
another file. At every verification step each candidate that the drafter could have chosen is compared with what
really came next; a class's curve is the share of its candidates whose first k tokens were all right. The steps
are those of the drafter itself, so the replay is repeated with the table it just learned until they settle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpus import build as corpus
from benchmarks.quality.runs import read_entries
from gpu_align.config import DrafterConfig
from gpu_align.ops.constants import NUM_CLASSES
from gpu_align.ops.draft.tables import SHIPPED, fit_curves
from gpu_align.simulate import Record
from gpu_align.tune.fit import at_knots, calibrate, learn
from gpu_align.tune.observe import NUM_DRAFT_TOKENS, observe
from gpu_align.tune.table import make_table, write_table

NUM_ROUNDS = 3
#: Kinds of records to learn from: what real edits look like, and predictions of another file.
KINDS = ("python", "document", "json", "config", "sql", "unrelated")


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
    return make_table(
        at_knots(curves),
        calibrate(drafts),
        runs.sum(axis=1),
        len(records),
        "python -m benchmarks.learn.survival",
    )


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

"""Learn the survival tables that the drafter chooses by: ``python -m benchmarks.learn_survival [OUT.json]``.

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
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import corpus
from benchmarks.quality_runs import read_entries
from gpu_align.config import DrafterConfig
from gpu_align.ops.draft import length_quarters
from gpu_align.ops.draft.reference import Candidates, candidates, choose
from gpu_align.ops.draft.tables import (
    KNOTS,
    LENGTH_EDGES,
    MARGIN_EDGES,
    MAX_MATCH,
    NUM_BINS,
    NUM_CLASSES,
    NUM_LENGTHS,
    NUM_MARGINS,
    NUM_PLACES,
    NUM_TRUSTS,
    PLACE_CONTEXT,
    SHIPPED,
    SURVIVAL_ONE,
    SurvivalTables,
    fit_curves,
    survival_units,
)
from gpu_align.ops.lcs import lcs_extend_inplace, lcs_row_words
from gpu_align.ops.realign import realign
from gpu_align.ops.suffix_match import allocate_suffix_match, suffix_match
from gpu_align.simulate import Record

Array = npt.NDArray[np.float64]

NUM_DRAFT_TOKENS = 64
NUM_ROUNDS = 3
#: A class starts from the curve of the classes that say the same with less detail, worth this many observations.
PRIOR = 15
#: Kinds of records to learn from: what real edits look like, and predictions of another file.
KINDS = ("python", "document", "json", "config", "sql", "unrelated")


class Replay:
    """One request at a time through the operations of a step, with every candidate in view."""

    def __init__(self, records: Sequence[Record]) -> None:
        num_context = max(len(r.output) for r in records)
        num_text = max(max(len(r.prediction) for r in records), 1)
        self.token_ids = torch.zeros((1, num_context), dtype=torch.int32)
        self.prediction = torch.zeros((1, num_text), dtype=torch.int32)
        self.row = torch.zeros((1, lcs_row_words(num_text)), dtype=torch.int32)
        self.row_len, self.total_len, self.num_text, self.zero = (
            torch.zeros(1, dtype=torch.int32) for _ in range(4)
        )
        self.one = torch.ones(1, dtype=torch.int32)
        self.slots = torch.zeros(1, dtype=torch.int64)
        self.matches = [allocate_suffix_match(1, "cpu") for _ in range(4)]

    def start(self, record: Record) -> None:
        self.prediction[0, : len(record.prediction)] = torch.tensor(record.prediction, dtype=torch.int32)
        self.token_ids[0, : len(record.output)] = torch.tensor(record.output, dtype=torch.int32)
        self.num_text[0] = len(record.prediction)
        self.row_len[0] = -1

    def candidates(self, done: int) -> Candidates:
        """What the drafter chooses from after `done` tokens of the output."""
        self.total_len[0] = done
        lcs_extend_inplace(
            self.row, self.row_len, self.token_ids, self.zero, self.total_len,
            self.prediction, self.num_text, self.slots, self.one,
        )  # fmt: skip
        cursor, followed = realign(self.row, self.num_text, self.slots)
        context = self.token_ids, self.zero, self.total_len
        first, second, own, own_second = self.matches
        suffix_match(
            *context, self.prediction, self.num_text, self.slots,
            anchor=cursor, max_match=MAX_MATCH, from_start=True, out=first, runner_up=second,
        )  # fmt: skip
        suffix_match(
            *context, self.token_ids, self.total_len, self.slots,
            max_match=MAX_MATCH, out=own, runner_up=own_second,
        )  # fmt: skip
        found = tuple((int(match.end), int(match.length)) for match in self.matches)
        text = self.prediction.numpy()[0, : int(self.num_text)]
        return candidates(text, self.token_ids.numpy()[0, :done], done, int(cursor), int(followed), found)

    def right(self, found: Candidates, done: int, num_output: int) -> npt.NDArray[np.int64]:
        """[C]: how many tokens of each candidate's continuation are right, at most K."""
        truth = self.token_ids.numpy()[0, done : min(done + NUM_DRAFT_TOKENS, num_output)]
        ahead = np.arange(len(truth))
        runs = np.zeros(len(found.position), dtype=np.int64)
        for source, tokens in ((False, self.prediction.numpy()[0]), (True, self.token_ids.numpy()[0])):
            index = np.flatnonzero((found.is_context == source) & (found.room > 0))
            read = found.position[index, None] + ahead
            wrong = (tokens[np.minimum(read, len(tokens) - 1)] != truth) | (ahead >= found.room[index, None])
            runs[index] = np.where(wrong.any(axis=1), wrong.argmax(axis=1), len(truth))
        return runs


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


def observe(records: Sequence[Record], survival: npt.NDArray[np.int32]) -> Observed:
    """Replay all records with the drafter's own choices."""
    config = DrafterConfig()
    tables = SurvivalTables.from_survival(survival, "cpu", config.min_survival, config.min_survival_lost)
    quarters = length_quarters(config.length_factor)
    confidence = tables.confidence.numpy()
    runs, drafts = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1)), np.zeros((2, NUM_BINS))
    total = np.zeros(4, dtype=np.int64)
    replay = Replay(records)
    for record in records:
        replay.start(record)
        done, num_output = min(1, len(record.output)), len(record.output)
        total += [num_output, 1, 0, 0]
        while done < num_output:
            found = replay.candidates(done)
            right = replay.right(found, done, num_output)
            # A place that is both a match and in the window is one candidate, the first.
            places = np.where(found.is_context, -1 - found.position, found.position)
            distinct = np.unique(places[found.room > 0], return_index=True)[1]
            seen = np.flatnonzero(found.room > 0)[distinct]
            runs[found.klass[seen], right[seen]] += 1
            chosen = choose(found, tables.keep.numpy(), tables.gain.numpy(), quarters)
            drafted = min(chosen[1], num_output - done) if chosen else 0
            taken = min(int(right[chosen[0]]), drafted) if chosen else 0
            if chosen:
                promised = confidence[found.klass[chosen[0]], : min(taken + 1, drafted)]
                bins = np.minimum(promised * NUM_BINS, NUM_BINS - 1).astype(int)
                np.add.at(drafts[0], bins, 1)
                np.add.at(drafts[1], bins, (np.arange(len(bins)) < taken) - promised)
            total += [0, 1, taken, drafted - taken]
            done = min(done + taken + 1, num_output)
    return Observed(runs, drafts, total)


def learn(runs: Array) -> Array:
    """Survival at every k, [NUM_CLASSES, K]: counts, smoothed from the classes with less detail down.

    Matched length alone, then with the place, then with the margin, then with the trust. A match in the prediction
    and one in the context have nothing in common but their length, and share nothing.
    """
    survived = np.flip(np.flip(runs, 1).cumsum(1), 1)
    shape = NUM_LENGTHS, NUM_MARGINS, NUM_PLACES, NUM_TRUSTS
    seen, right = survived[:, 0].reshape(*shape, 1), survived[:, 1:].reshape(*shape, -1)
    curves = np.zeros_like(right)
    for places in (slice(0, PLACE_CONTEXT), slice(PLACE_CONTEXT, NUM_PLACES)):
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped table")
    parser.add_argument("--pairs", type=Path, help="learn from this JSONL file instead of the tuning split")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = args.pairs or Path(folder) / "pairs.jsonl.gz"
        if args.pairs is None:
            corpus.main([str(pairs), "--set", "tune"])
        entries = [e for e in read_entries(pairs) if e.kind in KINDS and e.tokens == "tekken"]
        records = [e.record for e in entries if e.record.output]
    # Long records first, dealt out in turn: equal work for every process, the same sums whatever their number.
    records.sort(key=lambda r: (-len(r.output), r.id))
    num_workers = os.cpu_count() or 1
    shares = [records[i::num_workers] for i in range(num_workers)]
    curves = np.power(0.9, np.arange(1, NUM_DRAFT_TOKENS + 1))[None].repeat(NUM_CLASSES, axis=0)
    runs, drafts = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1)), np.zeros((2, NUM_BINS))
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        for i in range(NUM_ROUNDS):
            survival = fit_curves(at_knots(curves).astype(np.float64), NUM_DRAFT_TOKENS)
            parts = pool.map(partial(observe, survival=survival), shares)
            runs, drafts = (np.sum([part[field] for part in parts], axis=0) for field in range(2))
            tokens, steps, accepted, rejected = np.sum([part.total for part in parts], axis=0)
            print(
                f"round {i}: {tokens / steps:.2f} tokens a step, {rejected / accepted:.3f} rejected per accepted"
            )
            curves = learn(runs)
    table = {
        "made_by": "python -m benchmarks.learn_survival",
        "records": len(records),
        "length_edges": list(LENGTH_EDGES),
        "margin_edges": list(MARGIN_EDGES),
        "knots": list(KNOTS),
        "unit": SURVIVAL_ONE,
        "seen": runs.sum(axis=1).astype(int).tolist(),
        "calibration": calibrate(drafts),
        "survival": at_knots(curves).tolist(),
    }
    # One class a line: a new table reads as a diff.
    text = (
        json.dumps(table, separators=(",", ":"))
        .replace('"survival":[[', '"survival":[\n[')
        .replace("],[", "],\n[")
    )
    args.out.write_text(text.replace("]]}", "]\n]}") + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

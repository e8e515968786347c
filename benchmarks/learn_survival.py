"""Learn the survival tables that the drafter chooses by: ``python -m benchmarks.learn_survival [OUT.json]``.

Replays edit pairs from packages that the reported corpus does not contain. At every verification step each
candidate that the drafter could have chosen is compared with what really came next; a class's curve is the
share of its candidates whose first k tokens were all right. The steps are those of the drafter itself, so the
replay is repeated with the table it just learned until the visited steps settle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track

from benchmarks import corpus
from gpu_align.config import DrafterConfig
from gpu_align.ops.draft import survival_units
from gpu_align.ops.draft.reference import Candidate, candidates, choose
from gpu_align.ops.draft.tables import (
    CLASS_CONTEXT,
    CLASS_WHOLE,
    LENGTH_EDGES,
    MAX_MATCH,
    NUM_CLASSES,
    NUM_DISTANCES,
    NUM_LENGTHS,
    SHIPPED,
    SURVIVAL_ONE,
    length_buckets,
)
from gpu_align.ops.lcs import lcs_extend_inplace, lcs_row_words
from gpu_align.ops.realign import realign
from gpu_align.ops.suffix_match import suffix_match
from gpu_align.simulate import Record, read_records

Array = npt.NDArray[np.float64]

#: Other packages than those of the corpus that results are reported on.
PACKAGES = (
    "click:8.0.4:8.1.7",
    "attrs:22.1.0:23.2.0",
    "urllib3:1.26.15:2.2.1",
    "packaging:21.3:24.0",
    "httpx:0.23.3:0.27.0",
    "starlette:0.27.0:0.37.2",
    "pydantic:2.0:2.7.0",
    "tqdm:4.62.0:4.66.4",
)
NUM_DRAFT_TOKENS = 64
NUM_ROUNDS = 4
#: A match in the prediction is worth this many observations of its length at any distance.
PRIOR = 20


class Replay:
    """One request at a time through the operations of a step, with every candidate in view."""

    def __init__(self, records: Sequence[Record]) -> None:
        num_context = max(len(r.output) for r in records)
        num_text = max(len(r.prediction) for r in records)
        self.token_ids = torch.zeros((1, num_context), dtype=torch.int32)
        self.prediction = torch.zeros((1, num_text), dtype=torch.int32)
        self.row = torch.zeros((1, lcs_row_words(num_text)), dtype=torch.int32)
        self.row_len, self.total_len, self.num_text, self.zero = (
            torch.zeros(1, dtype=torch.int32) for _ in range(4)
        )
        self.one = torch.ones(1, dtype=torch.int32)
        self.slots = torch.zeros(1, dtype=torch.int64)
        self.bucket = length_buckets()

    def start(self, record: Record) -> None:
        self.prediction[0, : len(record.prediction)] = torch.tensor(record.prediction, dtype=torch.int32)
        self.token_ids[0, : len(record.output)] = torch.tensor(record.output, dtype=torch.int32)
        self.num_text[0] = len(record.prediction)
        self.row_len[0] = -1

    def candidates(self, done: int) -> list[Candidate]:
        """What the drafter chooses from after `done` tokens of the output."""
        self.total_len[0] = done
        lcs_extend_inplace(
            self.row, self.row_len, self.token_ids, self.zero, self.total_len,
            self.prediction, self.num_text, self.slots, self.one,
        )  # fmt: skip
        cursor = realign(self.row, self.num_text, self.slots)
        context = self.token_ids, self.zero, self.total_len
        in_prediction = suffix_match(
            *context, self.prediction, self.num_text, self.slots,
            anchor=cursor, max_match=MAX_MATCH, from_start=True,
        )  # fmt: skip
        in_context = suffix_match(*context, self.token_ids, self.total_len, self.slots, max_match=MAX_MATCH)
        return candidates(
            done, done, int(self.num_text), int(cursor),
            (int(in_prediction.end), int(in_prediction.length)),
            (int(in_context.end), int(in_context.length)), self.bucket,
        )  # fmt: skip

    def run_length(self, candidate: Candidate, done: int, num_output: int) -> int:
        """How many tokens of the candidate's continuation are right, at most K."""
        text = (self.prediction if candidate.source == 1 else self.token_ids).numpy()[0]
        n = min(candidate.room, num_output - done, NUM_DRAFT_TOKENS)
        wrong = (
            text[candidate.position : candidate.position + n] != self.token_ids.numpy()[0, done : done + n]
        )
        return int(wrong.argmax()) if wrong.any() else n


def observe(records: Sequence[Record], survival: npt.NDArray[np.int32]) -> tuple[Array, Array, float, float]:
    """``(seen [C], survived [C, K], tokens per step, rejected per accepted)`` of one replay of all records."""
    config = DrafterConfig()
    min_survival = survival_units(config.min_survival)
    seen, survived = np.zeros(NUM_CLASSES), np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS))
    replay = Replay(records)
    steps = accepted = rejected = 0
    for record in track(records, description="replaying"):
        replay.start(record)
        done, num_output = min(1, len(record.output)), len(record.output)
        steps += 1
        while done < num_output:
            found = replay.candidates(done)
            right = {c: replay.run_length(c, done, num_output) for c in found}
            for candidate, n in right.items():
                seen[candidate.klass] += 1
                survived[candidate.klass, :n] += 1
            chosen = choose(found, survival, config.length_factor, min_survival)
            drafted = min(chosen[1], num_output - done) if chosen else 0
            taken = min(right[chosen[0]], drafted) if chosen else 0
            accepted, rejected, steps = accepted + taken, rejected + drafted - taken, steps + 1
            done = min(done + taken + 1, num_output)
    return seen, survived, sum(len(r.output) for r in records) / steps, rejected / max(accepted, 1)


def learn(seen: Array, survived: Array) -> Array:
    """Curves [C, K] that never rise: counts, smoothed towards classes that say the same with less detail."""
    curves = (survived + 0.5) / (seen[:, None] + 1)
    for bucket in range(1, NUM_LENGTHS):
        rows = slice(bucket * NUM_DISTANCES, (bucket + 1) * NUM_DISTANCES)
        pooled = (survived[rows].sum(axis=0) + 0.5) / (seen[rows].sum() + 1)
        curves[rows] = (survived[rows] + PRIOR * pooled) / (seen[rows, None] + PRIOR)
    # A sure match in the prediction is never weighed below one in the context, nor a whole match below any:
    # what the step count of a perfect prediction rests on.
    longest = (NUM_LENGTHS - 1) * NUM_DISTANCES
    curves[longest] = np.maximum(curves[longest], curves[CLASS_CONTEXT:].max(axis=0))
    curves[CLASS_WHOLE] = curves.max(axis=0)
    return np.minimum.accumulate(np.clip(curves, 0, 1), axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped table")
    parser.add_argument("--pairs", type=Path, help="learn from this JSONL file instead of the packages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = args.pairs or Path(folder) / "pairs.jsonl.gz"
        if args.pairs is None:
            corpus.main([str(pairs), *(word for p in PACKAGES for word in ("--packages", p))])
        records = read_records(pairs)
    curves = np.power(0.9, np.arange(1, NUM_DRAFT_TOKENS + 1))[None].repeat(NUM_CLASSES, axis=0)
    seen = np.zeros(NUM_CLASSES)
    for i in range(NUM_ROUNDS):
        survival = np.maximum(np.rint(curves * SURVIVAL_ONE), 1).astype(np.int32)
        seen, survived, tokens_per_step, rejected = observe(records, survival)
        print(f"round {i}: {tokens_per_step:.2f} tokens a step, {rejected:.3f} rejected per accepted")
        curves = learn(seen, survived)
    table = {
        "made_by": "python -m benchmarks.learn_survival",
        "packages": list(PACKAGES) if args.pairs is None else [args.pairs.name],
        "length_edges": list(LENGTH_EDGES),
        "seen": seen.astype(int).tolist(),
        "survival": [[round(float(p), 5) for p in curve] for curve in curves],
    }
    # One class a line: a new table reads as a diff.
    text = json.dumps(table).replace('"survival": [[', '"survival": [\n[').replace("], [", "],\n[")
    args.out.write_text(text.replace("]]}", "]\n]}") + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

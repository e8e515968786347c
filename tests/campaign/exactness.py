"""Every kernel against its reference and plain Python. A row is what one request of a ragged batch gets.

step          a `Drafter` with the kernel, one with the reference and an `Oracle` a request: drafts, confidences,
              sources and all that the two drafters remember
lcs           prefix row, length and edit script against the table of the textbook
suffix_match  the full scan against its loop
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter

    fast_interpreter.speed_up()

import torch

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.step_batches import StepBatch
from tests.gpu_align.ops import test_lcs as lcs
from tests.gpu_align.ops import test_suffix_match as suffix_match
from tests.gpu_align.ops.test_step import settings_of
from tests.gpu_align.step_harness import DEVICE, recipes_of

torch.set_num_threads(1)

#: Rows of each operation: (interpreted, natively, on small counts).
ROWS = {"step": (22_000, 6_000, 60), "lcs": (66_000, 3_000, 400), "suffix_match": (12_000, 1_000, 100)}
INTERPRETED, NATIVE, QUICK = range(3)


def step_rows(seed: int, tally: Tally, rows: int) -> Counter[str]:
    """One batch of requests for about as many rows."""
    rng = random.Random(seed)
    alphabet = rng.choice([2, 5, 8, 40, 500])
    recipes = recipes_of(rng, alphabet, rng.choice([5, 60])) if rng.random() < 0.5 else ()
    batch = StepBatch(
        rng, K=rng.choice([1, 2, 7, 8, 16, 33, 64, 128, 200, 256]), alphabet=alphabet,
        vocab_size=max(alphabet - (rng.random() < 0.1), 2), config=settings_of(rng),
        recipes=recipes, max_slots=rng.randint(2, 20), capacity=rng.choice([64, 100, 180, 300]),
    )  # fmt: skip
    counts = Counter({"recipes" if len(recipes) else "no recipes": 1})
    while counts["rows"] < rows:
        for row in batch.step():
            tally.check(row.holds, case=lambda row=row: {"op": "step", "group": seed, **row.case()})
            counts["rows"] += 1
            counts[row.kind] += 1
        counts.update(batch.standing())
        if batch.difference:
            tally.check(False, {"op": "step", "group": seed, "remembered": batch.difference}, count=0)
            break
    return counts


def lcs_rows(seed: int, tally: Tally, rows: int) -> Counter[str]:
    """Three results of a ragged batch, a row a request."""
    rng = random.Random(seed)
    shape = rng.randint(0, 12), rng.choice([0, 1, 9, 31, 32, 33, 40, 63, 64, 65])
    batch = lcs.make_batch(seed, min(rows, 256), *shape, rng.choice([1, 2, 3, 5, 30]))
    block_words = rng.choice([None, 1, 2])
    kernel, reference = (
        list(zip(*lcs.run_all(batch, backend, block_words), strict=True))
        for backend in ("triton", "reference")
    )
    width = shape[1]
    for ours, theirs, (context, prediction) in zip(kernel, reference, lcs.cut(batch), strict=True):
        table = lcs.table(context, prediction)
        script = lcs.script(table)
        length = table[-1][-1]
        row = table[-1] + [length] * (width - len(prediction))
        expected = length, row, script + [0] * (sum(shape) - len(script)), len(script)
        tally.check(
            ours == theirs == expected,
            {"op": "lcs", "group": seed, "context": context, "prediction": prediction,
             "block_words": block_words, "kernel": ours, "reference": theirs, "oracle": expected},
        )  # fmt: skip
    return Counter(rows=len(kernel))


def suffix_match_rows(seed: int, tally: Tally, rows: int) -> Counter[str]:
    """A ragged batch; a quarter of the requests have nothing to look up."""
    rng = random.Random(seed)
    B = min(rows, 64)
    requests = []
    for _ in range(B):
        alphabet = rng.choice([1, 2, 3, 9])
        prefix, context, text = (
            [rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 2, most // 2, most]))]
            for most in (3, 70, 66)
        )
        if rng.random() < 0.5:  # something to find
            text += context[rng.randrange(len(context) + 1) :] + text[:3]
        requests.append((prefix, context, text))
    slots = rng.sample(range(B + 2), B)
    active = [rng.choice([0, 1, 1, 5]) for _ in range(B)]
    anchors = [rng.randint(-3, 140) for _ in range(B)] if rng.random() < 0.7 else None
    max_match = rng.choice([1, 3, 32, 64])
    how = rng.randint(1, min(max_match, 3)), max_match
    kernel, reference = (
        suffix_match.run(backend, requests, slots, active, anchors, *how)
        for backend in ("triton", "reference")
    )
    for b, (_, context, text) in enumerate(requests):
        anchor = None if anchors is None else anchors[b]
        expected = suffix_match.oracle(context, text, anchor, *how) if active[b] else (-1, 0)
        tally.check(
            kernel[b] == reference[b] == expected,
            {"op": "suffix_match", "group": seed, "request": requests[b], "active": active[b],
             "anchor": anchor, "min_match, max_match": how,
             "kernel": kernel[b], "reference": reference[b], "oracle": expected},
        )  # fmt: skip
    return Counter(rows=B)


#: ``(seed, tally, rows)``: check about as many rows; what they were.
OPS: dict[str, Callable[[int, Tally, int], Counter[str]]] = {
    "step": step_rows,
    "lcs": lcs_rows,
    "suffix_match": suffix_match_rows,
}


def compare(c: Campaign, tally: Tally, sizes: int) -> Row:
    """All operations, as many rows of each as column `sizes` of `ROWS` says."""
    kinds: Counter[str] = Counter()
    for op, counts in ROWS.items():
        done, wanted = 0, counts[QUICK if c.quick else sizes]
        while done < wanted:
            tally.goes_on()
            found = OPS[op](c.rng.randrange(2**32), tally, min(wanted - done, c.size(300, 20)))
            done += found.pop("rows")
            kinds += found
        kinds[op] = done
    told = [f"{kinds[op]:,} {op}" for op in ROWS]
    told += [
        f"steps: {kinds['in sync']:,} in sync, {kinds['diverged']:,} diverged, {kinds['edits']:,} with edits"
    ]
    told += [f"{kinds['context']:,} drafts from context, {kinds['recipe']:,} from recipes"]
    return tally.row("; ".join(told))


def interpreted_elsewhere(c: Campaign, what: str) -> Row:
    """Where kernels run natively in this process, another one interprets them: Triton decides once a process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "CAMPAIGN_DIR": folder}
        command = [
            sys.executable,
            "-m",
            "tests.campaign.exactness",
            "--seed",
            str(c.seed),
            *["--quick"] * c.quick,
        ]
        subprocess.run(command, env={**os.environ, **environment}, check=False)
        for failure in (Path(folder) / "failures").glob("*.json"):
            c.keep(what, json.loads(failure.read_text())["case"])
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "kernels.json").read_text())["rows"]
    return Row(**rows[0])


def run(c: Campaign) -> Iterator[Row]:
    interpreted, native = "kernel = reference = oracle, interpreted", "the same natively"
    if DEVICE == "cuda":
        yield interpreted_elsewhere(c, interpreted)
        yield compare(c, c.tally(native, at_least=10_000, quick=500), NATIVE)
        return
    yield compare(c, c.tally(interpreted, at_least=100_000, quick=500), INTERPRETED)
    yield c.not_run(native, 10_000, "no GPU")


if __name__ == "__main__":
    main(run)

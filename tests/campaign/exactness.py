"""Every kernel against its reference and plain Python. A row is what one request of a ragged batch gets.

The bodies are those of tests/gpu_align/ops: `test_step`, `test_lcs`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter

    fast_interpreter.speed_up()

import torch

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.gpu_align.ops import test_lcs, test_step
from tests.gpu_align.step_batch import StepRow
from tests.gpu_align.step_harness import DEVICE

torch.set_num_threads(1)

#: Rows of each operation: (interpreted, natively, on small counts).
ROWS = {"step": (22_000, 6_000, 60), "lcs": (78_000, 4_000, 500)}
INTERPRETED, NATIVE, QUICK = range(3)


def check_rows(op: str, seed: int, tally: Tally, rows: int) -> Counter[str]:
    """Check about as many rows of an operation; what they were."""
    kinds: Counter[str] = Counter()
    if op == "step":
        for row in test_step.random_rows(seed, rows):
            if isinstance(row, StepRow):
                tally.check(not row.wrong, lambda row=row: {"group": seed, "wrong": row.wrong, **row.of})
                kinds.update(("rows", row.source))
            else:
                kinds += row
        return kinds
    for found in test_lcs.random_rows(seed, min(rows, 256)):
        tally.check(found["holds"], {"op": op, "group": seed, **found})
        kinds["rows"] += 1
    return kinds


def compare(c: Campaign, tally: Tally, sizes: int) -> Row:
    """All operations, as many rows of each as column `sizes` of `ROWS` says."""
    kinds: Counter[str] = Counter()
    for op, counts in ROWS.items():
        done, wanted = 0, c.count(counts[sizes], counts[QUICK])
        while done < wanted:
            tally.goes_on()
            found = check_rows(op, c.rng.randrange(2**32), tally, min(wanted - done, c.size(300, 20)))
            done += found.pop("rows")
            kinds += found
        kinds[op] = done
    told = [f"{kinds[op]:,} {op}" for op in ROWS]
    told += [
        f"steps: {kinds['in sync']:,} in sync, {kinds['diverged']:,} diverged, {kinds['edits']:,} with edits"
    ]
    told += [f"{kinds['context']:,} drafts from context, {kinds['recipe']:,} from recipes"]
    return tally.row("; ".join(told))


def run(c: Campaign) -> Iterator[Row]:
    interpreted, native = "kernel = reference = oracle, interpreted", "the same natively"
    if DEVICE == "cuda":
        yield c.not_run(interpreted, 100_000, "kernels run natively")
        yield compare(c, c.tally(native, at_least=10_000, quick=500), NATIVE)
        return
    yield compare(c, c.tally(interpreted, at_least=100_000, quick=500), INTERPRETED)
    yield c.not_run(native, 10_000, "no GPU")


if __name__ == "__main__":
    main(run)

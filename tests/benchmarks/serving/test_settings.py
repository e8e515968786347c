"""Which settings of the drafter serve most: the table, and what it is made of."""

from __future__ import annotations

import numpy as np

from benchmarks.serving import settings
from benchmarks.serving.trace import ONE, Trace


def trace_of(matched: int) -> Trace:
    """400 positions, each with four drafts of which so many are right, and known to be."""
    lengths = np.full(400, 4, np.int16)
    right = np.full(400, matched, np.int16)
    survival = np.zeros((400, 8), np.uint16)
    survival[:, :matched] = ONE
    survival[:, matched:4] = 1
    return Trace(np.array([0, 200, 400]), lengths, right, survival)


def test_throughput_is_that_over_none() -> None:
    good, bad = settings.speedups(trace_of(4), 0), settings.speedups(trace_of(0), 0)
    assert set(good) == {"1, 0", "64, 0", "256, 0", "1, 1", "64, 1", "256, 1"}
    assert 3 < good["1, 0"] <= 5
    assert all(0.9 < ratio <= 1 for ratio in bad.values())


def test_the_best_of_each_column_is_bold() -> None:
    columns = settings.speedups(trace_of(0), 0)
    rows = {"default": dict.fromkeys(columns, 2.0), "other": {**dict.fromkeys(columns, 1.5), "64, 1": 2.5}}
    [_, _, default, other] = settings.table(rows).splitlines()
    assert default == "| default | **2.00** | **2.00** | **2.00** | **2.00** | 2.00 | **2.00** |"
    assert other == "| other | 1.50 | 1.50 | 1.50 | 1.50 | **2.50** | 1.50 |"

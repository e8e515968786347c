"""Kernels, references and plain Python agree on random rows, as many as are asked for; see gpu_align/ops."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.gpu_align.ops import test_lcs, test_step
from tests.gpu_align.step_batch import StepRow


def test_a_step_is_the_same_on_all_backends(count: Callable[[int], int], rng: random.Random) -> None:
    rows = 0
    while rows < count(60):
        for row in test_step.random_rows(rng.randrange(2**32), 20):
            if isinstance(row, StepRow):
                assert not row.wrong, (row.wrong, row.of)
                rows += 1


def test_the_lcs_is_the_same_on_all_backends(count: Callable[[int], int], rng: random.Random) -> None:
    rows = 0
    while rows < count(200):
        for found in test_lcs.random_rows(rng.randrange(2**32), 100):
            assert found["holds"], found
            rows += 1

"""What the output repeats goes on: a draft from the own context wraps around where its match spans the period."""

import pytest

from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.policies import our_drafter
from tests.gpu_align.step_harness import BACKENDS, Request

K, VOCAB = 16, 200


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def draft_of(backend, output, capacity=256):
    request = Request(
        backend, [], (1,), K=K, vocab=VOCAB, capacity=capacity, length_factor=64, min_survival=0,
        min_survival_lost=0,
    )  # fmt: skip
    return request.step(output).tokens


@pytest.mark.parametrize("period", [1, 2, 3, 7, 15, 16])
def test_a_repetition_goes_on(backend, period):
    cell = list(range(10, 10 + period))
    assert draft_of(backend, [5, *cell, *cell]) == (cell * K)[:K]


@pytest.mark.parametrize("matched", range(1, 6))
def test_the_match_has_to_span_it(backend, matched):
    """Behind `a b c d e a b` nothing says yet that `a b c d e` comes a third time."""
    cell = [10, 11, 12, 13, 14]
    draft = draft_of(backend, [*cell, *cell[:matched]])
    again = cell[matched:] + cell[:matched]
    assert draft == (again if matched < len(cell) else (again * K)[:K])


def test_a_repetition_ends_where_the_row_of_the_engine_ends(backend):
    assert draft_of(backend, [10, 11, 12] * 3, capacity=15) == [10, 11, 12, 10, 11]


def test_a_row_of_zeros_takes_a_step_for_each_k():
    """Without going round, a draft would hold one token of it."""
    record = Record("zeros", [1, 2, 3], [], [4, 5, *[7] * 680, 6], None)
    pair = replay(our_drafter([record]), record, K)
    assert pair.steps < 60

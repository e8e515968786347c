"""The batches that contestants are timed on."""

from __future__ import annotations

import pytest

from benchmarks.speed.workload import STATES, STEP_TOKENS, Steps, make_texts


@pytest.mark.parametrize("state", STATES)
def test_the_states_of_a_batch(state: str) -> None:
    texts = make_texts(4, 160, state)
    same = (texts.outputs == texts.predictions).all(axis=1).tolist()
    assert same == {"aligned": [True] * 4, "lost": [False] * 4, "mixed": [False, True] * 2}[state]
    assert texts.done == 80
    steps = Steps(texts, "cpu")
    for _ in range(12):  # goes back to the middle on the way
        steps.advance()
        steps.check()
        written = int(steps.total_len[0])
        assert written % STEP_TOKENS == 0
        lost = texts.outputs[:, written - 1] != texts.predictions[:, written - 1]
        assert lost.tolist() == [not value for value in same]

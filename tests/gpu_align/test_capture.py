"""`Drafter.capture`: a recorded step gives what a call gives, and leaves the slots alone until it is replayed."""

import numpy as np

from tests.gpu_align.engine import Engine, same, snapshot

TEXTS = np.random.default_rng(2).integers(0, 60, (3, 120)).tolist()
SLOTS = [2, 0, 1]


def make() -> Engine:
    """Three requests, two of them with predictions, in the middle of their outputs."""
    engine = Engine("triton", K=8, vocab=60)
    for slot, text in enumerate(TEXTS):
        engine.add(slot, text if slot else [], [0] * 10, text[:30])
    return engine


def told(draft):
    return [tensor.cpu().tolist() for tensor in draft]


def test_a_replay_is_a_step_and_sees_requests_that_came_later():
    eager, recorded = make(), make()
    before = snapshot(recorded.drafter)
    step = recorded.drafter.capture(*recorded.inputs(SLOTS))
    assert same(before, recorded.drafter)
    for start, end in ((30, 30), (30, 33), (33, 42), (42, 43)):
        for engine in (eager, recorded):
            for slot, text in enumerate(TEXTS):
                engine.write(slot, text[start:end])
        expected = told(eager.drafter.propose(*eager.inputs(SLOTS)))
        assert told(step.replay()) == expected
    assert expected[3][0] == 1
    for engine in (eager, recorded):
        engine.drafter.add(2, [], prompt_len=10)
        engine.drafter.add(0, TEXTS[0], prompt_len=10)
    expected = told(eager.drafter.propose(*eager.inputs(SLOTS)))
    assert told(step.replay()) == expected
    assert (expected[3][0] != 1, expected[3][1]) == (True, 1)

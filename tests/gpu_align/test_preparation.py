"""`Drafter.prepare`: the next step finds the work done; `capture`: a recorded step gives what a call gives.

`StepBatch` calls `prepare`: no draft depends on it.
"""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu_align.drafter.steps import Preparation
from gpu_align.ops import layout as c
from gpu_align.ops.layout import Draft
from tests.gpu_align.engine import BACKENDS, Engine, Stream, Streams, distinct, same, snapshot


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_step_finds_the_work_done(backend):
    engine = Engine(backend, T=400)
    prompt, output = distinct(150), distinct(30, 500)
    engine.add(1, distinct(100, 200), prompt, output)
    engine.propose([2])
    before = [tensor.clone() for tensor in engine.drafter._draft]
    engine.drafter.prepare(engine.token_ids, engine.total_len, [1])
    assert all(torch.equal(a, b) for a, b in zip(before, engine.drafter._draft, strict=True))
    assert engine.drafter._state.align_state[1, c.SEEN] == 180
    done = snapshot(engine.drafter)
    engine.propose([1])
    assert same(done, engine.drafter)


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        ([0, 3], None),
        ([], None),
        *((wrong, ValueError) for wrong in ([4], [-1], [0, 1, 0])),
        ([0.5], TypeError),
    ],
)
def test_vacant_and_wrong_slots(slots, error):
    engine = Engine("reference")
    before = snapshot(engine.drafter)
    with pytest.raises(error, match="slot") if error else nullcontext():
        engine.drafter.prepare(engine.token_ids, engine.total_len, slots)
    assert same(before, engine.drafter)
    with pytest.raises(TypeError, match="total_len"):
        engine.drafter.prepare(engine.token_ids, engine.total_len.long(), [0])


def test_on_a_gpu_it_runs_beside_the_current_stream(monkeypatch):
    streams, seen = Streams(monkeypatch), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def make(out: Draft):
        def step(token_ids, total_len, slots, num_sampled):
            streams.run("step")
            seen.append((total_len.tolist(), slots.tolist(), num_sampled.tolist()))

        return step

    preparation = Preparation(make, 4, 8, torch.device("cpu"))
    preparation._stream = Stream()
    preparation.join()
    streams.run("before")
    preparation.start(torch.zeros(4, 9), torch.tensor([5, 6, 7, 8], dtype=torch.int32), [3, 1])
    streams.run("beside")
    preparation.join()
    preparation.join()
    streams.run("after")
    assert streams.before["step"] == streams.before["beside"] == {"before"}
    assert streams.before["after"] == {"before", "beside", "step"}
    assert seen == [([5, 6, 7, 8], [3, 1], [1, 1])]


@pytest.mark.parametrize("call", ["propose", "add", "remove", "replay", "prepare"])
def test_what_follows_waits_for_it(call):
    """In whatever way the drafter is called next."""
    engine = Engine("reference")
    engine.add(0, [1, 2, 3], [4], [1])
    tensors = engine.inputs([0])
    captured = engine.drafter.capture(*tensors)
    captured._graph = SimpleNamespace(replay=lambda: None)  # as on a GPU
    engine.drafter.prepare(engine.token_ids, engine.total_len, [0])
    joined = []
    engine.drafter._preparation.join = lambda: joined.append(call)
    {
        "propose": lambda: engine.drafter.propose(*tensors),
        "add": lambda: engine.drafter.add(1, [1], 0),
        "remove": lambda: engine.drafter.remove(0),
        "replay": captured.replay,
        "prepare": lambda: engine.drafter.prepare(engine.token_ids, engine.total_len, [0]),
    }[call]()
    assert joined


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_drafts_are_the_same():
    """Long prompts and thousands of lost tokens, beside work on the current stream."""
    rng = random.Random(3)
    engines = [Engine("triton", T=40_000, N=9000, vocab=50_000) for _ in range(2)]
    for slot in range(4):
        prompt, prediction = rng.choices(range(900), k=30_000), rng.choices(range(900), k=8000)
        output = rng.choices(range(900), k=4000 if slot % 2 else 0)
        for engine in engines:
            engine.add(slot, prediction, prompt, output)
    engines[0].drafter.prepare(engines[0].token_ids, engines[0].total_len, [0, 1, 2, 3])
    torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")
    for slot in range(4):
        for engine in engines:
            engine.write(slot, [slot, 5])
    assert engines[0].propose([0, 1, 2, 3]) == engines[1].propose([0, 1, 2, 3])


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

"""`Drafter.capture`: a recorded step gives what a call gives."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

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


def test_a_replay_takes_the_tokens_of_a_step():
    eager, recorded = make(), make()
    new = torch.zeros((3, 4), dtype=torch.int64, device=recorded.device)
    slots, num_sampled = recorded.inputs(SLOTS)
    step = recorded.drafter.capture(slots, num_sampled, new)
    for num, start in ((1, 30), (4, 31)):
        for row, slot in enumerate(SLOTS):
            eager.write(slot, TEXTS[slot][start : start + num])
            new[row, :num] = torch.tensor(TEXTS[slot][start : start + num])
        num_sampled.fill_(num)
        assert told(step.replay()) == told(eager.drafter.propose(*eager.inputs(SLOTS)))
    assert torch.equal(eager.token_ids, recorded.token_ids)
    assert torch.equal(eager.total_len, recorded.total_len)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_graph_is_recorded_whatever_other_threads_do_and_a_replay_sends_what_is_staged(monkeypatch):
    """A stand-in for CUDA: by default an allocation of any thread ends a recording."""
    engine, modes, ran = make(), [], []
    graph = SimpleNamespace(replay=lambda: ran.append("replay"))
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, stand_in in {
        "CUDAGraph": lambda: graph, "graph": lambda _, **how: modes.append(how) or nullcontext(),
        "current_stream": lambda _: stream, "device": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    slots, num_sampled = engine.inputs(SLOTS)
    captured = engine.drafter.capture(slots, num_sampled.as_subclass(OnGpu))
    assert [how["capture_error_mode"] for how in modes] == ["thread_local"]
    flush = engine.drafter._admission.flush
    monkeypatch.setattr(engine.drafter._admission, "flush", lambda: ran.append("flush") or flush())
    engine.drafter.remove(0)
    captured.replay()
    captured.replay()
    assert ran == ["flush", "replay", "replay"]

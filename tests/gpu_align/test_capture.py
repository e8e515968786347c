"""`Drafter.capture`: a recorded step gives what a call gives, and leaves the slots alone until it is replayed."""

import numpy as np
import pytest
import torch

from gpu_align import Drafter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, T, K = 60, 256, 8


class Engine:
    """Three requests, two of them with predictions, in the middle of their outputs."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.texts = rng.integers(0, VOCAB, (3, 120))
        self.drafter = Drafter(
            max_slots=4, max_context_len=T, max_prediction_len=200, num_draft_tokens=K, vocab_size=VOCAB,
            device=DEVICE, backend="triton",
        )  # fmt: skip
        rows = np.zeros((4, T), dtype=np.int32)
        for slot, text in enumerate(self.texts):
            self.drafter.add(slot, text if slot else [], prompt_len=10)
            rows[slot, 10:130] = text
        self.token_ids = torch.from_numpy(rows).to(DEVICE)
        self.total_len = torch.full((4,), 40, dtype=torch.int32, device=DEVICE)
        self.slots = torch.tensor([2, 0, 1], device=DEVICE)
        self.num_sampled = torch.ones(3, dtype=torch.int32, device=DEVICE)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.total_len, self.slots, self.num_sampled


def told(draft):
    return [tensor.cpu().tolist() for tensor in draft]


def test_a_replay_is_a_step():
    eager, recorded = Engine(), Engine()
    step = recorded.drafter.capture(*recorded.tensors)
    for grow in (0, 3, 9, 1):
        for engine in (eager, recorded):
            engine.total_len += grow
        assert told(step.replay()) == told(eager.drafter.propose(*eager.tensors))
        assert told(step.draft)[1] == told(eager.drafter.propose(*eager.tensors))[1]


def test_capturing_changes_no_state():
    engine = Engine()
    before = [tensor.clone() for tensor in engine.drafter._state]
    engine.drafter.capture(*engine.tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.drafter._state, strict=True))


def test_a_replay_sees_requests_that_came_later():
    engine = Engine()
    step = engine.drafter.capture(*engine.tensors)
    assert told(step.replay())[3][0] == 1
    engine.drafter.add(2, [], prompt_len=10)
    engine.drafter.add(0, engine.texts[0], prompt_len=10)
    source = told(step.replay())[3]
    assert (source[0] != 1, source[1]) == (True, 1)


def test_what_is_captured_is_checked():
    engine = Engine()
    with pytest.raises(TypeError, match="slots"):
        engine.drafter.capture(engine.token_ids, engine.total_len, engine.slots.int(), engine.num_sampled)

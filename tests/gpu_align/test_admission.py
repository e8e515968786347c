"""`Admission`: what came since the last step gets to the device at once, as if it had come one by one."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from gpu_align.drafter import admission, drafter
from gpu_align.ops import layout
from gpu_align.ops.index import BLOCK
from gpu_align.ops.layout import PAGE
from gpu_align.ops.step import make_step
from tests.gpu_align.engine import BACKENDS, INTERPRETED, Engine, distinct, edited, snapshot

#: Histories in the suite by the backend of admission and that of the step; `--campaign-count` times as many.
HISTORIES = {
    ("reference", "reference"): 20,
    ("triton", "reference"): 4 if INTERPRETED else 0,  # most of the interpreter's time is the step
    ("triton", "triton"): 1 if INTERPRETED else 20,
}


def held(engine: Engine) -> list[Any]:
    """All that means something of what a drafter holds: its slots, and the predictions in its arena."""
    drafter, (tokens, positions, offsets, *slots) = engine.drafter, snapshot(engine.drafter)
    texts = []
    for text in drafter._arena._texts.values():
        pages, num = slice(text.base, text.base + text.num_tokens), text.num_tokens
        num_offsets = (1 << 32 - admission.shift_of(num)) + 1
        texts.append([
            tokens[pages].tolist(), positions[pages][: num - 1].tolist(),
            offsets[text.base :][:num_offsets].tolist(),
        ])  # fmt: skip
        assert texts[-1][0] == text.tokens.tolist()
    # A vacant slot keeps what its last request left there.
    vacant = slots[0][:, layout.OUTPUT_START] == layout.NOWHERE
    for tensor in slots[1:]:
        tensor[vacant] = 0
    return [texts, *slots]


class Handed(Engine):
    """Writes no rows: the drafter does, of the tokens that it is given."""

    def __init__(self, backend: str, **how: Any) -> None:
        super().__init__(backend, **how)
        self.new: dict[int, list[int]] = {}

    def add(self, slot: int, prediction: Any, prompt: Any, output: Any = (), **how: Any) -> bool:
        self.new[slot] = []
        return self.drafter.add(slot, prediction, len(prompt), context=[*prompt, *output], **how)

    def write(self, slot: int, tokens: list[int]) -> None:
        self.new[slot] = tokens

    def propose(self, slots: list[int]) -> Any:
        slots_tensor, _ = self.inputs(slots)
        new = [self.new.get(slot, [0]) for slot in slots]
        num_sampled = torch.tensor([len(tokens) for tokens in new], dtype=torch.int32, device=self.device)
        rows = torch.tensor([[*tokens, 7, 7][:2] for tokens in new], device=self.device)
        draft = self.drafter.propose(slots_tensor, num_sampled, rows)
        return list(zip(*(t.tolist() for t in draft), strict=True))


class History:
    """Random calls of three drafters: one gets everything by itself, one all at its next step, one tokens, too."""

    def __init__(self, rng: random.Random, backend: str) -> None:
        longest, T = rng.choice([(300, 200), (300, 200), (1030, 200), (2500, 200), (300, 1200)])
        pages = rng.choice([2, 5, -(-longest // PAGE) + 2])
        sizes = {
            "max_slots": 5,
            "T": T,
            "N": longest,
            "K": 8,
            "vocab": 40,
            "max_prediction_tokens": pages * PAGE,
        }
        self.rng, self.engines = rng, [each(backend, **sizes) for each in (Engine, Engine, Handed)]
        lengths = [rng.choice([0, 1, 2, 60, 255, 256, 257, 300, longest]) for _ in range(6)]
        self.texts = [rng.choices(range(rng.choice([3, 40])), k=n) for n in lengths]
        self.T = T

    def add(self) -> None:
        rng, slot = self.rng, self.rng.randrange(5)
        text = rng.choice(self.texts)
        prompt = rng.choices(range(5), k=rng.randint(0, self.T // 2))
        output = edited(rng, text, 40, rng.randint(0, self.T // 3))
        how = {"kind": layout.TextKind(rng.random() < 0.4), "sharing_key": rng.choice([None, None, "a"])}
        found = {engine.add(slot, text, prompt, output, **how) for engine in self.engines}
        assert len(found) == 1

    def run(self, num_calls: int) -> None:
        rng = self.rng
        for _ in range(num_calls):
            kind = rng.random()
            if kind < 0.55:
                self.add()
            elif kind < 0.75:
                slot = rng.randrange(5)
                for engine in self.engines:
                    engine.drafter.remove(slot)
            else:
                self.step()
            self.engines[0].drafter.flush()
        self.step()

    def step(self) -> None:
        slots = self.rng.sample(range(5), self.rng.randint(1, 5))
        drafts = []
        for engine in self.engines:
            for slot in slots:
                if engine.total_len[slot] < self.T:
                    engine.write(slot, [slot])
            drafts.append(engine.propose(slots))
        assert drafts[0] == drafts[1] == drafts[2]
        one, *others = map(held, self.engines)
        for each in others:
            assert one[0] == each[0]
            assert all(torch.equal(*pair) for pair in zip(one[1:], each[1:], strict=True))
        for slot in slots:
            if self.engines[0].drafter._state.slot_meta[slot, layout.OUTPUT_START] == layout.NOWHERE:
                continue
            rows = [
                e.token_ids[slot, : e.total_len[slot]].tolist() for e in (self.engines[0], self.engines[2])
            ]
            assert rows[0] == rows[1]


@pytest.mark.parametrize(("backend", "step"), [how for how, number in HISTORIES.items() if number])
def test_all_at_once_is_as_one_by_one(
    backend: str, step: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "make_step", lambda _, *args: make_step(step, *args))
    for seed in range(HISTORIES[backend, step] * pytestconfig.getoption("--campaign-count")):
        History(random.Random(f"{backend} {seed}"), backend).run(25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_a_round(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that do not fit in a part of the ring follow in the next one."""
    monkeypatch.setattr(admission, "ROUND_WORDS", 700)
    engine, rounds = Engine(backend, max_slots=6, N=600), []
    admit = admission.admit
    monkeypatch.setattr(admission, "admit", lambda *args: rounds.append(args[4:6]) or admit(*args))
    for slot in range(6):
        engine.add(slot, distinct(300, slot), [900], [slot, slot + 1])
    drafts = engine.propose([*range(6)])
    assert [tokens[:16] for tokens, *_ in drafts] == [distinct(16, slot + 2) for slot in range(6)]
    assert rounds == [(6, 2), (0, 2), (0, 2)]
    # Nor do contexts, which are sent first.
    rounds.clear()
    for slot in range(6):
        context = [900, *distinct(198, slot)]
        engine.drafter.add(slot, distinct(300, slot + 6), 1, context=context)
    drafts = engine.propose([*range(6)])
    assert [tokens[:16] for tokens, *_ in drafts] == [distinct(16, slot + 198) for slot in range(6)]
    assert rounds == [(3, 0), (3, 0), (0, 2), (0, 2), (0, 2)]
    assert engine.total_len.tolist() == [199] * 6


def test_a_round_waits_for_none_of_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which may still read what they sent: not even where several come in each of two steps."""
    monkeypatch.setattr(admission, "ROUND_WORDS", 700)
    engine, seen, admit = Engine("reference", max_slots=6, N=600), [], admission.admit
    monkeypatch.setattr(admission, "admit", lambda *args: seen.append(id(args[3])) or admit(*args))
    ours = engine.drafter._admission
    ours._make_ring()
    ours._ring = [admission._Part(len(ours._ring[0].array), False) for _ in range(admission.RING)]
    for step in range(2):
        for slot in range(4):
            engine.add(slot, distinct(300, slot + 4 * step), [900], [slot, slot + 1])
        engine.propose([*range(4)])
    assert len(seen) == 4
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[0]


class Noted:
    """The submissions of a drafter to CUDA, none of which runs: kernels, copies, and events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(
            InterpretedFunction, "run", lambda kernel, *_, grid, **__: self.seen.append(kernel.fn.__name__)
        )
        engine.drafter._admission._make_ring()
        for part in engine.drafter._admission._ring:
            part.read = self
        for name in ("copy_", "fill_", "zero_", "clone", "to"):
            monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: self.seen.append(name))

    def record(self) -> None:
        self.seen.append("event")

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("num", [64, 256])
@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs it")
def test_submissions_of_many_that_come_together(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("triton", max_slots=num, N=1024, T=4096, vocab=2000)
    inputs = engine.inputs([*range(num)])
    noted = Noted(monkeypatch, engine)
    for slot in range(num):
        assert engine.drafter.add(slot, np.arange(1024) + slot, 900)
    engine.drafter.remove(5)
    assert noted.seen == []
    engine.drafter.propose(*inputs)
    assert noted.seen == ["admit_kernel", "event", "contexts_kernel", "step_kernel"]
    noted.seen.clear()
    engine.drafter._admission._started[:] = 1  # as the device says
    engine.drafter.propose(*inputs)
    engine.drafter.propose(*inputs)
    assert noted.seen == ["step_kernel"] * 2


def test_the_context_of_a_new_request_is_entered_by_a_grid() -> None:
    """Before its first step: that finds all of it in the index, and a request that is under way has no part."""
    engine, serial = (Engine("triton", max_slots=3, T=2 * BLOCK) for _ in range(2))
    serial.drafter._admission._is_parallel = False
    rng = random.Random(1)
    prompts = [rng.choices(range(60), k=n) for n in (BLOCK + 5, 3)]
    for each in (engine, serial):
        for slot, prompt in enumerate(prompts):
            each.add(slot, [], prompt, [1, 2])
    found = []
    for chosen in ([1], [0, 1], [0]):
        found.append([each.propose(chosen) for each in (engine, serial)])
        for each in (engine, serial):
            assert (
                each.drafter._state.align_state[chosen, layout.INDEXED].tolist()
                == each.total_len[chosen].tolist()
            )
            each.write(1, [7, 8])
    assert all(ours == theirs for ours, theirs in found)
    assert torch.equal(*(each.drafter._state.context_index[:2] for each in (engine, serial)))
    assert engine.drafter._admission._started.tolist() == [1, 1, 1]
    assert not engine.drafter._admission.is_busy

"""The smallest engine around a `Drafter`; backends, devices, poisoned memory, curves and edits to try one on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align import Drafter, TextKind
from gpu_align.drafter.survival import make_tables
from gpu_align.ops import layout
from gpu_align.ops.choose import NUM_CLASSES
from gpu_align.ops.step import make_step

#: Every test of a step runs on both; kernels are interpreted where there is no GPU.
BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Whether the triton backend takes seconds where the reference takes milliseconds.
INTERPRETED = DEVICE == "cpu"
POISON = -123


def distinct(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def device_of(backend: str) -> str:
    return "cpu" if backend == "reference" else DEVICE


def poison(drafter: Drafter) -> None:
    """Garbage in all that a vacant drafter holds, but for what says that its slots are vacant."""
    state = drafter._state
    for name, tensor in state._asdict().items():
        if name not in ("slot_meta", "align_state"):
            tensor.fill_(POISON)
    state.align_state[:, layout.SEEN + 1 :] = POISON
    for tensor in drafter._draft:
        tensor.fill_(77)


def use_curves(drafter: Drafter, curves: np.ndarray, backend: str) -> None:
    """Another step for a drafter: with these curves, [NUM_CLASSES, K] in units of 1/SURVIVAL_ONE."""
    floors = drafter.config.min_survival, drafter.config.min_survival_lost
    drafter._tables = make_tables(curves.astype(np.int32), drafter.device, *floors)
    drafter._step = make_step(
        backend, drafter._state, drafter._tables, drafter._recipes, drafter._draft, drafter._settings,
        drafter.token_ids, drafter.total_len,
    )  # fmt: skip


def flat_curves(value, K=8):
    """Every class alike: the longest draft is worth the most."""
    return np.full((NUM_CLASSES, K), value)


class Engine:
    """The smallest engine: it writes the rows and knows what the model will write."""

    def __init__(self, backend, *, max_slots=4, T=256, N=128, K=16, vocab=1000, curves=None, rows=(), **how):
        self.device = device_of(backend)
        self.K, self.T = K, T
        if not rows:
            how |= {"max_slots": max_slots, "max_context_len": T, "device": self.device}
        self.drafter = Drafter(
            *rows, max_prediction_len=N, num_draft_tokens=K, vocab_size=vocab, backend=backend, **how
        )
        poison(self.drafter)
        if curves is not None:
            use_curves(self.drafter, curves, backend)
        self.token_ids, self.total_len = self.drafter.token_ids, self.drafter.total_len

    def add(self, slot, prediction, prompt, output=(), **key):
        held = self.drafter.add(slot, prediction, len(prompt), **key)
        self.total_len[slot] = 0
        self.write(slot, [*prompt, *output])
        return held

    def write(self, slot, tokens):
        start = int(self.total_len[slot])
        self.token_ids[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len[slot] = start + len(tokens)

    def inputs(self, slots):
        """What `propose` and `capture` take."""
        slots = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return slots, torch.ones_like(slots, dtype=torch.int32)

    def propose(self, slots):
        """[(tokens, length, confidence, source)] in batch order."""
        return list(zip(*(t.tolist() for t in self.drafter.propose(*self.inputs(slots))), strict=True))

    def generate(self, slot, output):
        """Verification steps that writing `output` takes: the prefill, then drafts. Returns what each offered."""
        offered = []
        self.write(slot, output[:1])
        done = 1
        while done < len(output):
            tokens, length, _, source = self.propose([slot])[0]
            accepted = 0
            while accepted < min(length, len(output) - done) and tokens[accepted] == output[done + accepted]:
                accepted += 1
            offered.append((done, tokens[:length], accepted, source))
            step = output[done : done + accepted + 1]
            self.write(slot, step)
            done += len(step)
        return offered


def drafted(
    backend, prediction, output, prompt=(), *, K=8, T=256, kind=TextKind.PREDICTION, packs=None, **how
):
    """``(tokens, source, confidence)`` for one request, whose prediction is not the first of the arena."""
    engine = Engine(backend, T=T, N=300, K=K, **how)
    engine.drafter.add(0, [0], 0)
    engine.add(1, prediction, prompt, output, kind=kind, recipes=packs)
    [(tokens, length, confidence, source)] = engine.propose([1])
    return tokens[:length], source, confidence[:length]


class Event:
    """Arrived when somebody has waited for it."""

    def __init__(self) -> None:
        self.before: set[str] = set()
        self.waited = False

    def record(self, stream: Stream) -> None:
        self.before, self.waited = set(stream.before), False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


class Stream:
    """before: what has run when the next thing on this CUDA stream runs."""

    def __init__(self, device: Any = None) -> None:
        self.before: set[str] = set()

    def wait_stream(self, other: Stream | Event) -> None:
        self.before |= other.before

    wait_event = wait_stream

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Streams:
    """Of a CUDA device, which only notes what runs: of everything, what had run before it on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = self.current = Stream()
        self.before: dict[str, set[str]] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current, outside = stream, self.current
        yield
        self.current = outside

    def run(self, name: str) -> None:
        self.before[name] = set(self.current.before)
        self.current.before.add(name)


def snapshot(drafter):
    """A copy of all that a drafter holds on its device, once it has all that is staged."""
    drafter.flush()
    return [tensor.clone() for tensor in drafter._state]


def same(before, drafter):
    """Whether a drafter holds what it held."""
    drafter.flush()
    return all(torch.equal(a, b) for a, b in zip(before, drafter._state, strict=True))


def edited(generator: random.Random, prediction: list[int], alphabet: int, length: int) -> list[int]:
    """An output of `length` tokens as edits leave it: runs of the prediction, jumps, repetitions, renamings."""
    output: list[int] = []
    at = 0
    while len(output) < length:
        kind = generator.random()
        if kind < 0.6 and prediction:
            run = generator.randint(1, 40)
            output += prediction[at : at + run]
            at += run
            if at >= len(prediction):
                at = generator.randrange(len(prediction))
        elif kind < 0.7:
            output += [generator.randrange(alphabet) for _ in range(generator.randint(1, 6))]
        elif kind < 0.8:
            at += generator.randint(1, 8)
        elif kind < 0.85 and prediction:
            at = generator.randrange(len(prediction))
        elif kind < 0.9 and output:
            start = generator.randrange(len(output))
            output += output[start : start + generator.randint(1, 20)]
        else:
            output.append(generator.randrange(alphabet))
            at += 1
    if generator.random() < 0.4:
        old = generator.randrange(alphabet)
        new = [generator.randrange(alphabet) for _ in range(generator.randint(0, 3))]
        output = [token for word in output for token in (new if word == old else [word])] or output
    return output[:length]

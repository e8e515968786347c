"""The smallest engine, for tests of a `Drafter`."""

import torch

from gpu_align import Drafter
from tests.gpu_align.step_harness import device_of, poison, use_curves


class Engine:
    """The smallest engine: it owns the tensors and knows what the model will write."""

    def __init__(self, backend, *, max_slots=4, T=256, N=128, K=16, vocab=1000, curves=None, **how):
        self.device = device_of(backend)
        self.K, self.T = K, T
        self.drafter = Drafter(
            max_slots=max_slots, max_context_len=T, max_prediction_len=N, num_draft_tokens=K, vocab_size=vocab,
            device=self.device, backend=backend, **how,
        )  # fmt: skip
        poison(self.drafter)
        if curves is not None:
            use_curves(self.drafter, curves, backend)
        self.token_ids = torch.zeros((max_slots, T), dtype=torch.int32, device=self.device)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32, device=self.device)

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
        return self.token_ids, self.total_len, slots, torch.ones_like(slots, dtype=torch.int32)

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


def drafted(backend, prediction, output, prompt=(), *, K=8, T=256, memory=False, packs=None, **how):
    """``(tokens, source, confidence)`` for one request, whose prediction is not the first of the arena."""
    engine = Engine(backend, T=T, N=300, K=K, **how)
    engine.drafter.add(0, [0], 0)
    engine.add(1, prediction, prompt, output, memory=memory, recipes=packs)
    [(tokens, length, confidence, source)] = engine.propose([1])
    return tokens[:length], source, confidence[:length]


def snapshot(drafter):
    """A copy of all that a drafter holds on its device."""
    return [tensor.clone() for tensor in drafter._state]


def same(before, drafter):
    """Whether a drafter holds what it held."""
    return all(torch.equal(a, b) for a, b in zip(before, drafter._state, strict=True))

"""A ragged batch of requests in two drafters at once, the kernel's and the reference's, and an oracle for each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpu_align import Drafter, DrafterConfig, Recipes
from gpu_align.ops.constants import WAYS
from tests.gpu_align.ops.test_step import check_state, tables_of
from tests.gpu_align.step_harness import DEVICE, edited, poison, use_tables
from tests.gpu_align.step_oracle import Oracle

Lists = Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]
SOURCES = ("nothing", "prediction", "context", "recipe")


@dataclass
class Running:
    """A request in its slot. tokens: all that it will ever have; done: how many there are so far."""

    prediction: list[int]
    prompt_len: int
    tokens: list[int]
    oracle: Oracle
    done: int
    draft: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)


class Drafted(NamedTuple):
    """One row of a `Draft`, as lists: floats are compared by their bits, of which none is a NaN's."""

    token_ids: list[int]
    length: int
    confidence: list[float]
    source: int


class StepRow(NamedTuple):
    kind: str
    kernel: Drafted
    reference: Drafted
    oracle: Drafted
    of: dict[str, Any]

    @property
    def holds(self) -> bool:
        return self.kernel == self.reference == self.oracle

    def case(self) -> dict[str, Any]:
        found = {name: getattr(self, name)._asdict() for name in ("kernel", "reference", "oracle")}
        return {**self.of, **found}


class StepBatch:
    """Requests that come, go, are preempted and come back, a launch a step.

    difference: what a drafter remembers otherwise than the oracle, in words; empty where there is none.
    """

    def __init__(
        self, rng: random.Random, *, K: int, alphabet: int, vocab_size: int, config: DrafterConfig, recipes: Lists,
        max_slots: int, capacity: int,
    ) -> None:  # fmt: skip
        self.rng, self.K, self.alphabet, self.vocab_size = rng, K, alphabet, vocab_size
        self.config, self.lists, self.max_slots, self.capacity = config, recipes, max_slots, capacity
        self.longest = rng.choice([2, 40, 120, 120, 300, 300])
        tables_seed = rng.randrange(2**32)
        self.drafters = []
        for backend, device in (("triton", DEVICE), ("reference", "cpu")):
            drafter = Drafter(
                max_slots=max_slots, max_context_len=capacity, max_prediction_len=self.longest, num_draft_tokens=K,
                vocab_size=vocab_size, device=device, config=config, backend=backend,
                recipes=Recipes.from_lists(recipes) if recipes else None,
            )  # fmt: skip
            poison(drafter)
            use_tables(drafter, tables_of(random.Random(tables_seed), K, config, device), backend)
            self.drafters.append(drafter)
        #: What lies where nothing was written: tokens that would match.
        self.token_ids = torch.randint(0, alphabet, (max_slots, capacity), dtype=torch.int32)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32)
        self.running: dict[int, Running] = {}
        self.difference = ""
        for slot in rng.sample(range(max_slots), rng.randint((max_slots + 1) // 2, max_slots)):
            self.add(slot, self.arriving())

    def arriving(self) -> Running:
        """A new request, at some place of its output."""
        rng, alphabet = self.rng, min(self.alphabet, self.vocab_size)
        prediction = rng.choices(
            range(alphabet), k=min(rng.choice([0, 1, 2, 20, 60, 60, 100, 257, 300]), self.longest)
        )
        if rng.random() < 0.3:
            prediction = (prediction[:6] * 60)[: len(prediction)]
        prompt = rng.choices(range(self.alphabet), k=rng.randint(0, self.capacity // 3))
        if prediction and rng.random() < 0.3:
            prompt = (prediction * 60)[: len(prompt)]
        num = rng.randint(1, self.capacity - len(prompt))
        kind = rng.random()
        if kind < 0.25:  # follows its prediction to the end
            output = (prediction + rng.choices(range(self.alphabet), k=num))[:num]
        elif kind < 0.75:
            output = edited(rng, prediction, self.alphabet, num)
        else:
            output = rng.choices(range(self.alphabet), k=num)
        done = len(prompt) + rng.choice([0, 1, 1, min(num, 20)])
        return Running(
            prediction, len(prompt), [*prompt, *output], self.oracle_of(prediction, len(prompt)), done
        )

    def oracle_of(self, prediction: list[int], prompt_len: int) -> Oracle:
        config = self.config
        return Oracle(
            prediction, prompt_len, self.drafters[1]._tables, K=self.K, quarters=int(4 * config.length_factor),
            vocab_size=self.vocab_size, capacity=self.capacity, min_match=config.min_match,
            min_context_match=config.min_context_match, use_context=config.use_context, recipes=self.lists,
            recipe_floor=config.min_survival_recipe,
        )  # fmt: skip

    def add(self, slot: int, request: Running) -> None:
        for drafter in self.drafters:
            assert drafter.add(slot, request.prediction, request.prompt_len)
        self.running[slot] = request
        request.splits.append(-1)

    def turn_over(self) -> None:
        """Some requests end, some are preempted and come back in another slot, some tokens are taken back."""
        rng = self.rng
        for slot, request in list(self.running.items()):
            kind = rng.random()
            if request.done >= len(request.tokens) or kind < 0.02:
                del self.running[slot]
                if rng.random() < 0.7:  # else it is overwritten
                    for drafter in self.drafters:
                        drafter.remove(slot)
                    if rng.random() < 0.3:
                        continue
                self.add(slot, self.arriving())
            elif kind < 0.04:
                others = [s for s in range(self.max_slots) if s not in self.running]
                if others:
                    del self.running[slot]
                    for drafter in self.drafters:
                        drafter.remove(slot)
                    self.add(rng.choice(others), request)
            elif kind < 0.05:
                request.done = rng.randint(min(request.prompt_len, request.done), request.done)
                request.oracle = self.oracle_of(request.prediction, request.prompt_len)
        if not self.running:
            self.add(rng.randrange(self.max_slots), self.arriving())

    def step(self) -> Iterator[StepRow]:
        """One launch for some of the slots, vacant ones among them; a row each."""
        rng = self.rng
        self.turn_over()
        slots = rng.sample(sorted(self.running), rng.randint(1, len(self.running)))
        vacant = [s for s in range(self.max_slots) if s not in self.running]
        if vacant and rng.random() < 0.3:
            slots.insert(rng.randint(0, len(slots)), rng.choice(vacant))
        sampled = [0 if rng.random() < 0.07 else self.advance(self.running.get(slot)) for slot in slots]
        for slot, request in self.running.items():
            self.token_ids[slot, : request.done] = torch.tensor(
                request.tokens[: request.done], dtype=torch.int32
            )
            self.total_len[slot] = request.done
        inputs = (
            self.token_ids, self.total_len, torch.tensor(slots), torch.tensor(sampled, dtype=torch.int32),
        )  # fmt: skip
        kernel, reference = (
            list(
                map(
                    Drafted,
                    *(column.tolist() for column in drafter.propose(*(x.to(drafter.device) for x in inputs))),
                )
            )
            for drafter in self.drafters
        )
        for b, slot in enumerate(slots):
            yield self.row(slot, sampled[b], kernel[b], reference[b])
        self.compare_memory([s for s, n in zip(slots, sampled, strict=True) if n])

    def advance(self, request: Running | None) -> int:
        """How many tokens a request samples: often what was drafted and one more, as far as it is right."""
        if request is None:
            return 1
        rng, before = self.rng, request.done
        num = rng.choice([1, 1, 1, 2, 3, 20])
        if rng.random() < 0.6:
            coming = request.tokens[before:]
            num = 1 + [*(a == b for a, b in zip(request.draft, coming, strict=False)), False].index(False)
        request.done = min(before + num, len(request.tokens))
        request.splits.append(request.done)
        return max(num, 1)

    def row(self, slot: int, sampled: int, kernel: Drafted, reference: Drafted) -> StepRow:
        request = self.running.get(slot)
        if request is None:
            tokens = self.token_ids[slot, : int(self.total_len[slot])].tolist()
            of: dict[str, Any] = {"slot": "vacant", "tokens": tokens}
            draft, class_id, source = [], -1, 0
        else:
            tokens = request.tokens[: request.done]
            of = {
                "prediction": request.prediction, "prompt_len": request.prompt_len, "tokens": tokens, "K": self.K,
                "vocab_size": self.vocab_size, "capacity": self.capacity, "config": vars(self.config),
                "recipes": self.lists, "splits (-1: a new slot)": list(request.splits), "num_sampled": sampled,
            }  # fmt: skip
            draft, class_id, source = request.oracle.step(tokens) if sampled else ([], -1, 0)
            request.draft = draft
        table = self.drafters[1]._recipes if source == 3 else self.drafters[1]._tables
        promised = table.confidence[class_id, : len(draft)].tolist() if draft else []
        rest = self.K - len(draft)
        last = tokens[-1] if tokens and 0 <= tokens[-1] < self.vocab_size else 0
        expected = Drafted([*draft, *[last] * rest], len(draft), [*promised, *[0.0] * rest], source)
        return StepRow(SOURCES[source], kernel, reference, expected, of)

    def compare_memory(self, slots: list[int]) -> None:
        """Of each request that was drafted for: where it stands, its edits and its context's index."""
        for slot in (s for s in slots if s in self.running):
            oracle = self.running[slot].oracle
            for drafter in self.drafters:
                try:
                    check_state(drafter, slot, oracle, "")
                    if oracle.use_context:
                        assert drafter._state.context_index[slot].tolist() == self.index_of(oracle), (
                            "context index"
                        )
                except AssertionError as error:
                    self.difference = f"slot {slot} of the drafter on {drafter._step}: {error}"

    def index_of(self, oracle: Oracle) -> list[list[int]]:
        index = [[-1] * WAYS for _ in range(1 << oracle.context_index_bits)]
        for (bucket, way), end in oracle.recent.items():
            index[bucket][way] = end
        return index

    def standing(self) -> dict[str, int]:
        """Of the requests that are there now: how many are in sync, diverged, have edits."""
        oracles = [r.oracle for r in self.running.values() if r.prediction]
        in_sync = sum(oracle.in_sync for oracle in oracles)
        edits = sum(any(e is not None for e in oracle.edits) for oracle in oracles)
        return {"in sync": in_sync, "diverged": len(oracles) - in_sync, "edits": edits}

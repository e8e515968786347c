"""Requests of a batch in a drafter of each backend at once, with an oracle beside each: a launch a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_align import Drafter, DrafterConfig, Recipes, TextKind
from gpu_align.ops import layout as c
from gpu_align.ops.align import NO_EDIT, WINDOW
from gpu_align.ops.choose import NUM_CLASSES, SURVIVAL_ONE
from gpu_align.ops.layout import SEEN, WAYS
from gpu_align.ops.recipes import LINE_END, NUM_RUNS
from gpu_align.ops.step import StepLaunch
from gpu_align.texts.several import joined
from gpu_align.texts.skeletons import kind_of
from tests.gpu_align.engine import BACKENDS, device_of, edited, flat_curves, poison, snapshot, use_curves
from tests.gpu_align.step_oracle import Oracle

SOURCES = ("nothing", "prediction", "context", "recipe", "memory")
#: What a step may not write.
READ_ONLY = ("prediction_tokens", "positions", "offsets", "slot_meta")


class Known(NamedTuple):
    """What is drafted without having been read: of recipes and of indentation."""

    lists: Sequence[Any] = ()
    shapes: Sequence[Any] = ()
    shape_of: Any = ()
    indents: Any = None
    line_ends: Sequence[int] = ()
    runs: Any = None
    shapes_first: bool = False

    @classmethod
    def draw(cls, rng: random.Random, alphabet: int, vocab_size: int) -> Known:
        lists = recipes_of(rng, alphabet, rng.choice([0, 0, 5, 60, 200]))
        shapes, shape_of = shapes_of(rng, alphabet, rng.choice([0, 0, 30]))
        indents = indents_of(rng, vocab_size) if rng.random() < 0.6 else ()
        return cls(lists, shapes, shape_of, *indents)._replace(shapes_first=len(lists) % 2 > 0)

    @property
    def packs(self) -> list[str]:
        """In their order."""
        names = ["words"] * bool(self.lists) + ["shapes"] * bool(self.shapes)
        return names[::-1] if self.shapes_first else names

    @property
    def recipes(self) -> Recipes | None:
        made = {
            "words": Recipes.from_lists(self.lists),
            "shapes": Recipes.from_lists(self.shapes, shape_of=self.shape_of) if self.shapes else None,
        }
        recipes = Recipes.join({name: made[name] for name in self.packs}) if self.packs else None
        if self.indents is None:
            return recipes
        return replace(Recipes.from_lists([]) if recipes is None else recipes, indents=self.indents)


@dataclass
class Running:
    """A request in its slot. tokens: all that it will ever have; done: how many there are so far.

    splits: after how many tokens it was stepped; -1 is a new slot.
    """

    prediction: list[int]
    prompt_len: int
    tokens: list[int]
    done: int
    kind: TextKind = TextKind.PREDICTION
    packs: Sequence[str] | None = None
    end_tokens: Sequence[int] = ()
    temperature: float = 0.0
    oracle: Any = field(default=None, repr=False)
    draft: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)

    def enter(self, drafter: Drafter, slot: int) -> None:
        how: dict[str, Any] = {"kind": self.kind, "recipes": self.packs}
        how |= {"end_tokens": self.end_tokens}
        how |= {"temperature": self.temperature} if self.temperature else {}  # 0 is the default
        assert drafter.add(slot, self.prediction, self.prompt_len, **how)


def standing_of(drafter: Drafter, slot: int) -> tuple[Any, ...]:
    """Where a request stands: in sync, its cursor, or anchor, where it diverged, LCS row; how much was in sync;
    its edits, oldest first, None where one was invalidated."""
    state = drafter._state.align_state[slot].tolist()
    rows, count = drafter._state.edits[slot].tolist(), state[c.NUM_EDITS]
    rows = [rows[i % c.MAX_EDITS] for i in range(max(0, count - c.MAX_EDITS), count)]
    edits = [tuple(row[:6]) if row[0] != NO_EDIT else None for row in rows]
    if state[c.IN_SYNC] > 0:
        return True, state[c.CURSOR], state[c.NUM_IN_SYNC], edits
    row = [*accumulate(~state[c.LCS_ROW] >> j & 1 for j in range(WINDOW))]
    return False, state[c.ANCHOR], state[c.DIVERGED_AT], row, state[c.NUM_IN_SYNC], edits


def standing_by(oracle: Oracle) -> tuple[Any, ...]:
    edits = [None if edit is None else tuple(map(int, edit)) for edit in oracle.edits]
    if oracle.in_sync:
        return True, oracle.cursor, oracle.num_in_sync, edits
    return False, oracle.anchor, oracle.diverged_at, oracle.row[1:], oracle.num_in_sync, edits


class Drafted(NamedTuple):
    """One row of a `Draft`, as lists: floats are compared by their bits, of which none is a NaN's."""

    token_ids: list[int]
    length: int
    confidence: list[float]
    source: int


def drafted(drafter: Drafter, *inputs: torch.Tensor) -> list[Drafted]:
    """The drafts of a batch: token_ids, total_len, slots, num_sampled."""
    token_ids, total_len, *batch = inputs
    drafter.token_ids.copy_(token_ids)
    drafter.total_len.copy_(total_len)
    return list(map(Drafted, *(x.tolist() for x in drafter.propose(*(x.to(drafter.device) for x in batch)))))


class StepRow(NamedTuple):
    """One request in one step. wrong: what differs from the oracle, in words; empty where nothing does."""

    source: str
    wrong: list[str]
    of: dict[str, Any]
    expected: Drafted
    request: Running | None


class StepBatch:
    """Garbage lies wherever nothing was written, and behind the tokens of a row such as would match."""

    def __init__(
        self, rng: random.Random, *, backends: Sequence[str] = BACKENDS, K: int = 16, vocab_size: int = 1000,
        alphabet: int = 4, capacity: int = 512, max_slots: int = 6, longest: int = 1500,
        config: DrafterConfig | None = None, curves: Any = None, known: Known | None = None,
    ) -> None:  # fmt: skip
        self.rng, self.K, self.vocab_size, self.capacity = rng, K, vocab_size, capacity
        self.alphabet, self.max_slots, self.longest = alphabet, max_slots, longest
        self.config, self.known = config or DrafterConfig(), known or Known()
        self.curves = curves
        self.drafters = {backend: self.make(backend, max_slots) for backend in backends}
        self.token_ids = torch.randint(0, alphabet, (max_slots, capacity), dtype=torch.int32)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32)
        self.running: dict[int, Running] = {}

    def make(self, backend: str, max_slots: int) -> Drafter:
        """A drafter with the settings of this batch."""
        # A slice of a wider tensor: the stride is not the length.
        rows = torch.zeros((max_slots, self.capacity + 16), dtype=torch.int32, device=device_of(backend))
        drafter = Drafter(
            rows[:, : self.capacity], torch.zeros_like(rows[:, 0]), max_prediction_len=self.longest,
            num_draft_tokens=self.K, vocab_size=self.vocab_size, config=self.config, backend=backend,
            recipes=self.known.recipes,
        )  # fmt: skip
        poison(drafter)
        if self.curves is not None:
            use_curves(drafter, self.curves, backend)
        return drafter

    def oracle_of(self, request: Running) -> Oracle:
        config = self.config
        return Oracle(
            request.prediction, request.prompt_len, self.drafters["reference"]._tables, K=self.K,
            quarters=int(4 * config.length_factor), vocab_size=self.vocab_size, capacity=self.capacity,
            min_match=config.min_match, use_context=config.use_context, kind=request.kind,
            end_tokens=[token for token in request.end_tokens if 0 <= token < self.vocab_size][:8],
            temperature=request.temperature,
        )  # fmt: skip

    def add(self, slot: int, request: Running) -> None:
        for drafter in self.drafters.values():
            request.enter(drafter, slot)
        if request.oracle is None:
            request.oracle = self.oracle_of(request)
        self.running[slot] = request
        request.splits.append(-1)

    def remove(self, slot: int) -> None:
        self.running.pop(slot, None)
        for drafter in self.drafters.values():
            drafter.remove(slot)

    def take_back(self, request: Running, done: int) -> None:
        """The engine's row becomes shorter: the request starts over."""
        request.done, request.oracle = done, self.oracle_of(request)

    def move(self, slot: int, request: Running, other: int) -> None:
        """A request comes back in another slot."""
        self.remove(slot)
        self.add(other, request)

    def write(self) -> None:
        for slot, request in self.running.items():
            tokens = request.tokens[: request.done]
            self.token_ids[slot, : request.done] = torch.tensor(tokens, dtype=torch.int32)
            self.total_len[slot] = request.done

    def step(
        self, slots: Sequence[int], sampled: Sequence[int], wild: dict[int, int] | None = None
    ) -> list[StepRow]:
        """One launch, and what each of its requests got. wild: what `total_len` says of a slot instead, to the
        kernel, which cannot look at it: below 0 is 0, above the row's end is the end."""
        self.write()
        for slot, total in (wild or {}).items():
            self.total_len[slot] = total
        inputs = (
            self.token_ids, self.total_len, torch.tensor(slots, dtype=torch.int64),
            torch.tensor(sampled, dtype=torch.int32),
        )  # fmt: skip
        before = {backend: snapshot(drafter) for backend, drafter in self.drafters.items()}
        found = {backend: self._launch(d, inputs, wild) for backend, d in self.drafters.items()}
        rows = [self._row(b, *of, found) for b, of in enumerate(zip(slots, sampled, strict=True))]
        active = [s for s, n in zip(slots, sampled, strict=True) if n and s in self.running]
        others = [s for s in range(self.max_slots) if s not in active]
        for backend, drafter in self.drafters.items():
            state = drafter._state
            for name, old, new in zip(state._fields, before[backend], state, strict=True):
                same = slice(None) if name in READ_ONLY else others
                if not torch.equal(old[same], new[same]):
                    rows[0].wrong.append(f"{backend} writes {name} of a slot that is not active")
        return rows

    def _launch(self, drafter: Drafter, inputs: Any, wild: Any) -> list[Drafted]:
        if wild and isinstance(drafter._step, StepLaunch):
            drafter.token_ids.copy_(inputs[0])
            drafter.total_len.copy_(inputs[1])
            drafter._step(*(tensor.to(drafter.device) for tensor in inputs[2:]))
            return list(map(Drafted, *(column[: len(inputs[2])].tolist() for column in drafter._draft)))
        token_ids, total_len, *rest = inputs
        return drafted(drafter, token_ids, total_len.clamp(0, self.capacity), *rest)

    def _row(self, b: int, slot: int, num: int, found: dict[str, list[Drafted]]) -> StepRow:
        request = self.running.get(slot)
        total = min(max(int(self.total_len[slot]), 0), self.capacity)
        tokens = self.token_ids[slot, :total].tolist()
        draft, class_id, source = request.oracle.step(tokens) if request and num else ([], -1, 0)
        promised = (
            self.drafters["reference"]._tables.confidence[class_id, : len(draft)].tolist() if draft else []
        )
        rest = self.K - len(draft)
        last = tokens[-1] if tokens and 0 <= tokens[-1] < self.vocab_size else 0
        expected = Drafted([*draft, *[last] * rest], len(draft), [*promised, *[0.0] * rest], source)
        if self.known.packs or self.known.indents is not None:  # which the oracle does not know
            expected = found["reference"][b]
            draft, source = expected.token_ids[: expected.length], expected.source
        wrong = [f"{backend}: {got[b]}" for backend, got in found.items() if got[b] != expected]
        of: dict[str, Any] = {"slot": slot, "tokens": tokens, "num_sampled": num, "expected": expected}
        if request is not None:
            request.draft = draft
            of |= {"request": replace(request, splits=[*request.splits]), "K": self.K, "config": self.config}
            of |= {"vocab_size": self.vocab_size, "capacity": self.capacity, "known": self.known}
            if num:
                wrong += self._remembered_wrongly(slot, total)
        return StepRow(SOURCES[source], wrong, of, expected, request if num else None)

    def _remembered_wrongly(self, slot: int, total: int) -> list[str]:
        oracle, wrong = self.running[slot].oracle, []
        for backend, drafter in self.drafters.items():
            state = drafter._state
            if int(state.align_state[slot, SEEN]) != total:
                wrong.append(f"{backend} has not seen {total} tokens")
            if oracle.text and (found := standing_of(drafter, slot)) != (expected := standing_by(oracle)):
                wrong.append(f"{backend}: {found}, not {expected}")
            if oracle.use_context and total:  # without tokens nothing is in the index
                index = [[-1] * WAYS for _ in range(1 << oracle.context_index_bits)]
                for (bucket, way), end in oracle.recent.items():
                    index[bucket][way] = end
                if state.context_index[slot].tolist() != index:
                    wrong.append(f"{backend}: context index")
        return wrong

    def advance(self, request: Running, follow: float = 0.6) -> int:
        """How many tokens a request samples: often what was drafted and one more, as far as it is right."""
        before, num = request.done, self.rng.choice([1, 1, 1, 2, 3, 7, 20, 200])
        if self.rng.random() < follow:
            coming = request.tokens[before:]
            num = 1 + [*(a == b for a, b in zip(request.draft, coming, strict=False)), False].index(False)
        request.done = min(before + num, len(request.tokens))
        request.splits.append(request.done)
        return max(num, 1)

    def walk(self, follow: float = 0.6, steps: int = 10_000) -> Iterator[StepRow]:
        """Run the requests that are there to their ends."""
        rng = self.rng
        for _ in range(steps):
            slots = [s for s, request in self.running.items() if request.done < len(request.tokens)]
            if not slots:
                return
            slots = rng.sample(slots, rng.randint(1, len(slots)))
            sampled = [self.advance(self.running[s], follow) if rng.random() < 0.95 else 0 for s in slots]
            yield from self.step(slots, sampled)

    # What is drawn at random.

    @classmethod
    def draw(
        cls, rng: random.Random, backends: Sequence[str] = BACKENDS, K: int = 0, capacity: int = 0,
        max_slots: int = 0, knows: Callable[[Known], object] | None = None,
    ) -> StepBatch:  # fmt: skip
        """A batch of any settings, tables and recipes, with requests in half of its slots or more.

        knows: what holds of its recipes, of some that are drawn.
        """
        alphabet = rng.choice([2, 5, 8, 40, 500])
        K = K or rng.choice([1, 2, 7, 8, 16, 33, 64, 65, 128, 200, 256])
        # Of some batches the model does not have the last token that is written.
        vocab_size = max(alphabet - (rng.random() < 0.1), 2)
        kind, max_slots = rng.random(), max_slots or rng.randint(2, 20)
        flat, drawn = flat_curves(SURVIVAL_ONE // 2, K), random_curves(rng.randrange(2**32), K)
        known = Known.draw(rng, alphabet, vocab_size) if rng.random() < 0.7 and len(backends) > 1 else None
        while knows and not knows(known or Known()):
            known = Known.draw(rng, alphabet, vocab_size)
        config = DrafterConfig(
            length_factor=rng.choice([0, 0.5, 8, 64]), min_survival=rng.choice([0, 0.05, 0.3]),
            min_survival_lost=rng.choice([0, 0.35]), min_survival_recipe=rng.choice([0, 0.3, 0.5]),
            min_match=rng.choice([1, 1, 2, 3]), use_context=rng.random() < 0.85,
        )  # fmt: skip
        batch = cls(
            rng, backends=backends, K=K, vocab_size=vocab_size, alphabet=alphabet,
            capacity=capacity or rng.choice([64, 100, 180, 300, 512]), max_slots=max_slots,
            longest=rng.choice([2, 40, 120, 300, 500]), config=config,
            curves=None if kind < 0.5 else drawn if kind < 0.8 else flat,
            known=known,
        )  # fmt: skip
        for slot in rng.sample(range(max_slots), rng.randint((max_slots + 1) // 2, max_slots)):
            batch.add(slot, batch.arriving())
        return batch

    def arriving(self) -> Running:
        """A new request, at some place of its output."""
        rng, alphabet = self.rng, self.alphabet
        length = min(rng.choice([0, 1, 2, 5, 60, 60, 255, 256, 257, 300, 500]), self.longest)
        prediction = rng.choices(range(min(alphabet, self.vocab_size)), k=length)
        if rng.random() < 0.3:
            prediction = (prediction[: rng.choice([6, 20])] * 90)[:length]
        prompt = rng.choices(range(alphabet), k=rng.randint(0, self.capacity // 3))
        num = rng.randint(1, self.capacity - len(prompt))
        if prediction and rng.random() < 0.3:
            prompt = (prediction * self.capacity)[: len(prompt)]
        kind = rng.random()
        if kind < 0.3 and self.known.line_ends and self.known.runs:
            prediction, output = reindented(rng, self.vocab_size, self.known.line_ends, self.known.runs)
            prediction = prediction[: self.longest]
        elif kind < 0.45:  # follows its prediction to the end
            output = prediction + rng.choices(range(alphabet), k=num)
        elif kind < 0.85:
            output = edited(rng, prediction, alphabet, num)
        else:
            output = rng.choices(range(alphabet), k=num)
        tokens = [*prompt, *output[:num]]
        done = min(len(prompt) + rng.choice([0, 1, 1, 20]), len(tokens))
        if len(tokens) % 5 == 0:  # a prompt that is not all there
            done = len(prompt) // 3
        kind = TextKind.MEMORY if rng.random() < 0.3 else TextKind.PREDICTION
        if kind and rng.random() < 0.7:
            kind = TextKind.RELATED_MEMORY
        if kind == TextKind.RELATED_MEMORY and rng.random() < 0.7:  # a skeleton, which may begin with a gap
            at = range(rng.choice([0, 3]), len(prediction), rng.choice([5, 16, 40]))
            for gap, k in enumerate(at, c.FIRST_GAP):
                prediction[k] = gap
            kind = kind_of(prediction)
        elif kind == TextKind.PREDICTION and prediction and rng.random() < 0.4:  # several samples
            size, words = len(prediction) // 3 + 1, min(alphabet, self.vocab_size)
            prediction = joined([edited(rng, prediction, words, size) for _ in range(rng.choice([2, 5]))])
            prediction = prediction[: self.longest]
        known = self.known.packs
        packs = [None, None, known, known[::-1], known[:1], known[1:], []][len(tokens) % 7]
        # Ids outside of the vocabulary, and more than a slot keeps.
        ends = rng.sample(range(-2, alphabet + 20), rng.choice([0, 0, 1, 3, 12]))
        temperature = rng.choice([0, 0.3, 0.7, 1.0])
        return Running(prediction, len(prompt), tokens, done, kind, packs, ends, temperature)

    def turn_over(self) -> None:
        """Some requests end, some are preempted and come back in another slot, some tokens are taken back."""
        rng = self.rng
        for slot, request in list(self.running.items()):
            kind = rng.random()
            if request.done >= len(request.tokens) or kind < 0.02:
                if rng.random() < 0.7:  # else it is overwritten
                    self.remove(slot)
                    if rng.random() < 0.3:
                        continue
                self.add(slot, self.arriving())
            elif kind < 0.04:
                if others := [s for s in range(self.max_slots) if s not in self.running]:
                    self.move(slot, request, rng.choice(others))
            elif kind < 0.05:
                begin = min(request.prompt_len, request.done)
                self.take_back(request, rng.randint(begin, request.done))
        if not self.running:
            self.add(rng.randrange(self.max_slots), self.arriving())

    def random_step(self) -> list[StepRow]:
        """One launch for some of the slots, vacant ones among them."""
        rng = self.rng
        self.turn_over()
        slots = rng.sample(sorted(self.running), rng.randint(1, len(self.running)))
        vacant = [s for s in range(self.max_slots) if s not in self.running]
        if vacant and rng.random() < 0.3:
            slots.insert(rng.randint(0, len(slots)), rng.choice(vacant))
        sampled = [
            0 if rng.random() < 0.07 else self.advance(self.running[s]) if s in self.running else 1
            for s in slots
        ]
        return self.step(slots, sampled)

    def standing(self) -> dict[str, int]:
        """Of the requests that are there now: how many are in sync, diverged, have edits, bring samples."""
        oracles = [r.oracle for r in self.running.values() if r.prediction]
        in_sync = sum(oracle.in_sync for oracle in oracles)
        edits = sum(any(e is not None for e in oracle.edits) for oracle in oracles)
        sampled = sum(oracle.is_sampled for oracle in oracles)
        return {"in sync": in_sync, "diverged": len(oracles) - in_sync, "edits": edits, "samples": sampled}


def random_curves(seed, K):
    """[NUM_CLASSES, K], never rising and 1 or more, some steep and some flat."""
    generator = np.random.default_rng(seed)
    top = SURVIVAL_ONE * generator.random((NUM_CLASSES, 1))
    rate = generator.choice([0.3, 0.8, 0.99, 1.0], (NUM_CLASSES, 1))
    return np.maximum(np.floor(top * rate ** np.arange(K)), 1).astype(np.int64)


def recipes_of(rng: random.Random, alphabet: int, num: int):
    """Contexts of 1 to 8 tokens, many of them ends of others; a few say that nothing is likely."""
    recipes = {}
    for _ in range(num):
        context = tuple(rng.randrange(alphabet) for _ in range(rng.choice([1, 1, 2, 2, 3, 5, 8])))
        length = rng.choice([0, 1, 2, 5, 8, 16])
        alive = [1.0]
        for _ in range(length):
            alive.append(alive[-1] * rng.choice([0.3, 0.8, 0.95, 1.0]))
        for start in range(rng.randint(1, len(context))):
            continuation = tuple(rng.randrange(alphabet) for _ in range(length))
            recipes[context[start:]] = continuation, tuple(alive[1:])
    return tuple((context, *rest) for context, rest in recipes.items())


def shapes_of(rng: random.Random, alphabet: int, num: int):
    """``(recipes, shape_of)``: shapes as contexts, and what each token is in one; some tokens are beyond it."""
    shape_of = np.array(
        [rng.choice([t, t, -2, -3, -4, -5]) for t in range(max(alphabet - 1, 1))], dtype=np.int32
    )
    recipes = {}
    for context, *rest in recipes_of(rng, alphabet, num):
        items = [int(shape_of[t]) if t < len(shape_of) else -5 for t in context]
        shape = tuple([-6, *items][:8] if rng.random() < 0.2 else items)
        recipes.setdefault(shape, rest)
    return tuple((shape, *rest) for shape, rest in recipes.items()), shape_of


def indents_of(rng: random.Random, alphabet: int):
    """``(indents, line_ends, runs)``: what some tokens do to lines, as a step and as the oracle read it."""
    tokens = rng.sample(range(alphabet), min(alphabet - 1, 12))
    line_ends = tokens[: len(tokens) // 3]
    runs = {}
    for token in tokens[len(line_ends) :]:
        runs.setdefault((rng.choice([1, 2, 2, 3, 3, 4, 5, 127]), rng.choice([0, 0, 1])), token)
    indents = np.zeros(NUM_RUNS + rng.choice([alphabet, max(tokens) + 1]), dtype=np.int32)
    indents[:NUM_RUNS] = -1
    for (width, character), token in runs.items():
        indents[2 * width + character] = token
        indents[NUM_RUNS + token] = 2 * width + character
    indents[[NUM_RUNS + token for token in line_ends]] = LINE_END
    return indents, line_ends, runs


def reindented(rng: random.Random, alphabet: int, line_ends, runs) -> tuple[list[int], list[int]]:
    """``(prediction, output)``: the same lines with other indentations, here and there with another word."""
    texts: tuple[list[int], list[int]] = [], []
    by = rng.choice([-1, 1, 1, 2])
    for _ in range(rng.randint(2, 25)):
        (width, character), run = rng.choice(list(runs.items()))
        words = [rng.randrange(alphabet) for _ in range(rng.randint(0, 12))]
        end = rng.choice(line_ends)
        if rng.random() < 0.1:
            by = rng.choice([-1, 0, 1])
        texts[0].extend([run, *words, end])
        if rng.random() < 0.1:
            words = [*words[:3], rng.randrange(alphabet), *words[4:]]
        texts[1].extend([runs.get((width + by, character), run), *words, rng.choice([end, end, *line_ends])])
    return texts

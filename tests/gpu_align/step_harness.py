"""One request in a `Drafter`, a step at a time, in poisoned memory; and edits and curves to try it on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpu_align import Drafter, DrafterConfig
from gpu_align.ops import constants
from gpu_align.ops.constants import LINE_END, NUM_CLASSES, NUM_RUNS, SURVIVAL_ONE
from gpu_align.ops.draft import SurvivalTables
from gpu_align.ops.reference import step as reference
from gpu_align.ops.state import StepState
from gpu_align.ops.step import make_step
from tests.gpu_align.step_oracle import Oracle

#: Every test of a step runs on both; kernels are interpreted where there is no GPU.
BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Whether the triton backend takes seconds where the reference takes milliseconds.
INTERPRETED = DEVICE == "cpu"
POISON = -123


def distinct(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def device_of(backend: str) -> str:
    return DEVICE if backend == "triton" else "cpu"


def poison(drafter: Drafter) -> None:
    """Garbage in all that a vacant drafter holds, but for what says that its slots are vacant."""
    state = drafter._state
    for tensor in (
        state.prediction_tokens,
        state.positions,
        state.offsets,
        state.lcs_row,
        state.edits,
        state.context_index,
    ):
        tensor.fill_(POISON)
    state.align_state[:, constants.SEEN + 1 :] = POISON
    for tensor in drafter._draft:
        tensor.fill_(77)


def use_tables(drafter: Drafter, tables: SurvivalTables, backend: str) -> None:
    """Another step for a drafter: with these tables."""
    drafter._tables = tables
    drafter._step = make_step(
        backend, drafter._state, tables, drafter._recipes, drafter._draft, drafter._settings
    )


def request_in(drafter_state: StepState, slot: int, tokens: Sequence[int]) -> reference.RequestArrays:
    """A request as the reference sees it. In plain Python: what is compiled returns no arrays."""
    load = getattr(reference.load_request, "py_func", reference.load_request)
    return load(drafter_state.numpy(), slot, np.array(tokens, dtype=np.int32))


class Edit(NamedTuple):
    """An edit that is remembered: its surroundings, which output token is its first, tokens taken and given, and
    whether one with the same surroundings was remembered."""

    before: int
    at: int
    behind: int
    start: int
    old: int
    new: int
    repeats: int = 0


class Standing(NamedTuple):
    """Where a request stands; of `cursor` and of anchor, diverged_at and row only those that hold are there.

    edits: oldest first, None where one was invalidated.
    """

    in_sync: bool
    cursor: int | None
    anchor: int | None
    diverged_at: int | None
    num_in_sync: int
    edits: list[Edit | None]
    row: list[int] | None


def standing_of(drafter: Drafter, slot: int) -> Standing:
    aligned = drafter._state.align_state[slot].tolist()
    rows, count = drafter._state.edits[slot].tolist(), aligned[constants.NUM_EDITS]
    # Edit number i is in row i mod MAX_EDITS.
    rows = [rows[i % constants.MAX_EDITS] for i in range(max(0, count - constants.MAX_EDITS), count)]
    edits = [Edit(*row[:7]) if row[constants.EDIT_BEFORE] != constants.NO_EDIT else None for row in rows]
    in_sync, num_in_sync = aligned[constants.IN_SYNC] > 0, aligned[constants.NUM_IN_SYNC]
    if in_sync:
        return Standing(True, aligned[constants.CURSOR], None, None, num_in_sync, edits, None)
    anchor, diverged_at = aligned[constants.ANCHOR], aligned[constants.DIVERGED_AT]
    return Standing(
        False, None, anchor, diverged_at, num_in_sync, edits, drafter._state.lcs_row[slot].tolist()
    )


def standing_by(oracle: Oracle) -> Standing:
    edits = [None if e is None else Edit(*e) for e in oracle.edits]
    if oracle.in_sync:
        return Standing(True, oracle.cursor, None, None, oracle.num_in_sync, edits, None)
    return Standing(False, None, oracle.anchor, oracle.diverged_at, oracle.num_in_sync, edits, oracle.row[1:])


class Drafted(NamedTuple):
    tokens: list[int]
    source: int
    confidence: list[float]


class Request:
    """A request in the middle one of three slots. The drafts of every step are checked for their padding.

    curves: [NUM_CLASSES, K] in units of 1/SURVIVAL_ONE instead of the shipped ones, with the thresholds `floor`
    and `floor_lost` in the same unit.
    """

    SLOT = 1

    def __init__(
        self, backend, prediction, prompt=(), *, K=8, capacity=1200, vocab=1000, curves=None, floor=1,
        floor_lost=1, recipes=None, memory=False, packs=None, **config,
    ):  # fmt: skip
        self.device, self.K, self.vocab = device_of(backend), K, vocab
        self.prompt, self.capacity = list(prompt), capacity
        self.drafter = Drafter(
            max_slots=3, max_context_len=capacity, max_prediction_len=max(len(prediction), 1),
            num_draft_tokens=K, vocab_size=vocab, device=self.device, backend=backend,
            config=DrafterConfig(**config), recipes=recipes,
        )  # fmt: skip
        poison(self.drafter)
        if curves is not None:
            tables = SurvivalTables.from_survival(
                np.asarray(curves, dtype=np.int32),
                self.device,
                floor / SURVIVAL_ONE,
                floor_lost / SURVIVAL_ONE,
            )
            use_tables(self.drafter, tables, backend)
        # Another prediction first, so that ours does not begin where the arena does.
        self.drafter.add(0, [0], 0)
        self.drafter.add(self.SLOT, prediction, len(self.prompt), memory=memory, recipes=packs)
        self.token_ids = torch.full((3, capacity), POISON, dtype=torch.int32, device=self.device)
        self.total_len = torch.full((3,), POISON, dtype=torch.int32, device=self.device)

    def step(self, output) -> Drafted:
        """What is drafted behind prompt and `output`."""
        tokens = [*self.prompt, *output]
        self.token_ids[self.SLOT] = POISON
        self.token_ids[self.SLOT, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len[self.SLOT] = len(tokens)
        draft = self.drafter.propose(
            self.token_ids,
            self.total_len,
            torch.tensor([self.SLOT], dtype=torch.int64, device=self.device),
            torch.ones(1, dtype=torch.int32, device=self.device),
        )
        [drafted], [length], [confidence], [source] = (tensor.tolist() for tensor in draft)
        last = tokens[-1] if tokens and 0 <= tokens[-1] < self.vocab else 0
        assert drafted[length:] == [last] * (self.K - length)
        assert confidence[length:] == [0.0] * (self.K - length)
        assert all(0 < p <= 1 for p in confidence[:length])
        assert (source != 0) == (length > 0)
        return Drafted(drafted[:length], source, confidence[:length])

    @property
    def standing(self) -> Standing:
        """Without the edits that were invalidated."""
        found = standing_of(self.drafter, self.SLOT)
        return found._replace(edits=[edit for edit in found.edits if edit is not None])

    def write_over(self, position, token):
        """Put a token into the prediction that `add` would have refused; the index does not know it."""
        base = int(self.drafter._state.slot_meta[self.SLOT, constants.PREDICTION_BASE])
        self.drafter._state.prediction_tokens[base + position] = token


def flat_curves(value, K=8):
    """Every class alike: the longest draft is worth the most."""
    return np.full((NUM_CLASSES, K), value)


def random_curves(seed, K):
    """[NUM_CLASSES, K], never rising and 1 or more, some steep and some flat."""
    generator = np.random.default_rng(seed)
    top = SURVIVAL_ONE * generator.random((NUM_CLASSES, 1))
    rate = generator.choice([0.3, 0.8, 0.99, 1.0], (NUM_CLASSES, 1))
    return np.maximum(np.floor(top * rate ** np.arange(K)), 1).astype(np.int64)


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
        old, new = (
            generator.randrange(alphabet),
            [generator.randrange(alphabet) for _ in range(generator.randint(0, 3))],
        )
        output = [token for word in output for token in (new if word == old else [word])] or output
    return output[:length]


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

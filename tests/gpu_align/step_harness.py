"""Poisoned memory for a `Drafter`; edits, curves, recipes and indentations to try one on."""

from __future__ import annotations

import random

import numpy as np
import torch

from gpu_align import Drafter
from gpu_align.ops import layout
from gpu_align.ops.choose import NUM_CLASSES, SURVIVAL_ONE
from gpu_align.ops.choose.survival import SurvivalTables
from gpu_align.ops.compose import LINE_END, NUM_RUNS
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
    drafter._tables = SurvivalTables.from_survival(curves.astype(np.int32), drafter.device, *floors)
    drafter._step = make_step(
        backend, drafter._state, drafter._tables, drafter._recipes, drafter._draft, drafter._settings
    )


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

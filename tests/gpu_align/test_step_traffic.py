"""A step is one launch, and what it reads and writes does not grow with the prediction, nor with the recipes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from gpu_align import Recipes
from gpu_align.ops.recipes import SHAPE_IDENTIFIER
from tests.gpu_align.engine import Engine

if torch.cuda.is_available():
    pytest.skip("counted under the interpreter", allow_module_level=True)

VOCAB, STEPS = 50_000, 6


def tokens_of(rng: np.random.Generator, num_tokens: int) -> np.ndarray[Any, Any]:
    """Half of the tokens are drawn from a few, as in source code, where some tokens are everywhere."""
    often, seldom = rng.integers(0, 40, num_tokens), rng.integers(40, VOCAB, num_tokens)
    return np.where(rng.random(num_tokens) < 0.5, often, seldom)


def traffic_of(num_text: int, state: str, recipes: Recipes | None = None) -> int:
    """Bytes of `STEPS` steps of one request in the middle of its output, each of which is one launch.

    Counted are lanes whose mask is set; an atomic counts as both, a load and a store.
    """
    prediction = tokens_of(np.random.default_rng(7), num_text)
    # The same output length for every prediction: the context is not what varies.
    output = prediction[:500].copy()
    if state != "aligned":
        wrong = slice(None) if state == "lost" else slice(3, None, 9)
        output[wrong] = tokens_of(np.random.default_rng(3), 500)[wrong]
    step = {"aligned": 17, "mixed": 8, "lost": 1}[state]
    engine = Engine("triton", max_slots=1, T=1024, N=num_text, vocab=VOCAB, recipes=recipes)
    engine.add(0, prediction, [], output[: -STEPS * step].tolist())
    engine.propose([0])
    launches, moved = [], []

    def counting(name: str, pointer: int, mask: int, times: int) -> Any:
        original = getattr(InterpreterBuilder, name)

        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            width = args[pointer].get_element_ty().primitive_bitwidth // 8
            moved.append(times * int(args[mask].data.sum()) * width)
            return original(self, *args, **kwargs)

        return patch.object(InterpreterBuilder, name, count)

    launch = GridExecutor.__call__
    with (
        counting("create_masked_load", 0, 1, 1),
        counting("create_masked_store", 0, 2, 1),
        counting("create_atomic_rmw", 1, 3, 2),
        patch.object(
            GridExecutor, "__call__", lambda *args, **how: launches.append(1) or launch(*args, **how)
        ),
    ):
        for done in range(500 - STEPS * step, 500, step):
            engine.write(0, output[done : done + step].tolist())
            engine.propose([0])
    assert len(launches) == STEPS
    return sum(moved)


@pytest.mark.parametrize("state", ["aligned", "mixed", "lost"])
def test_no_more_bytes_for_a_longer_prediction(state: str) -> None:
    assert traffic_of(8192, state) <= 1.1 * traffic_of(1024, state)


def literal(count: int) -> Recipes:
    return Recipes.from_lists([((t,), (t + 1, 7), (0.9, 0.5)) for t in range(count)])


def shapes(count: int) -> Recipes:
    shape_of = np.where(np.arange(VOCAB) % 3 == 0, np.arange(VOCAB), SHAPE_IDENTIFIER).astype(np.int32)
    lists = [((3 * t, SHAPE_IDENTIFIER), (t + 1, 7), (0.9, 0.5)) for t in range(count)]
    return Recipes.join({"words": literal(100), "shapes": Recipes.from_lists(lists, shape_of=shape_of)})


#: Recipes, those beside which they are, and how many bytes more a step may take: the tokens and confidences of the
#: one that is drafted; of shapes two times 32 tokens and their items, keys and packs of 32 buckets, too.
RECIPES = {"literal": (literal, None, 160), "shapes": (shapes, literal(100), 160 + 4 * 32 * 4 + 2 * 32 * 32)}


@pytest.mark.parametrize("kind", RECIPES)
def test_as_many_bytes_for_one_recipe_as_for_many(kind: str) -> None:
    make, beside, more = RECIPES[kind]
    without = traffic_of(1024, "lost", beside)
    for count in (1, 20_000):
        assert 0 <= traffic_of(1024, "lost", make(count)) - without <= STEPS * more

"""A step is one launch, and what it reads and writes does not grow with the prediction."""

import numpy as np
import pytest
import torch

from gpu_align import Drafter, Recipes
from gpu_align.ops.constants import SHAPE_IDENTIFIER

if torch.cuda.is_available():
    pytest.skip("counted under the interpreter", allow_module_level=True)

from tests.gpu_align.traffic import counted

VOCAB, K, STEPS = 50_000, 16, 6


def text_of(num_tokens: int) -> np.ndarray:
    """Half of the tokens are drawn from a few, as in source code, where some tokens are everywhere."""
    rng = np.random.default_rng(7)
    often, seldom = rng.integers(0, 40, num_tokens), rng.integers(40, VOCAB, num_tokens)
    return np.where(rng.random(num_tokens) < 0.5, often, seldom)


def traffic_of(num_text: int, state: str, recipes: Recipes | None = None) -> tuple[int, int]:
    """``(launches, bytes)`` of `STEPS` steps of one request in the middle of its output."""
    prediction = text_of(num_text)
    rng = np.random.default_rng(3)
    output = prediction[: num_text // 2].copy()
    if state != "aligned":
        often = rng.random(len(output)) < 0.5
        novel = np.where(often, rng.integers(0, 40, len(output)), rng.integers(40, VOCAB, len(output)))
        wrong = slice(None) if state == "lost" else slice(3, None, 9)
        output[wrong] = novel[wrong]
    # The same output length for every prediction: the context is not what varies.
    output = output[:500]
    drafter = Drafter(
        max_slots=1, max_context_len=1024, max_prediction_len=num_text, num_draft_tokens=K, vocab_size=VOCAB,
        device="cpu", backend="triton", recipes=recipes,
    )  # fmt: skip
    drafter.add(0, prediction, prompt_len=0)
    token_ids = torch.zeros((1, 1024), dtype=torch.int32)
    token_ids[0, : len(output)] = torch.from_numpy(output.astype(np.int32))
    step = {"aligned": 17, "mixed": 8, "lost": 1}[state]
    done = len(output) - STEPS * step
    slots, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    total_len = torch.tensor([done], dtype=torch.int32)
    drafter.propose(token_ids, total_len, slots, one)
    with counted() as traffic:
        for _ in range(STEPS):
            total_len += step
            drafter.propose(token_ids, total_len, slots, one)
    return traffic.launches, traffic.bytes


@pytest.mark.parametrize("state", ["aligned", "mixed", "lost"])
def test_one_launch_and_no_more_bytes_for_a_longer_prediction(state):
    launches, short = traffic_of(1024, state)
    assert launches == STEPS
    launches, long = traffic_of(32_768, state)
    assert launches == STEPS
    assert long <= 1.1 * short, f"{state}: {short / STEPS:.0f} bytes a step at 1k, {long / STEPS:.0f} at 32k"


def test_recipes_are_looked_up_in_the_same_launch():
    """As many bytes for none as for 20,000, but for the tokens and confidences of the one that is drafted."""
    launches, none = traffic_of(1024, "lost")
    assert launches == STEPS
    for count in (1, 20_000):
        recipes = Recipes.from_lists([((t,), (t + 1, 7), (0.9, 0.5)) for t in range(count)])
        launches, total = traffic_of(1024, "lost", recipes)
        assert launches == STEPS
        assert 0 <= total - none <= STEPS * 160


def test_shapes_are_looked_up_in_the_same_launch():
    """As many bytes for one shape as for 20,000."""
    words = Recipes.from_lists([((t,), (t + 1, 7), (0.9, 0.5)) for t in range(100)])
    _, literal = traffic_of(1024, "lost", Recipes.join({"words": words}))
    shape_of = np.where(np.arange(VOCAB) % 3 == 0, np.arange(VOCAB), SHAPE_IDENTIFIER).astype(np.int32)
    for count in (1, 20_000):
        lists = [((3 * t, SHAPE_IDENTIFIER), (t + 1, 7), (0.9, 0.5)) for t in range(count)]
        shapes = Recipes.from_lists(lists, shape_of=shape_of)
        launches, total = traffic_of(1024, "lost", Recipes.join({"words": words, "shapes": shapes}))
        assert launches == STEPS
        # Two times 32 tokens and their items; keys and packs of 32 buckets.
        assert 0 < total - literal <= STEPS * (4 * 32 * 4 + 2 * 32 * 32)

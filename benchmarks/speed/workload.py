"""Batches in the middle of their answers, for timing: the same tensors for every contestant.

Each request has written half of its prediction. Every step brings as many more tokens to each; nothing is rewound,
so that a timed step does what a step of an engine does. States:

    aligned  the output is the prediction
    lost     the output has nothing to do with the prediction; both draw their tokens alike
    mixed    every other request is lost

A drafter has recipes, as many as the shipped pack has in the tokens of a large vocabulary.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import gpu_align
from gpu_align.ops.constants import LINE_END, MAX_CONTEXT, MAX_TOKENS, NUM_RUNS, SHAPE_IDENTIFIER

STATES = ("aligned", "lost", "mixed")
#: Tokens that each step adds to every request, if nothing else is asked for: what an accepted draft brings.
STEP_TOKENS = 8
NUM_DRAFT_TOKENS = 16
VOCAB_SIZE = 131_072


@dataclass
class Texts:
    """predictions, outputs: [B, N] int32. done: tokens of each output that are written before the first step.

    step_tokens: how many a step adds.
    """

    predictions: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int32]
    done: int
    step_tokens: int = STEP_TOKENS

    @property
    def num_steps(self) -> int:
        """Steps until an output is written but for a draft's length."""
        return int(self.outputs.shape[1] - self.done - NUM_DRAFT_TOKENS) // self.step_tokens


def make_texts(batch: int, num_text: int, state: str, step_tokens: int = STEP_TOKENS) -> Texts:
    """Source code repeats itself: half of the tokens are drawn from a few."""
    if state not in STATES:
        raise ValueError(f"state: expected one of {', '.join(STATES)}, found {state!r}")
    if num_text < 16 * STEP_TOKENS:
        raise ValueError(f"num_text: expected {16 * STEP_TOKENS} or more, found {num_text}")
    rng = np.random.default_rng([batch, num_text])
    shape = (batch, num_text)

    def draw() -> npt.NDArray[np.int32]:
        often, seldom = rng.integers(0, 50, shape, np.int32), rng.integers(50, 40_000, shape, np.int32)
        return np.where(rng.random(shape) < 0.5, often, seldom)

    predictions = draw()
    outputs = predictions.copy()
    lost = {"aligned": slice(0, 0), "lost": slice(None), "mixed": slice(0, None, 2)}[state]
    outputs[lost] = draw()[lost]
    return Texts(predictions, outputs, num_text // 2 // STEP_TOKENS * STEP_TOKENS, step_tokens)


@lru_cache(maxsize=1)
def make_recipes() -> gpu_align.Recipes:
    """One for every token that texts are drawn of, and for 10,000 pairs of frequent ones."""
    tokens, pairs = np.arange(40_000), np.arange(10_000)
    context = np.full((50_000, MAX_CONTEXT), -1, dtype=np.int32)
    context[:40_000, 0] = tokens
    context[40_000:, :2] = np.stack([pairs % 100, pairs // 100], axis=1)
    token_ids = np.full((50_000, MAX_TOKENS), -1, dtype=np.int32)
    token_ids[:, :3] = (context[:, :1] + np.arange(1, 4)) % 40_000
    survival = np.where(token_ids >= 0, np.float32(0.2), np.float32(0))
    return gpu_align.Recipes(context, token_ids, survival, indents=make_indents())


def make_indents() -> npt.NDArray[np.int32]:
    """Of each hundred tokens one ends a line, and one is a run of spaces."""
    runs = np.arange(2, NUM_RUNS, 2)
    indents = np.zeros(NUM_RUNS + VOCAB_SIZE, dtype=np.int32)
    indents[:NUM_RUNS] = -1
    indents[runs], indents[NUM_RUNS + 100 * runs] = 100 * runs, runs
    indents[NUM_RUNS + 50 :: 100] = LINE_END
    return indents


@lru_cache(maxsize=1)
def make_shapes() -> gpu_align.Recipes:
    """One behind every shape of one item, and literal ones that no text has: every look-up goes all the way.

    Every fourth token stays itself in a shape.
    """
    tokens = np.arange(VOCAB_SIZE)
    shape_of = np.where(tokens % 4 == 0, tokens, SHAPE_IDENTIFIER).astype(np.int32)
    items = np.unique(shape_of[:40_000]).tolist()
    unseen = range(VOCAB_SIZE - 20_000, VOCAB_SIZE)
    continuation = (1, 2, 3), (0.2, 0.2, 0.2)
    shapes = gpu_align.Recipes.from_lists((((item,), *continuation) for item in items), shape_of=shape_of)
    words = gpu_align.Recipes.from_lists(((token,), *continuation) for token in unseen)
    return gpu_align.Recipes.join({"words": replace(words, indents=make_indents()), "shapes": shapes})


class Steps:
    """A `Drafter` in the middle of `texts`: ``advance(); propose()`` is one step."""

    def __init__(self, texts: Texts, device: str, recipes: gpu_align.Recipes | None = None) -> None:
        batch, num_text = texts.outputs.shape
        self.texts = texts
        self.recipes = make_recipes() if recipes is None else recipes
        self.drafter = gpu_align.Drafter(
            max_slots=batch,
            max_context_len=num_text + NUM_DRAFT_TOKENS,
            max_prediction_len=num_text,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            vocab_size=VOCAB_SIZE,
            device=device,
            recipes=self.recipes,
        )
        token_ids = torch.zeros((batch, num_text + NUM_DRAFT_TOKENS), dtype=torch.int32)
        token_ids[:, :num_text] = torch.from_numpy(texts.outputs)
        self.token_ids = token_ids.to(device)
        self.total_len = torch.full((batch,), texts.done, dtype=torch.int32, device=device)
        self.slots = torch.arange(batch, device=device)
        self.num_sampled = torch.full((batch,), texts.step_tokens, dtype=torch.int32, device=device)
        for slot, prediction in enumerate(texts.predictions):
            self.drafter.add(slot, prediction, 0)
        self.propose()  # compiles, and processes the first half

    def advance(self) -> None:
        """Write a step's tokens of every output; at the end, begin again in the middle."""
        if int(self.total_len[0]) + self.texts.step_tokens + NUM_DRAFT_TOKENS > self.texts.outputs.shape[1]:
            self.total_len.fill_(self.texts.done)
            self.propose()  # takes back what was written: rows are rebuilt here, not in a timed step
        self.total_len += self.texts.step_tokens

    def propose(self) -> gpu_align.Draft:
        return self.drafter.propose(self.token_ids, self.total_len, self.slots, self.num_sampled)

    def check(self) -> None:
        """The drafts of this step are right where they can be, and those of the CPU reference everywhere."""
        draft = self.propose()
        written = int(self.total_len[0])
        first = min(4, len(self.texts.outputs))
        few = Texts(self.texts.predictions[:first], self.texts.outputs[:first], written)
        expected = Steps(few, "cpu", self.recipes).propose()
        for name in ("token_ids", "length", "source"):
            found, want = getattr(draft, name)[:first].tolist(), getattr(expected, name).tolist()
            assert found == want, f"{name}: expected {want}, found {found}"
        lengths, tokens = draft.length.tolist(), draft.token_ids.tolist()
        for row, (prediction, output) in enumerate(
            zip(self.texts.predictions, self.texts.outputs, strict=True)
        ):
            if np.array_equal(prediction, output):
                assert lengths[row] > 0, f"request {row}: expected a draft, found none"
                assert tokens[row][0] == output[written], f"request {row}: the first draft is wrong"


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and interquartile range, in the unit of `times`."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": statistics.median(times), "iqr": high - low}


def machine() -> dict[str, Any]:
    """What numbers were taken on: GPU, CPU, versions."""
    import triton

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "gpu_align": gpu_align.__version__,
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

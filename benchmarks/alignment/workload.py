"""Batches in the middle of their answers, for timing: the same tensors for every contestant.

Each request has written half of its prediction. Every step brings as many more tokens to each; nothing is rewound,
so that a timed step does what a step of an engine does. States:

    aligned  the output is the prediction
    lost     the output has nothing to do with the prediction; both draw their tokens alike
    mixed    every other request is lost
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import gpu_align
from gpu_align.ops.recipes import LINE_END, MAX_CONTEXT, MAX_TOKENS, NUM_RUNS

Tokens = npt.NDArray[np.int32]
STATES = ("aligned", "lost", "mixed")
#: Tokens that each step adds to every request, if nothing else is asked for: what an accepted draft brings.
STEP_TOKENS = 8
NUM_DRAFT_TOKENS = 16
VOCAB_SIZE = 131_072


@dataclass
class Texts:
    """predictions, outputs: [B, N] int32. done: tokens of each output that are written before the first step.

    step_tokens: how many a step adds. prompt_len: tokens of an output that are the request's prompt.
    """

    predictions: Tokens
    outputs: Tokens
    done: int
    step_tokens: int = STEP_TOKENS
    prompt_len: int = 0


@lru_cache(maxsize=1)
def draw_texts(batch: int, num_text: int) -> tuple[Tokens, Tokens]:
    """Predictions and other texts, [B, N] each. Half of the tokens are drawn from a few, as in source code."""
    rng = np.random.default_rng([batch, num_text])

    def draw() -> Tokens:
        shape = batch, num_text
        often, seldom = rng.integers(0, 50, shape, np.int32), rng.integers(50, 40_000, shape, np.int32)
        return np.where(rng.random(shape) < 0.5, often, seldom)

    return draw(), draw()


def make_texts(batch: int, num_text: int, state: str, step_tokens: int = STEP_TOKENS) -> Texts:
    """Of `draw_texts`."""
    predictions, others = draw_texts(batch, num_text)
    outputs = predictions.copy()
    lost = {"aligned": slice(0, 0), "lost": slice(None), "mixed": slice(0, None, 2)}[state]
    outputs[lost] = others[lost]
    return Texts(predictions, outputs, num_text // 2 // STEP_TOKENS * STEP_TOKENS, step_tokens)


@lru_cache(maxsize=1)
def make_recipes() -> gpu_align.Recipes:
    """One for every token that texts are drawn of, and for 10,000 pairs of frequent ones: as many as the shipped
    pack has in the tokens of a large vocabulary."""
    tokens, pairs = np.arange(40_000), np.arange(10_000)
    context = np.full((50_000, MAX_CONTEXT), -1, dtype=np.int32)
    context[:40_000, 0] = tokens
    context[40_000:, :2] = np.stack([pairs % 100, pairs // 100], axis=1)
    token_ids = np.full((50_000, MAX_TOKENS), -1, dtype=np.int32)
    token_ids[:, :3] = (context[:, :1] + np.arange(1, 4)) % 40_000
    survival = np.where(token_ids >= 0, np.float32(0.2), np.float32(0))
    # Of each hundred tokens one ends a line, and one is a run of spaces.
    runs = np.arange(2, NUM_RUNS, 2)
    indents = np.zeros(NUM_RUNS + VOCAB_SIZE, dtype=np.int32)
    indents[:NUM_RUNS] = -1
    indents[runs], indents[NUM_RUNS + 100 * runs] = 100 * runs, runs
    indents[NUM_RUNS + 50 :: 100] = LINE_END
    return gpu_align.Recipes(context, token_ids, survival, indents=indents)


class Steps:
    """A `Drafter` and an engine's tensors in the middle of `texts`: ``advance(); propose()`` is one step."""

    def __init__(self, texts: Texts, device: str, **options: Any) -> None:
        batch = len(texts.outputs)
        self.texts, self._options = texts, options
        self.drafter = self._make_drafter(batch, device)
        self.token_ids, self.total_len = self.drafter.token_ids, self.drafter.total_len
        self.slots = torch.arange(batch, device=device)
        self.num_sampled = torch.full((batch,), texts.step_tokens, dtype=torch.int32, device=device)
        self.draft = self.propose()  # compiles, and processes what is written already

    def _make_drafter(self, batch: int, device: str) -> gpu_align.Drafter:
        predictions, num_text = self.texts.predictions, self.texts.outputs.shape[1]
        drafter = gpu_align.Drafter(
            max_slots=batch, max_context_len=num_text + NUM_DRAFT_TOKENS, max_prediction_len=predictions.shape[1],
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device=device, **self._options,
        )  # fmt: skip
        for slot in range(batch):
            drafter.add(slot, predictions[slot], self.texts.prompt_len)
        drafter.token_ids[:, :num_text] = torch.from_numpy(self.texts.outputs[:batch])
        drafter.total_len.fill_(self.texts.done)
        return drafter

    def propose(self) -> gpu_align.Draft:
        return self.drafter.propose(self.slots, self.num_sampled)

    def check_drafts(self) -> None:
        """The last drafts of the first requests are those of the reference, which sees all tokens at once."""
        few = min(2, len(self.slots))
        reference = self._make_drafter(few, "cpu")
        reference.total_len.copy_(self.total_len[:few])
        want = reference.propose(self.slots[:few].cpu(), self.num_sampled[:few].cpu())
        for name in want._fields:
            found, expected = getattr(self.draft, name)[:few].tolist(), getattr(want, name).tolist()
            assert found == expected, f"{name}: expected {expected}, found {found}"

    def advance(self) -> None:
        """Write a step's tokens of every output; at the end, begin again in the middle."""
        if int(self.total_len[0]) + self.texts.step_tokens + NUM_DRAFT_TOKENS > self.texts.outputs.shape[1]:
            self.total_len.fill_(self.texts.done)
            self.propose()  # takes back what was written: rows are rebuilt here, not in a timed step
        self.total_len += self.texts.step_tokens

    def check(self) -> None:
        """The drafts of this step are right where they can be, and those of the reference."""
        self.draft = self.propose()
        self.check_drafts()
        written = int(self.total_len[0])
        same = [*map(np.array_equal, self.texts.predictions, self.texts.outputs)]
        right = self.draft.token_ids[:, 0].cpu().numpy() == self.texts.outputs[:, written]
        for row in np.flatnonzero(same):
            assert self.draft.length[row] > 0, f"request {row}: expected a draft, found none"
            assert right[row], f"request {row}: the first draft is wrong"


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and interquartile range, in the unit of `times`."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": statistics.median(times), "iqr": high - low}

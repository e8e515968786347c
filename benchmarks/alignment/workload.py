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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import gpu_align
from gpu_align.ops.compose import LINE_END, NUM_RUNS
from gpu_align.ops.recipes import MAX_CONTEXT, MAX_TOKENS

Tokens = npt.NDArray[np.int32]
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

    predictions: Tokens
    outputs: Tokens
    done: int
    step_tokens: int = STEP_TOKENS

    @property
    def num_steps(self) -> int:
        """Steps until an output is written but for a draft's length."""
        return int(self.outputs.shape[1] - self.done - NUM_DRAFT_TOKENS) // self.step_tokens


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


class Batch:
    """A `Drafter` and an engine's tensors: requests with `predictions` [B, N], `written` tokens long.

    texts: [B, L] what they write, prompts included.
    """

    def __init__(
        self, predictions: Tokens, texts: Tokens, written: int, prompt_len: int, step_tokens: int, device: str,
        recipes: gpu_align.Recipes | None, backend: str = "auto", config: gpu_align.DrafterConfig | None = None,
    ) -> None:  # fmt: skip
        batch, num_text = texts.shape
        self._predictions, self._prompt_len = predictions, prompt_len
        self._options: dict[str, Any] = {"recipes": recipes, "config": config}
        self._capacity = num_text + NUM_DRAFT_TOKENS
        self.drafter = self._make_drafter(batch, device, backend)
        token_ids = torch.zeros((batch, self._capacity), dtype=torch.int32)
        token_ids[:, :num_text] = torch.from_numpy(texts)
        self.token_ids = token_ids.to(device)
        self.total_len = torch.full((batch,), written, dtype=torch.int32, device=device)
        self.slots = torch.arange(batch, device=device)
        self.num_sampled = torch.full((batch,), step_tokens, dtype=torch.int32, device=device)
        self.draft = self.propose()  # compiles, and processes what is written already

    def _make_drafter(self, batch: int, device: str, backend: str = "auto") -> gpu_align.Drafter:
        drafter = gpu_align.Drafter(
            max_slots=batch, max_context_len=self._capacity, max_prediction_len=self._predictions.shape[1],
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device=device, backend=backend,
            **self._options,
        )  # fmt: skip
        for slot in range(batch):
            drafter.add(slot, self._predictions[slot], self._prompt_len)
        return drafter

    def propose(self) -> gpu_align.Draft:
        return self.drafter.propose(self.token_ids, self.total_len, self.slots, self.num_sampled)

    def check_drafts(self) -> None:
        """The last drafts of the first requests are those of the reference, which sees all tokens at once."""
        few = min(2, len(self.slots))
        tensors = self.token_ids, self.total_len, self.slots, self.num_sampled
        reference = self._make_drafter(few, "cpu")
        want = reference.propose(*(tensor[:few].cpu() for tensor in tensors))
        for name in want._fields:
            found, expected = getattr(self.draft, name)[:few].tolist(), getattr(want, name).tolist()
            assert found == expected, f"{name}: expected {expected}, found {found}"


class Steps(Batch):
    """In the middle of `texts`: ``advance(); propose()`` is one step."""

    def __init__(self, texts: Texts, device: str, **options: Any) -> None:
        self.texts = texts
        options = {"recipes": make_recipes(), **options}
        super().__init__(
            texts.predictions, texts.outputs, texts.done, 0, texts.step_tokens, device, **options
        )

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


def machine() -> dict[str, Any]:
    """The machine of a measurement: CPU, GPU, versions."""
    import triton

    return {
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "gpu_align": gpu_align.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

"""What `step_time` times: a batch of requests in one of several situations, advanced by real steps.

A step changes the state of its requests, so a graph that is replayed must not find the state of the replay
before. Here it is always the next step: the tokens of all outputs lie in `token_ids` from the beginning, and
the graph itself adds to `total_len` before each step::

    graph:  total_len += step_tokens;  step;  total_len += step_tokens;  step;  …
    floor:  scratch   += step_tokens;         scratch   += step_tokens;         …

Between two intervals, untimed, `prepare` advances the requests to the next situation of the same kind, sends them
back to the beginning when their outputs are used up, or gives all slots to new requests (`Case.restart`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import gpu_align
from benchmarks.speed.workload import NUM_DRAFT_TOKENS, VOCAB_SIZE, make_recipes
from gpu_align.ops.constants import GLOBAL_EVERY, SEEN

Tokens = npt.NDArray[np.int32]

#: Tokens that an engine prefills at once.
PREFILL_CHUNK = 8192


@dataclass(frozen=True)
class Case:
    """One situation.

    text: what the outputs are. ``aligned``: the prediction. ``lost``: the prediction, and 64 tokens before
    the first
        step another text begins. ``repeats``: the same, and the other text repeats itself, so that every match in
        the request's own output is long. ``prompt``: the prompt holds the prediction's text, N tokens, and the
        output begins. ``resume``: a quarter of N tokens, 8,192 of 32,768, that are lost from the first one on.
    step_tokens: tokens of every step, 1 to 17: 17 is all of 16 drafts accepted.
    steps: steps in one interval.
    skip: tokens of one step that goes before each interval, untimed.
    phase: output tokens before `skip`, modulo `GLOBAL_EVERY`.
    restart: every interval is the first step of new requests, whose tokens were prefilled in chunks.
    first: measured before the other cases are.
    """

    name: str
    text: str
    step_tokens: int = 1
    steps: int = 16
    skip: int = 0
    phase: int = 0
    restart: bool = False
    recipes: bool = False
    first: bool = False


NEAR = {"text": "lost", "steps": GLOBAL_EVERY - 1, "skip": 1, "phase": GLOBAL_EVERY - 1}
FAR = {"text": "lost", "steps": 1, "skip": GLOBAL_EVERY - 1, "phase": 0}
CASES = (
    Case("aligned, 1 new token", "aligned", first=True),
    Case("aligned, 8 new tokens", "aligned", step_tokens=8, first=True),
    # A lost request looks near its anchor at every token, and everywhere at each `GLOBAL_EVERY`-th.
    Case("lost, 1 new token, near resync", **NEAR, first=True),
    Case("lost, 1 new token, far resync", **FAR, first=True),
    Case("aligned, 17 new tokens", "aligned", step_tokens=17),
    Case("lost, 17 new tokens, long own match", "repeats", step_tokens=17, steps=8),
    Case("first step after the prompt", "prompt", steps=1, restart=True),
    Case("first step after a preemption", "resume", steps=1, restart=True),
    Case("aligned, 8 new tokens, recipes", "aligned", step_tokens=8, recipes=True),
    Case("lost, 1 new token, near resync, recipes", **NEAR, recipes=True),
)


@lru_cache(maxsize=1)
def draw_texts(batch: int, num_text: int) -> tuple[Tokens, Tokens]:
    """Predictions and other texts, [B, N] each. Half of the tokens are drawn from a few, as in source code."""
    rng = np.random.default_rng([batch, num_text])

    def draw() -> Tokens:
        shape = batch, num_text
        often, seldom = rng.integers(0, 50, shape, np.int32), rng.integers(50, 40_000, shape, np.int32)
        return np.where(rng.random(shape, np.float32) < 0.5, often, seldom)

    return draw(), draw()


def _rows(case: Case, predictions: Tokens, others: Tokens) -> tuple[Tokens, int, int]:
    """``(token_ids, prompt_len, tokens before the first interval)``."""
    num_text = predictions.shape[1]
    half = num_text // 2 // GLOBAL_EVERY * GLOBAL_EVERY + case.phase
    if case.text == "aligned":
        return predictions, 0, half
    if case.text == "lost":
        at = half - 64
        return np.concatenate([predictions[:, :at], others[:, at:]], axis=1), 0, half
    if case.text == "repeats":
        period = min(1024, num_text // 8)
        at = half - 2 * period
        copies = -(-(num_text - at) // period)
        tail = np.tile(others[:, :period], (1, copies))[:, : num_text - at]
        return np.concatenate([predictions[:, :at], tail], axis=1), 0, half
    if case.text == "prompt":
        return np.concatenate([predictions, predictions[:, :64]], axis=1), num_text, num_text
    if case.text == "resume":
        return others, 0, num_text // 4
    raise ValueError(f"text: expected one of the texts of `Case`, found {case.text!r}")


class StepBatch:
    """A `Drafter` and an engine's tensors for one case; see the module."""

    def __init__(self, case: Case, batch: int, num_text: int, device: str, backend: str = "auto") -> None:
        self.case, self.device = case, device
        self._predictions, others = draw_texts(batch, num_text)
        self._texts, self._prompt_len, self.start = _rows(case, self._predictions, others)
        self.capacity = self._texts.shape[1] + NUM_DRAFT_TOKENS
        self.drafter = self._make_drafter(batch, device, backend)
        token_ids = torch.zeros((batch, self.capacity), dtype=torch.int32)
        token_ids[:, : self._texts.shape[1]] = torch.from_numpy(self._texts)
        self.token_ids = token_ids.to(device)
        self.total_len = torch.full((batch,), self.start, dtype=torch.int32, device=device)
        self.slots = torch.arange(batch, device=device)
        self.num_sampled = torch.full((batch,), case.step_tokens, dtype=torch.int32, device=device)
        self._none_sampled = torch.zeros_like(self.num_sampled)
        self._scratch = torch.zeros_like(self.total_len)
        #: What `total_len` holds, known without asking the device.
        self.written = self.start
        self.draft = self.step()  # compiles, and processes what is written already
        self._advance_scratch()  # loaded before it is captured

    def _make_drafter(self, batch: int, device: str, backend: str = "auto") -> gpu_align.Drafter:
        drafter = gpu_align.Drafter(
            max_slots=batch,
            max_context_len=self.capacity,
            max_prediction_len=self._predictions.shape[1],
            num_draft_tokens=NUM_DRAFT_TOKENS,
            vocab_size=VOCAB_SIZE,
            device=device,
            recipes=make_recipes() if self.case.recipes else None,
            backend=backend,
        )
        for slot in range(batch):
            drafter.add(slot, self._predictions[slot], self._prompt_len)
        return drafter

    def step(self) -> gpu_align.Draft:
        return self.drafter.propose(self.token_ids, self.total_len, self.slots, self.num_sampled)

    def _advance(self) -> None:
        self.total_len.add_(self.case.step_tokens)

    def _advance_scratch(self) -> None:
        self._scratch.add_(self.case.step_tokens)

    def works(self, between: Callable[[], object] | None = None) -> tuple[list[Any], list[Any]]:
        """What an interval does and what its floor does, each a list of calls; `between` goes before each step."""
        ahead = [] if between is None else [between]
        return [*ahead, self._advance, self.step] * self.case.steps, [
            *ahead,
            self._advance_scratch,
        ] * self.case.steps

    def before(self) -> None:
        """Lead to the next interval: it advances by ``steps * step_tokens`` from here. Not timed."""
        case = self.case
        if case.restart:
            self._restart()
            return
        if self.written + case.skip + case.steps * case.step_tokens > self._texts.shape[1]:
            # Tokens were taken back: the slots start over and process all that is written then.
            self.total_len.fill_(self.start)
            self.written = self.start
            self.step()
        if case.skip:
            self.total_len.add_(case.skip)
            self.written += case.skip
            self.step()

    def after(self) -> None:
        """An interval has been replayed."""
        self.written += self.case.steps * self.case.step_tokens

    def _restart(self) -> None:
        """New requests in all slots, prefilled up to `start`, none of them sampled yet."""
        # As `Drafter.add` does for one slot that gets an equal prediction.
        self.drafter._state.align_state[:, SEEN] = -1
        for end in range(PREFILL_CHUNK, self.start + PREFILL_CHUNK, PREFILL_CHUNK):
            self.written = min(end, self.start)
            self.total_len.fill_(self.written)
            self.drafter.propose(self.token_ids, self.total_len, self.slots, self._none_sampled)

    def check(self) -> None:
        """The last drafts of the first two requests are those of the reference, which sees all tokens at once.

        Raises:
            AssertionError: they are not, or the device holds other lengths than it should.
        """
        found_len = self.total_len.tolist()
        assert found_len == [self.written] * len(found_len), f"total_len: expected {self.written}"
        few = min(2, len(found_len))
        reference = self._make_drafter(few, "cpu")
        want = reference.propose(
            self.token_ids[:few].cpu(),
            self.total_len[:few].cpu(),
            torch.arange(few),
            self.num_sampled[:few].cpu(),
        )
        for name in want._fields:
            found, expected = getattr(self.draft, name)[:few].tolist(), getattr(want, name).tolist()
            assert found == expected, f"{name}: expected {expected}, found {found}"


def flush(device: str) -> Callable[[], object] | None:
    """Work that replaces what the L2 cache holds; None on the CPU."""
    if device != "cuda":
        return None
    size = 2 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)
    work = partial(buffer.add_, 1)
    work()
    return work

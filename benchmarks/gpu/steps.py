"""Rows of one drafting step: device time in a CUDA graph, in which each step is a genuine next step (`StepBatch`),
without the host's launch (`device_time`), for the situations of `CASES`;
docs/developer/compiled-kernels.md has the columns.

Correctness first: a batch whose drafts differ from the reference, before or after the replays, is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.alignment import workload
from benchmarks.alignment.device_time import Clock, record
from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, VOCAB_SIZE, Steps, Texts, spread
from gpu_align import Drafter
from gpu_align.ops.align import GLOBAL_EVERY
from gpu_align.ops.index import enter_contexts

#: A row's name, and what measures it.
Row = tuple[str, Callable[[], dict[str, Any]]]
#: Tokens that an engine prefills at once.
PREFILL_CHUNK = 8192


@dataclass(frozen=True)
class Case:
    """One situation.

    text: what the outputs are. ``aligned``: the prediction. ``lost``: the prediction, and 64 tokens before the
        first step another text begins. ``repeats``: the same, and the other text repeats itself, so that every
        match in the request's own output is long. ``prompt``: the prompt holds the prediction's text, N tokens,
        and the output begins. ``resume``: a quarter of N tokens, that are lost from the first one on.
    step_tokens: tokens of every step, 1 to 17: 17 is all of 16 drafts accepted.
    steps: steps in one interval.
    skip: tokens of one step that goes before each interval, untimed.
    phase: output tokens before `skip`, modulo `GLOBAL_EVERY`.
    restart: every interval is the first step of new requests, whose tokens were prefilled in chunks.
    """

    name: str
    text: str
    step_tokens: int = 1
    steps: int = 16
    skip: int = 0
    phase: int = 0
    restart: bool = False
    recipes: bool = False


LOCAL = {"text": "lost", "steps": GLOBAL_EVERY - 1, "skip": 1, "phase": GLOBAL_EVERY - 1}
GLOBAL = {"text": "lost", "steps": 1, "skip": GLOBAL_EVERY - 1, "phase": 0}
#: The most valuable ones first.
CASES = (
    Case("aligned, 1 new token", "aligned"),
    Case("aligned, 8 new tokens", "aligned", step_tokens=8),
    # A lost request looks near its anchor at every token, and everywhere at each `GLOBAL_EVERY`-th.
    Case("lost, 1 new token, local resync", **LOCAL),
    Case("lost, 1 new token, global resync", **GLOBAL),
    Case("aligned, 17 new tokens", "aligned", step_tokens=17),
    Case("lost, 17 new tokens, long own match", "repeats", step_tokens=17, steps=8),
    Case("first step after the prompt", "prompt", steps=1, restart=True),
    Case("first step after a preemption", "resume", steps=1, restart=True),
    Case("aligned, 8 new tokens, recipes", "aligned", step_tokens=8, recipes=True),
    Case("lost, 1 new token, local resync, recipes", **LOCAL, recipes=True),
)


def texts_of(case: Case, batch: int, num_text: int) -> Texts:
    """The texts of so many requests of this case."""
    predictions, others = workload.draw_texts(batch, num_text)
    half = num_text // 2 // GLOBAL_EVERY * GLOBAL_EVERY + case.phase
    outputs, done, prompt_len = predictions, half, 0
    if case.text == "lost":
        outputs = np.hstack([predictions[:, : half - 64], others[:, half - 64 :]])
    elif case.text == "repeats":
        period = min(1024, num_text // 8)
        at = half - 2 * period
        copies = -(-(num_text - at) // period)
        outputs = np.hstack([predictions[:, :at], np.tile(others[:, :period], copies)])[:, :num_text]
    elif case.text == "prompt":
        outputs, done, prompt_len = np.hstack([predictions, predictions[:, :64]]), num_text, num_text
    elif case.text == "resume":
        outputs, done = others, num_text // 4
    return Texts(predictions, outputs, done, case.step_tokens, prompt_len)


class StepBatch(Steps):
    """The requests of one case; see the module."""

    def __init__(self, case: Case, batch: int, num_text: int, device: str) -> None:
        self.case, self.device = case, device
        texts, recipes = texts_of(case, batch, num_text), workload.make_recipes() if case.recipes else None
        #: What `total_len` holds, known without asking the device.
        self.written = texts.done
        super().__init__(texts, device, recipes=recipes)
        self._none_sampled = torch.zeros_like(self.num_sampled)
        self._scratch = torch.zeros_like(self.total_len)
        self._scratch.add_(case.step_tokens)  # loaded before it is captured

    def works(self, between: Callable[[], object] | None = None) -> tuple[list[Any], list[Any]]:
        """The calls of an interval, and those of its floor; `between` goes before each step."""
        ahead = [] if between is None else [between]
        advance, idle = (
            partial(each.add_, self.case.step_tokens) for each in (self.total_len, self._scratch)
        )
        # `Admission.enter_new`, which the host would call where a request is new: in a graph it is always there.
        admission, batch = self.drafter._admission, (self.slots, self.num_sampled)
        given = admission._state, admission._context_shift, admission._starts, *admission._tokens, *batch
        is_needed = self.case.restart and admission._is_parallel
        enter = [partial(enter_contexts, *given)] if is_needed else []
        return [*ahead, advance, *enter, self.propose] * self.case.steps, [*ahead, idle] * self.case.steps

    def before(self) -> None:
        """Lead to the next interval: it advances by ``steps * step_tokens`` from here. Not timed."""
        case = self.case
        if case.restart:
            self._restart()
            return
        if self.written + case.skip + case.steps * case.step_tokens > self.texts.outputs.shape[1]:
            # Tokens were taken back: the slots start over and process all that is written then.
            self.written = self.texts.done
            self.total_len.fill_(self.written)
            self.propose()
        if case.skip:
            self.total_len.add_(case.skip)
            self.written += case.skip
            self.propose()

    def after(self) -> None:
        """An interval has been replayed."""
        self.written += self.case.steps * self.case.step_tokens

    def _restart(self) -> None:
        """New requests in all slots, prefilled in chunks, none of them sampled yet."""
        for slot, prediction in enumerate(self.texts.predictions):
            self.drafter.add(slot, prediction, self.texts.prompt_len)
        self.drafter.flush()
        for end in range(PREFILL_CHUNK, self.texts.done + PREFILL_CHUNK, PREFILL_CHUNK):
            self.written = min(end, self.texts.done)
            self.total_len.fill_(self.written)
            self.drafter.propose(self.slots, self._none_sampled)

    def check(self) -> None:
        """`check_drafts`, and that as many tokens are written as this knows of."""
        found_len = self.total_len.tolist()
        assert found_len == [self.written] * len(found_len), f"total_len: expected {self.written}"
        self.check_drafts()


def flush() -> Callable[[], object]:
    """Work that replaces what the L2 cache holds."""
    size = 2 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    buffer = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    work = partial(buffer.add_, 1)
    work()
    return work


BATCHES, NUM_TEXT, REPEATS = (1, 64, 256, 1024), 32_768, 40
DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS = (1, 2), 1024, 2


def rows(device: str, is_dry: bool, out: Path) -> Iterator[Row]:
    """Name and measurement of each row."""
    batches, *rest = (DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS) if is_dry else (BATCHES, NUM_TEXT, REPEATS)
    for batch, case in product(batches, CASES):
        yield f"{case.name}, batch {batch}", partial(measure, case, batch, *rest, device)
    for num_tokens in (1024, rest[0]):
        yield f"add, {num_tokens} tokens", partial(measure_add, num_tokens, device)


def time_steps(batch: StepBatch, repeats: int, between: Callable[[], object] | None = None) -> dict[str, Any]:
    """``us``, ``iqr_us``: a step's median and spread, graph and floor together; ``floor_us``: the whole floor. The
    drafts after the last interval are checked."""
    work, floor = (record(calls, batch.device) for calls in batch.works(between))

    def interval() -> None:
        work()
        batch.after()

    times, floors = Clock(batch.device).compare(interval, floor, batch.before, repeats)
    batch.check()
    whole, idle, steps = spread(times), spread(floors), batch.case.steps
    return {
        "us": round((whole["median"] - idle["median"]) / steps, 3),
        "iqr_us": round((whole["iqr"] + idle["iqr"]) / steps, 3),
        "floor_us": round(idle["median"], 3),
    }


def time_host(batch: StepBatch, repeats: int) -> float:
    """Host microseconds of an eager call, without waiting for the device: the median."""
    times = []
    for _ in range(repeats):
        batch.before()
        start = time.perf_counter_ns()
        batch.propose()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return round(statistics.median(times), 1)


def measure(case: Case, size: int, num_text: int, repeats: int, device: str) -> dict[str, Any]:
    """One row."""
    batch = StepBatch(case, size, num_text, device)
    batch.check()
    row: dict[str, Any] = {"batch": size, "prediction_len": num_text, "case": case.name, "intervals": repeats}
    row |= time_steps(batch, repeats)
    if device == "cuda":
        cold = time_steps(batch, repeats, flush())
        row |= {"cold_us": cold["us"], "cold_iqr_us": cold["iqr_us"]}
    return row | {"host_us": time_host(batch, min(repeats, 20))}


def measure_add(num_tokens: int, device: str) -> dict[str, Any]:
    """Microseconds of `Drafter.add` of a new prediction: until the call returns, and until it is indexed."""
    sizes = {"max_slots": 64, "max_context_len": num_tokens, "max_prediction_len": num_tokens}
    drafter = Drafter(**sizes, num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device=device)
    texts = np.random.default_rng(0).integers(0, 40_000, (64, num_tokens), np.int32)
    host, whole = [], []
    for slot, text in enumerate(texts):
        begin = time.perf_counter_ns()
        drafter.add(slot, text, 0)
        host.append((time.perf_counter_ns() - begin) / 1e3)
        drafter.flush()
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append((time.perf_counter_ns() - begin) / 1e3)
    found = {"host_us": spread(host[8:]), "us": spread(whole[8:])}
    return {name: round(times["median"], 1) for name, times in found.items()}

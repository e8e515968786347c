"""Rows of one drafting step: device time in a CUDA graph, in which each step is a genuine next step (`StepBatch`),
without the host's launch (`device_time`), for the situations of `CASES`; docs/developer/compiled-kernels.md
has the columns. `ngram_rows` has vLLM's n-gram kernel beside it, on requests of their own.

Correctness first: a batch whose drafts differ from the reference, before or after the replays, is not timed.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.alignment.device_time import Clock, per_step, record
from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, Batch, Tokens, draw_texts, make_recipes
from benchmarks.gpu import SkipError
from gpu_align.ops.align import GLOBAL_EVERY
from gpu_align.ops.layout import SEEN

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
        and the output begins. ``again``: the same, and half of the output is written. ``resume``: a quarter of N
        tokens, that are lost from the first one on.
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
    if case.text == "again":
        return np.tile(predictions, 2), num_text, num_text + num_text // 2
    if case.text == "resume":
        return others, 0, num_text // 4
    raise ValueError(f"text: expected one of the texts of `Case`, found {case.text!r}")


class StepBatch(Batch):
    """The requests of one case; see the module."""

    def __init__(self, case: Case, batch: int, num_text: int, device: str) -> None:
        self.case, self.device = case, device
        predictions, others = draw_texts(batch, num_text)
        self._texts, prompt_len, self.start = _rows(case, predictions, others)
        #: What `total_len` holds, known without asking the device.
        self.written = self.start
        recipes = make_recipes() if case.recipes else None
        super().__init__(predictions, self._texts, self.start, prompt_len, case.step_tokens, device, recipes)
        #: What is timed, and whether it is the drafter's.
        self.step: Callable[[], Any] = self.propose
        self.is_ours = True
        self._none_sampled = torch.zeros_like(self.num_sampled)
        self._scratch = torch.zeros_like(self.total_len)
        self._advance_scratch()  # loaded before it is captured

    def _advance(self) -> None:
        self.total_len.add_(self.case.step_tokens)

    def _advance_scratch(self) -> None:
        self._scratch.add_(self.case.step_tokens)

    def works(self, between: Callable[[], object] | None = None) -> tuple[list[Any], list[Any]]:
        """The calls of an interval, and those of its floor; `between` goes before each step."""
        ahead = [] if between is None else [between]
        work, floor = [*ahead, self._advance, self.step], [*ahead, self._advance_scratch]
        return work * self.case.steps, floor * self.case.steps

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
        """`check_drafts`, and that as many tokens are written as this knows of."""
        found_len = self.total_len.tolist()
        assert found_len == [self.written] * len(found_len), f"total_len: expected {self.written}"
        if self.is_ours:
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
    """Name and measurement of each row, the most valuable ones first."""
    batches, *rest = (DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS) if is_dry else (BATCHES, NUM_TEXT, REPEATS)
    for case in sorted(CASES, key=lambda case: not case.first):
        for batch in batches:
            yield f"{case.name}, batch {batch}", partial(measure, case, batch, *rest, device)


def time_steps(batch: StepBatch, repeats: int, between: Callable[[], object] | None = None) -> dict[str, Any]:
    """`per_step` of this batch; its drafts after the last interval are checked."""
    work, floor = (record(calls, batch.device) for calls in batch.works(between))

    def interval() -> None:
        work()
        batch.after()

    times, floors = Clock(batch.device).compare(interval, floor, batch.before, repeats)
    batch.check()
    return per_step(times, floors, batch.case.steps)


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


#: Windows of vLLM's look-up, and steps in an interval.
MIN_N, MAX_N, NGRAM_STEPS = 2, 5, 8


def vllm_step(requests: Batch, device: str) -> Callable[[], torch.Tensor]:
    """A step of vLLM's own class of the V2 runner, with as much of its configuration as it reads."""
    if device != "cuda":
        raise SkipError("vLLM's V2 kernel needs a GPU")
    try:
        module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.ngram.speculator")
    except Exception as error:  # not installed, or not for this machine
        raise SkipError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    batch = requests.token_ids.shape[0]
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=MIN_N, prompt_lookup_max=MAX_N, num_speculative_tokens=NUM_DRAFT_TOKENS
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=batch),
        model_config=SimpleNamespace(max_model_len=requests.token_ids.shape[1]),
    )
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=requests.token_ids),
        total_len=SimpleNamespace(gpu=requests.total_len),
    )
    speculator = module.NgramGPUSpeculator(config, requests.token_ids.device, states)
    inputs = SimpleNamespace(num_reqs=batch, idx_mapping=torch.arange(batch, device=device))
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    zeros, last = torch.zeros_like(ones), torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> torch.Tensor:
        found: torch.Tensor = speculator.propose(
            inputs, None, None, None, None, ones, zeros, last,
            next_prefill_tokens=None, temperature=None, seeds=None,
        )  # fmt: skip
        return found

    return step


#: A batch writes its prompt again, and is half way through it: vLLM's kernel knows no predictions.
AGAIN = Case("the prompt again", "again", steps=NGRAM_STEPS)


def ngram_rows(device: str, is_dry: bool, out: Path) -> Iterator[Row]:
    """A step of vLLM's kernel, and one of ours, which has the text as prediction, too."""
    batches, *sizes = ((2,), 256, 1) if is_dry else ((64, 256, 1), 4096, 20)
    for name in ("gpu_align step", "vLLM V2 n-gram")[: 1 if is_dry else None]:  # vLLM takes long to import
        for batch in batches:
            yield (
                f"{name}, batch {batch}",
                partial(beside_ngram, name.startswith("vLLM"), batch, *sizes, device),
            )


def beside_ngram(is_vllm: bool, size: int, num_text: int, repeats: int, device: str) -> dict[str, Any]:
    """One row, of one new token a step; the first drafts are the text's next tokens."""
    batch = StepBatch(AGAIN, size, num_text, device)
    if is_vllm:
        batch.step, batch.is_ours = vllm_step(batch, device), False
    drafts = batch.step()
    want = batch.token_ids[:, batch.start : batch.start + NUM_DRAFT_TOKENS]
    found = drafts if isinstance(drafts, torch.Tensor) else drafts.token_ids
    assert torch.equal(found.to(torch.int32), want), "expected the text's next tokens as drafts"
    return {"batch": size, "tokens": 2 * num_text, "repeats": repeats, **time_steps(batch, repeats)}

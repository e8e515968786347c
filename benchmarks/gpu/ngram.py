"""Rows of the n-gram kernel of vLLM's V2 runner beside our step, on the same requests.

vLLM's kernel knows no predictions, so the user's text is in the prompt, ahead of the output, for both: rows of 2 N
tokens, of which one and a half N are written. Ours gets the text as its prediction as well. Each runs in a CUDA
graph that adds to `total_len` before each step, as in `steps`; the graph without the steps is subtracted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.alignment.device_time import Clock, per_step, record
from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, Batch, draw_texts
from benchmarks.gpu import SkipError

BATCHES, NUM_TEXT, REPEATS = (64, 256, 1), 4096, 20
DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS = (2,), 256, 1
#: Windows of vLLM's look-up, and steps in an interval.
MIN_N, MAX_N, STEPS = 2, 5, 8

Step = Callable[[], torch.Tensor]


def make_requests(batch: int, num_text: int, device: str) -> Batch:
    """Requests that write their text again, half way through it."""
    texts, _ = draw_texts(batch, num_text)
    return Batch(texts, np.tile(texts, 2), num_text + num_text // 2, num_text, 1, device, None)


def ours(requests: Batch, device: str) -> Step:
    """A `Drafter`'s step."""
    return lambda: requests.propose().token_ids


def vllm_v2(requests: Batch, device: str) -> Step:
    """vLLM's own class of the V2 runner, with as much of its configuration as it reads."""
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


CONTESTANTS = {"gpu_align step": ours, "vLLM V2 n-gram": vllm_v2}


def rows(device: str, is_dry: bool, out: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and measurement of each row; in a dry run ours alone: vLLM takes long to import."""
    batches, *sizes = (DRY_BATCHES, DRY_NUM_TEXT, DRY_REPEATS) if is_dry else (BATCHES, NUM_TEXT, REPEATS)
    for contestant in list(CONTESTANTS)[: 1 if is_dry else None]:
        for batch in batches:
            yield f"{contestant}, batch {batch}", partial(measure, contestant, batch, *sizes, device)


def measure(contestant: str, batch: int, num_text: int, repeats: int, device: str) -> dict[str, Any]:
    """One row: a step of one new token."""
    requests, start = make_requests(batch, num_text, device), num_text + num_text // 2
    step = CONTESTANTS[contestant](requests, device)
    scratch = requests.total_len.clone()
    scratch.add_(0)
    drafts = step()  # compiles; ours processes what is written already
    want = requests.token_ids[:, start : start + NUM_DRAFT_TOKENS]
    assert torch.equal(drafts.to(torch.int32), want), "expected the text's next tokens as drafts"
    work = record([lambda: requests.total_len.add_(1), step] * STEPS, device)
    floor = record([lambda: scratch.add_(1)] * STEPS, device)

    def before() -> None:
        if written[0] + STEPS + NUM_DRAFT_TOKENS > 2 * num_text:
            requests.total_len.fill_(start)
            written[0] = start
            step()
        written[0] += STEPS

    written = [start]
    times, floors = Clock(device).compare(work, floor, before, repeats)
    found = per_step(times, floors, STEPS)
    return {"contestant": contestant, "batch": batch, "tokens": 2 * num_text, "repeats": repeats, **found}

"""Drafts leave prompts their steps: vLLM's own schedulers with ours in them, and a worker that only counts.

A prompt that comes beside requests with drafts has its first token after at most 1.25 times the steps, and the
time, that it needs beside the same requests without. `-s` prints the table.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_integration.scheduler import schedulers
from vllm_integration.wire import reports
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, StepTime, survival_levels

N = 900
ARRIVES, BLOCKS = 12, 4000
#: Tokens of a step: K, and the prompts that come then.
BUDGETS = {64: (8, [100]), 512: (16, [400, 400])}
SCHEDULERS = {"V1": "V1Scheduler", "V2": "Scheduler", "V2, asynchronous": "AsyncScheduler"}
#: What becomes of the draft for place n of an answer. Every draft is K long and claims to be nearly sure.
KINDS: dict[str, Any] = {
    "none": None,
    "exact": lambda n: True,
    "half wrong": lambda n: n // 8 % 2 == 0,
    "useless": lambda n: False,
}
#: Milliseconds of a step: they do not depend on its tokens, or do.
MACHINES: dict[str, Any] = {"flat": lambda tokens: 10.0, "steep": lambda tokens: 5 + 0.1 * tokens}


@pytest.fixture(scope="module")
def scheduler_of(tiny_model: Path) -> Any:
    """`scheduler_of(name, budget)`: one of our schedulers on top of vLLM's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import KVCacheConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    drafter = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}

    @cache
    def config_of(budget: int) -> Any:
        return EngineArgs(
            model=str(tiny_model),
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=budget,
            enforce_eager=True,
            enable_prefix_caching=False,
            speculative_config={**drafter, "num_speculative_tokens": BUDGETS[budget][0]},
        ).create_engine_config()

    def make(name: str, budget: int) -> Any:
        config = config_of(budget)
        config.scheduler_config.async_scheduling = "Async" in name
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
        kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        ours = getattr(schedulers, f"PredictedOutputs{name}")
        return ours(config, kv_cache, StructuredOutputManager(config), block_size=16)

    return make


class Worker:
    """Answers a step's plan: drafts that are verified, drafts that are made, and how long it took."""

    def __init__(self, kind: Any, k: int, machine: Any) -> None:
        self.kind, self.k, self.machine = kind, k, machine
        self.known: dict[str, list[int]] = {}  # tokens computed, tokens of the prompt, tokens of the output

    def run(self, plan: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        for new in plan.scheduled_new_reqs:
            self.known[new.req_id] = [0, len(new.prompt_token_ids), 0]
        sampled, drafted = [], []
        for req_id, tokens in plan.num_scheduled_tokens.items():
            state, accepted = self.known[req_id], 0
            drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            state[0] += tokens - drafts
            if state[0] < state[1]:
                sampled.append([])
                continue
            while accepted < drafts and self.kind(state[2] + accepted):
                accepted += 1
            state[0] += accepted
            state[2] += accepted + 1
            sampled.append([7] * (accepted + 1))
            if self.kind and not req_id.startswith("late"):
                drafted.append(req_id)
        names = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, None, {})
        total = plan.total_num_scheduled_tokens
        self.ms = self.machine(total)
        length = np.full(len(drafted), self.k, dtype=np.int32)
        levels = survival_levels(np.full((len(drafted), self.k), 0.97).cumprod(axis=1), length)
        position = np.array([sum(self.known[name][1:]) for name in drafted], dtype=np.int32)
        made = StepDrafts(drafted, 0, position, length, np.ones(len(drafted), np.int8), levels)
        time = StepTime(self.ms, total, False)
        reports.attach(output, DraftReport([made] if drafted else [], times=[time]))
        self.drafted = drafted
        return output


def time_to_first_token(
    scheduler: Any, runner: str, batch: int, kind: Any, machine: Any
) -> tuple[int, float, list[int]]:
    """Of the last of the prompts that come in step `ARRIVES`: steps, milliseconds, and drafts in each of them."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

    def add(req_id: str, length: int, predicted: bool) -> None:
        extra = {wire.KEY: wire.Prediction(token_ids=b"\1\0\0\0")} if predicted else None
        params = SamplingParams(max_tokens=N, ignore_eos=True, extra_args=extra)
        scheduler.add_request(Request(req_id, [5] * length, params, None))

    k, lengths = BUDGETS[scheduler.max_num_scheduled_tokens]
    worker, ms, drafts, waits = Worker(kind, k, machine), 0.0, list[int](), set[str]()
    under_way = deque[Any]()
    for number in range(batch):
        add(f"r{number}", 6, kind is not None)
    for step in range(200):
        if step == ARRIVES:
            waits = {f"late{number}" for number in range(len(lengths))}
            for name, length in zip(sorted(waits), lengths, strict=True):
                add(name, length, False)
        plan = scheduler.schedule()
        output = worker.run(plan)
        if step >= ARRIVES:
            ms += worker.ms
            drafts.append(sum(map(len, plan.scheduled_spec_decode_tokens.values())))
            done = {n for n, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True) if tokens}
            waits -= done
            if not waits:
                return len(drafts), ms, drafts
        under_way.append((plan, output, worker.drafted))
        if len(under_way) > ("asynchronous" in runner):
            plan, output, drafted = under_way.popleft()
            scheduler.update_from_output(plan, output)
            if "asynchronous" not in runner:
                tokens = [8 if runner == "V1" else -1] * k
                names = drafted if runner == "V1" else list(plan.num_scheduled_tokens)
                scheduler.update_draft_token_ids(DraftTokenIds(names, [list(tokens) for _ in names]))
    raise AssertionError("starved")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("runner", SCHEDULERS)
def test_drafts_leave_prompts_their_steps(runner: str, budget: int, machine: str, scheduler_of: Any) -> None:
    for batch in (12, 36):
        found = {
            kind: time_to_first_token(
                scheduler_of(SCHEDULERS[runner], budget), runner, batch, becomes, MACHINES[machine]
            )
            for kind, becomes in KINDS.items()
        }
        for kind, (steps, ms, drafts) in found.items():
            print(
                f"{runner:17} {machine:6} {budget:4} {batch:3} {kind:11} {steps:3} steps {ms:7.1f} ms {drafts}"
            )
        steps, ms, _ = found["none"]
        for kind, row in found.items():
            assert row[0] <= 1.25 * steps, (kind, row)
            assert row[1] <= 1.25 * ms, (kind, row)

"""What the plugin adds to a step of vLLM's scheduler and of its front end, in milliseconds of host time. No GPU.

Every request of the batch has a prediction, a draft of up to K tokens that the worker reports in time, and an
output of its own HTTP request in every step:

    ledger     taking the report in, `VerificationLedger.begin` and `settle`, forgetting requests that are gone
    budget     `DraftBudget.grant` and `settle`, and cutting every request's placeholders
    decode     reading the steps that came with the outputs
    front end  taking them off the outputs, decoding, adding up usage and metrics

Printed are the median and the least of all steps; the first ten are left out. On a machine with other work, go
by the least.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.tables import command
from vllm_integration.frontend import usage as usage_collector
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests
from vllm_integration.scheduler.verification_ledger import VerificationLedger
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, survival_levels
from vllm_integration.wire.steps import HEADER, decode

BATCHES, NUM_DRAFT_TOKENS, STEPS, WARM_UP = (256, 1024), 16, 60, 10


class Request:
    """As much of a vLLM request as the scheduler's additions read, in the same ways."""

    def __init__(self, number: int) -> None:
        self.request_id = f"chatcmpl-{number:032x}-{number:08x}"
        prediction = wire.Prediction(b"\1\0\0\0" * 300)
        self.sampling_params = SimpleNamespace(extra_args={wire.KEY: prediction})
        self.max_tokens = 1 << 30
        self.spec_token_ids: list[int] = []
        self._tokens, self._output = [1] * 500, [1] * 10

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self._output)

    def append(self, count: int) -> None:
        self._tokens += [5] * count


@dataclass(slots=True)
class Output:
    """As much of vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: list[int]
    trace_headers: dict[str, str] | None = None


class Timer(defaultdict[str, list[float]]):
    """Part → milliseconds, step by step."""

    def time(self, part: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        self[part].append(1e3 * (time.perf_counter() - started))
        return result


def steps(batch: int, num_draft_tokens: int, count: int) -> Iterator[tuple[list[int], StepDrafts]]:
    """What the model and the worker do: tokens sampled by each request, and the drafts made after them."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        length = draw.integers(0, num_draft_tokens + 1, batch)
        survival = np.sort(draw.random((batch, num_draft_tokens)), axis=1)[:, ::-1]
        source = np.where(length > 0, draw.integers(1, 4, batch), 0)
        nowhere = np.zeros(batch, dtype=np.int32)
        sampled = draw.integers(1, 9, batch).tolist()
        yield sampled, StepDrafts([], 0, nowhere, length, source, survival_levels(survival, length))


def measure(batch: int, num_draft_tokens: int, count: int) -> Timer:
    """Run `count` steps of a batch."""
    timer = Timer(list)
    requests = {request.request_id: request for request in map(Request, range(batch))}
    ids, running = list(requests), list(requests.values())
    drafted = DraftedRequests(False, num_draft_tokens)
    ledger, budget = VerificationLedger(drafted), DraftBudget(drafted, num_draft_tokens, 4096)
    front = usage_collector.collector = usage_collector.Collector()
    for request in running:
        drafted.add(request)
        front.follow(request.request_id, request.sampling_params.extra_args[wire.KEY])
    index = {req_id: i for i, req_id in enumerate(ids)}
    gc.collect()
    gc.freeze()  # as vLLM does with what is there when it starts
    for sampled, made in steps(batch, num_draft_tokens, count + WARM_UP):
        slots = {request.request_id: request.spec_token_ids for request in running if request.spec_token_ids}
        plan = SimpleNamespace(scheduled_spec_decode_tokens=slots, num_invalid_spec_tokens=None)
        tokens = [[5] * n for n in sampled]
        output = SimpleNamespace(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)
        position = np.array([request.num_tokens for request in running]) + sampled
        report = DraftReport([made._replace(req_ids=ids, position=position)])
        outputs = [Output(req_id, new) for req_id, new in zip(ids, tokens, strict=True)]

        def begin(plan: Any = plan, output: Any = output, report: DraftReport = report) -> Any:
            begun = ledger.begin(requests, plan, output, report.trimmed)
            drafted.take(report, begun.req_ids, begun.columns[0])
            return begun

        def cut(begun: Any) -> None:
            rows, _, slots, sampled = begun.columns
            budget.settle(rows, slots, sampled)
            for request, n in zip(running, budget.grant(running, exact=True), strict=True):
                request.spec_token_ids = request.spec_token_ids[:n] if n else []

        begun = timer.time("begin", begin)
        for request, n in zip(running, sampled, strict=True):
            request.append(n)
            request.spec_token_ids = [-1] * num_draft_tokens

        def settle(begun: Any = begun, outputs: list[Output] = outputs) -> None:
            ledger.settle(begun, outputs)
            ledger.forget(drafted.keep_only(requests))

        timer.time("settle", settle)
        timer.time("budget", lambda begun=begun: cut(begun))
        texts = [(each.trace_headers or {})[HEADER] for each in outputs]
        timer.time("decode", lambda texts=texts: decode(texts))

        def read(outputs: list[Output] = outputs) -> None:
            messages = usage_collector._take_messages(outputs)
            front.count(messages, requests)

        timer.time("front end", read)
    timer["ledger"] = [a + b for a, b in zip(timer.pop("begin"), timer.pop("settle"), strict=True)]
    return timer


def main() -> None:
    """Print the table."""
    command("benchmarks.serving.scheduler_cost", __doc__).parse_args()
    print(f"{'batch':>6} {'part':10} {'median ms':>10} {'least ms':>10}")
    for batch in BATCHES:
        parts = measure(batch, NUM_DRAFT_TOKENS, STEPS)
        for part in ("ledger", "budget", "decode", "front end"):
            taken = parts[part][WARM_UP:]
            print(f"{batch:6} {part:10} {statistics.median(taken):10.2f} {min(taken):10.2f}")


if __name__ == "__main__":
    main()

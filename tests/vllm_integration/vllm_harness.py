"""What tests need of a running engine or server, independent of the model runner behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_integration.wire.request import PredictedOutputParams

K = 16  # draft tokens a step
MAX_MODEL_LEN = 512
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles a few functions for requests with log probabilities or penalties
    "OMP_NUM_THREADS": "1",
    "GPU_ALIGN_STRICT": "1",
}


def is_live(path: Path) -> bool:
    """Whether the request of a step log has not ended."""
    return "\nlive: true\n" in path.read_text()[:60]


def read_steps(directory: Path, prefix: str = "", seconds: float = 10) -> dict[str, Any]:
    """The one step log whose name starts with `prefix`; it appears, or ends, with the engine's next step."""
    deadline = time.monotonic() + seconds
    while True:
        found = sorted(path for path in directory.glob(f"{prefix}*.yaml") if not is_live(path))
        if found or time.monotonic() > deadline:
            assert len(found) == 1, f"expected one log {prefix}*.yaml in {directory}, found {found}"
            document: dict[str, Any] = yaml.safe_load(found[0].read_text())
            return document
        time.sleep(0.05)


@dataclass
class Server:
    """A running server: where it listens, where it writes step logs and its output."""

    url: str
    logs: Path
    output: Path


@dataclass
class Answer:
    """One finished request: its tokens, its text, its step log where it had a prediction, and the log
    probabilities of each of its tokens where it asked for them."""

    token_ids: list[int]
    text: str
    log: dict[str, Any] | None
    logprobs: list[dict[int, float]] | None = None


class OfflineEngine:
    """A real `vllm.LLM` in this process."""

    def __init__(self, llm: Any, logs: Path) -> None:
        self.llm = llm
        self.logs = logs

    def params(self, prediction: str | Sequence[int] | None = None, *, max_tokens: int, **more: Any) -> Any:
        """Sampling parameters, greedy unless `more` says otherwise, with a prediction as text or as token ids."""
        from vllm import SamplingParams

        if prediction is not None:
            given = {"prediction" if isinstance(prediction, str) else "token_ids": prediction}
            more["extra_args"] = PredictedOutputParams(**given).to_extra_args()
        return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Answer]:
        """All requests in one batch; the answers in their order."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, list(params), use_tqdm=False)
        self.flush()
        answers = []
        for output in outputs:
            logs = [
                path for path in self.logs.glob("*.yaml") if path.name.startswith(f"{output.request_id}-")
            ]
            log = yaml.safe_load(logs[0].read_text()) if logs else None
            first = output.outputs[0]
            logprobs = first.logprobs and [{t: v.logprob for t, v in each.items()} for each in first.logprobs]
            answers.append(Answer(list(first.token_ids), first.text, log, logprobs))
        return answers

    def flush(self) -> None:
        """Let the worker hear which requests have finished: that takes one more, empty step."""
        while self.core.scheduler.has_requests():
            self.core.step_fn()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def proposer(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner.drafter

    def preemptions(self) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    @contextmanager
    def trace(self) -> Iterator[list[dict[str, int]]]:
        """Draft tokens scheduled, a dict a step: every scheduled request, 0 where it has none."""
        steps: list[dict[str, int]] = []
        scheduler = self.core.scheduler
        schedule = scheduler.schedule

        def recording(*args: Any) -> Any:
            output = schedule(*args)
            drafts = output.scheduled_spec_decode_tokens
            steps.append({req_id: len(drafts.get(req_id, ())) for req_id in output.num_scheduled_tokens})
            return output

        scheduler.schedule = recording
        try:
            yield steps
        finally:
            del scheduler.schedule

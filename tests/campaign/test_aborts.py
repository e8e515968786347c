"""Aborts and disconnects at every phase: the others' outputs are the model's, and everything is given back.

A batch of requests of which most are to be aborted, each in a phase drawn for it; then, with nobody left:
outputs of the others == greedy by transformers      held: no slot, row, prediction, KV block, count
The same few requests, served first and last, are served alike, step by step, and count alike.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.sampling_oracle import Oracle
from tests.vllm.clients import Client, moved, read_answer, request_head, scrape
from tests.vllm.engines import VOCABULARY, Request, V2Engine, edited, serve
from tests.vllm.tiny_llama import build

pytestmark = pytest.mark.vllm

#: A KV cache that three long requests overflow, and 48 tokens a step: longer prompts come in chunks.
TIGHT: dict[str, Any] = {
    "num_draft_tokens": 8,
    "num_gpu_blocks_override": 10,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
}
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "5000"}
#: Runner → its settings; aborts in `make test` and requests of a batch; the phase in which no request is found
#: between two steps: on V1 no last chunk runs then, on V2 every request has placeholders for the next step.
ENGINES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "V1": ({"environment": DRAFTED_FROM}, 40, 60, "first"),
    "V2": (
        {
            "asynchronous": True,
            "delay_counts": 1,
            "environment": {**DRAFTED_FROM, "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"},
        },
        10,
        16,
        "decode",
    ),
}
#: The control's, whose drafts must be the same at the end: no earlier answers.
APART = {"memory": False}
#: Phase → the most times that a request is found in it before it is aborted, how often it is wished for.
PHASES = {
    "waiting": (3, 2),
    "prefill": (1, 2),
    "first": (1, 1),
    "drafts": (4, 4),
    "decode": (4, 2),
    "preempted": (2, 4),
    "finished": (1, 2),
}
PROMPT_LENS = 12, 60
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"), max_len=512)


class Texts:
    """Prompts, and what the model writes after them."""

    def __init__(self, rng: random.Random, oracle: Oracle) -> None:
        self._rng = rng
        self.known: list[tuple[list[int], list[int]]] = []
        for length in PROMPT_LENS:
            prompts = [rng.choices(VOCABULARY, k=length) for _ in range(6)]
            self.known += zip(prompts, oracle.greedy(prompts, MAX_TOKENS), strict=True)

    def request(self, arrives: int = 0, aborted: tuple[str, int] | None = None) -> tuple[Request, list[int]]:
        """A request, with any prediction or none, and its answer."""
        prompt, output = self._rng.choice(self.known)
        length = self._rng.choice((1, 8, 20, MAX_TOKENS, MAX_TOKENS))
        kinds = None, output, edited(output, self._rng.randrange(10**6)), self._rng.choices(VOCABULARY, k=30)
        request = Request(prompt, self._rng.choice(kinds), length, arrives, aborted)
        return request, output[:length]


def served(engine: V2Engine, control: Sequence[tuple[Request, list[int]]]) -> list[Any]:
    """How the control is served: its answers, their usage and their steps."""
    run = engine.run([request for request, _ in control])
    assert run.outputs == [output for _, output in control]
    steps = [step for step in run.steps if step]  # one may be left in flight of what was before
    return [[(answer["token_ids"], answer["usage"]) for answer in run.answers], steps]


@pytest.mark.parametrize("runner", ENGINES)
def test_an_abort_in_any_phase_leaves_nothing_and_changes_no_other_answer(
    runner: str, model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    settings, aborts, size, never = ENGINES[runner]
    texts, phases = Texts(rng, Oracle(model)), Counter[str]()

    def plan() -> tuple[str, int] | None:
        if rng.random() < 0.25:
            return None
        (phase,) = rng.choices(list(PHASES), [often for _, often in PHASES.values()])
        return phase, rng.randint(1, PHASES[phase][0])

    control = [
        (replace(request, extra=APART), output) for request, output in (texts.request() for _ in range(6))
    ]
    with V2Engine(model, tmp_path, runner=runner, **settings, **TIGHT) as engine:
        before = served(engine, control)
        while phases.total() < count(aborts):
            planned = [texts.request(index // 4, plan()) for index in range(size)]
            run = engine.run([request for request, _ in planned])
            for index, (request, output) in enumerate(planned):
                answer = run.answers[index]
                phases.update([answer["aborted_in"]] if "aborted_in" in answer else [])
                if answer.get("aborted_in", "finished") == "finished":
                    assert answer["token_ids"] == output, request
                    assert counts_agree(answer, run.of(index)), (request, answer)
            assert not any(engine.held().values()), (engine.held(), planned)
        assert served(engine, control) == before
    assert phases.total() < 1000 or set(PHASES) - {*phases} <= {never}


def counts_agree(answer: dict[str, Any], steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the front end's counts of a request are possible with what the scheduler did for it."""
    usage = answer["usage"]
    if usage is None:  # nobody drafted for it
        return all(drafts == 0 for _, drafts, _ in steps)
    slots = sum(drafts for _, drafts, _ in steps)
    most = sum(max(0, sampled - 1) for _, _, sampled in steps)
    return bool(
        usage["output_tokens"] == len(answer["token_ids"])
        and usage["accepted"] + usage["rejected"] == usage["drafted"] <= slots
        and usage["accepted"] <= most
    )


# --- clients that close their connection to a server ---

N = 96
#: When a client closes its connection.
CLOSES = ("in the body", "while it waits for the answer", "before the first chunk", "in the stream")
#: A part of what the server's processes hold, which they write to files after each step and each request.
HOOK = """
from vllm_integration.seams import install as seams


def _tell(name, *counts):
    with open({directory!r} + "/" + name, "w") as file:
        file.write(" ".join(map(str, counts)))


def _worker():
    from vllm_integration.worker.proposer_v1 import PredictedOutputs as ours

    observe = ours.observe

    def telling(self, runner, output):
        observe(self, runner, output)
        used = self.drafter.prediction_stats.used_tokens
        _tell("worker", len(self.slots), len(self.requests), used, len(runner.requests))

    ours.observe = telling


def _front_end():
    from vllm_integration.frontend.usage import Collector as ours

    end = ours.end

    def telling(self, req_id, *aborted):
        end(self, req_id, *aborted)
        _tell("frontend", len(self.requests))

    ours.end = telling


seams.when_imported("vllm_integration.worker.proposer_v1", _worker)
seams.when_imported("vllm_integration.frontend.usage", _front_end)
"""


def held(url: str, files: Path, seconds: float = 60) -> dict[str, str]:
    """What is still held when the server has had time to notice."""
    gauges = "vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc"
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found = {line: line for line in lines if line.startswith(gauges) and float(line.rsplit(" ", 1)[1])}
        for name in ("worker", "frontend"):
            counts = (files / name).read_text() if (files / name).exists() else "nothing was told"
            found |= {name: counts} if counts.strip("0 ") else {}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


async def ask(url: str, body: dict[str, Any], closes: str, seconds: float, chunks: int) -> str | None:
    """The text of the answer; None where the connection was closed before it was there."""
    message = json.dumps(body).encode()
    async with Client(url) as client:
        if not closes:
            status, answer = await client.post("/v1/completions", message)
            assert status == 200, answer
            return read_answer(answer).texts[0]
        writer = await client.open()
        writer.write(request_head("/v1/completions", len(message)))
        writer.write(message[: len(message) // 2] if closes == "in the body" else message)
        await writer.drain()
        if closes == "in the stream":
            while chunks and b"[DONE]" not in (line := await client.reader.readline()):
                chunks -= not line or line.startswith(b"data: ")
        else:
            await asyncio.sleep(seconds)
        return None


def test_clients_that_go_away_leave_nothing_and_change_no_count(
    model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    prompts = [rng.choices(VOCABULARY, k=12) for _ in range(8)]
    known = [*zip(prompts, Oracle(model).greedy(prompts, N), strict=True)]

    def words(tokens: Sequence[int]) -> str:
        return " ".join(f"w{token - VOCABULARY.start}" for token in tokens)

    def request(closes: str) -> tuple[dict[str, Any], str, str, float, int]:
        prompt, output = rng.choice(known)
        texts = None, output, edited(output, rng.randrange(10**6)), rng.choices(VOCABULARY, k=30)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": N, "temperature": 0, "ignore_eos": True}
        body["stream"] = rng.random() < 0.5 if not closes else closes == "in the stream"
        if (predicted := rng.choice(texts)) is not None:
            body["prediction"] = {"type": "content", "content": words(predicted)}
        return body, words(output), closes, rng.random() ** 2 * 0.5, rng.randint(1, 12)

    async def ask_all(url: str, asked: Sequence[Any]) -> None:
        texts = await asyncio.gather(*(ask(url, body, *how) for body, _, *how in asked))
        for text, (_, output, closes, *_) in zip(texts, asked, strict=True):
            assert (text is None and closes) or (text or "").split() == output.split()

    def moved_by(url: str, control: Sequence[Any]) -> dict[str, float]:
        before = scrape(url)
        for each in control:
            asyncio.run(ask_all(url, [each]))
        assert not held(url, tmp_path)
        return {name: n for name, n in moved(before, scrape(url)).items() if "_created" not in name}

    variables = {**DRAFTED_FROM, "GPU_ALIGN_DEBUG_DIR": ""}
    how: dict[str, Any] = {
        "environment": variables,
        "runner": "V1",
        "before": HOOK.format(directory=str(tmp_path)),
    }
    control = [each for each in (request("") for _ in range(12)) if "prediction" in each[0]]
    with serve(model, tmp_path, "--max-num-batched-tokens", "64", **how) as server:
        before, closed = moved_by(server.url, control), 0
        while closed < count(30):
            asked = [request(rng.choice(["", *CLOSES])) for _ in range(24)]
            asyncio.run(ask_all(server.url, asked))
            closed += sum(bool(closes) for _, _, closes, *_ in asked)
            assert not held(server.url, tmp_path)
        # A sum of ratios is what is left of two larger ones, to within rounding.
        assert moved_by(server.url, control) == pytest.approx(before, rel=1e-9)

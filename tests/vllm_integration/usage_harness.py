"""Many requests to a running server at once, and what they must say about their predictions."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import prometheus_client

from tests.campaign.http_client import Answer, Client, read_answer
from vllm_integration.frontend.usage import Collector
from vllm_integration.wire.steps import Steps, encode

WORDS = [f"w{i}" for i in range(400)]
CLIENTS = 32


class Step(NamedTuple):
    """One verification step, as plain numbers; fields as in `wire.steps.Steps`."""

    source: int
    length: int
    verified: int
    accepted: int


def message(steps: Sequence[Step], *, own: bool = True, refused: int = 0, graphs: int = 0) -> str:
    """What travels with one output: `steps`, the last of them its own if `own`."""
    columns = Steps(*np.array(steps, dtype=np.int64).reshape(-1, 4).T)
    places = np.zeros(len(steps), np.int64)
    (text,) = encode(columns, places, np.array([own]), np.array([refused]), graphs)
    return text


def count(collector: Collector, req_id: str, text: str, tokens: int) -> None:
    """An output of so many tokens that came with a message."""
    output = SimpleNamespace(request_id=req_id, new_token_ids=[5] * tokens)
    collector.count([(output, text)], collector.requests)


def question(seed: int, length: int = 8) -> list[dict[str, str]]:
    words = random.Random(seed).choices(WORDS, k=length)
    return [{"role": "user", "content": " ".join(words)}]


def chat(seed: int, max_tokens: int, prediction: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of a greedy request."""
    body = {"model": "tiny", "messages": question(seed), "temperature": 0, "max_tokens": max_tokens, **more}
    if more.get("n", 1) > 1:  # vLLM wants a temperature for this
        body["temperature"] = 0.5
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True, **body.get("stream_options", {})}
    return body


def variants(text: str, seed: int) -> dict[str, str]:
    """Predictions for an answer: verbatim, edited, a part of it, too long, unrelated, one token."""
    draw, words = random.Random(seed), text.split()
    edited = []
    for word in words:
        kind = draw.randrange(12)
        if kind:
            edited.append(draw.choice(WORDS) if kind == 1 else word)
        if kind == 2:
            edited += draw.choices(WORDS, k=3)
    return {
        "verbatim": text,
        "edited": " ".join(edited),
        "half": " ".join(words[len(words) // 2 :]),
        "long": " ".join(words + draw.choices(WORDS, k=40)),
        "unrelated": " ".join(draw.choices(WORDS, k=40)),
        "one": words[0],
    }


async def _ask_all(url: str, bodies: Sequence[dict[str, Any]], path: str) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        async with Client(url, seconds=300) as connection:
            for index, body in waiting:
                status, answer = await connection.post(path, json.dumps({"model": "tiny", **body}).encode())
                assert status == 200, answer
                answers[index] = read_answer(answer)

    await asyncio.gather(*(client() for _ in range(min(CLIENTS, len(bodies)))))
    return [answers[index] for index in range(len(bodies))]


def ask_all(url: str, bodies: Sequence[dict[str, Any]], path: str = "/v1/chat/completions") -> list[Answer]:
    """All answers, in the order of the bodies; at most `CLIENTS` at once."""
    return asyncio.run(_ask_all(url, bodies, path))


def scrape(url: str, *others: str) -> Counter[str]:
    """`/metrics` as sample → value: ours, and those that begin with one of `others`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(("gpu_align_", *others)):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)  # type: ignore[assignment]  # histograms' sums are whole here
    return samples


def refused(reason: str, action: str = "refused") -> float:
    """Predictions of this process that were not taken whole."""
    labels = {"reason": reason, "action": action}
    return prometheus_client.REGISTRY.get_sample_value("gpu_align_predictions_refused_total", labels) or 0


def moved(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """How far each sample moved; those that did not are left out."""
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}

"""Many requests to a running server at once, and what they must say about their predictions."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import prometheus_client
import yaml
from vllm_harness import is_live

from vllm_integration.wire.steps import Steps, encode

WORDS = [f"w{i}" for i in range(400)]
DETAILS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


class Step(NamedTuple):
    """One verification step, as plain numbers; fields as in `wire.steps.Steps`."""

    source: int
    length: int
    verified: int
    accepted: int


def message(steps: Sequence[Step], *, own: bool = True, refused: int = 0, off: bool = False) -> str:
    """What travels with one output: `steps`, the last of them its own if `own`."""
    columns = Steps(*np.array(steps, dtype=np.int64).reshape(-1, 4).T)
    (text,) = encode(columns, np.zeros(len(steps), np.int64), np.array([own]), np.array([refused]), off)
    return text


@dataclass
class Answer:
    """One HTTP response. texts: one a choice."""

    body: dict[str, Any]
    id: str
    texts: list[str]
    usage: dict[str, Any]

    @property
    def accepted_rejected(self) -> tuple[int, int]:
        details = self.usage["completion_tokens_details"]
        return details[DETAILS[0]], details[DETAILS[1]]


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


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    if not body.get("stream"):
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return Answer(body, found["id"], [c["message"]["content"] for c in found["choices"]], found["usage"])
    texts: dict[int, str] = {}
    usages: list[dict[str, Any]] = []
    req_id = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            req_id = chunk["id"]
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (
                    choice["delta"].get("content") or ""
                )
            if chunk.get("usage"):
                usages.append(chunk["usage"])
    # Only the last usage tells: before it nobody can know.
    assert all("accepted_prediction_tokens" not in json.dumps(usage) for usage in usages[:-1])
    return Answer(body, req_id, [texts[index] for index in sorted(texts)], usages[-1])


async def _ask_all(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    limit = asyncio.Semaphore(clients)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with limit:
                return await _ask(client, body)

        return await asyncio.gather(*map(one, bodies))


def ask_all(url: str, bodies: Sequence[dict[str, Any]], clients: int = 32) -> list[Answer]:
    """All answers, in the order of the bodies; at most `clients` at once."""
    return asyncio.run(_ask_all(url, bodies, clients))


@dataclass
class Replay:
    """What a step log says, recounted from its tokens alone.

    verified: all draft tokens. by_source: source → [accepted, rejected].
    """

    verified: int = 0
    lengths: list[int] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)

    @property
    def prediction(self) -> tuple[int, int]:
        accepted, rejected = self.by_source.get("prediction", (0, 0))
        return accepted, rejected


def replay(steps: list[dict[str, Any]], num_tokens: int) -> Replay:
    """Walk through the steps of a request until its output has `num_tokens`: a draft is accepted where the output
    has the same token at the same place. The last token of a step is the model's own, whatever it is."""
    found = Replay()
    output = [token for step in steps for token in step["new"]][:num_tokens]
    written = 0
    for step in steps:
        if written >= num_tokens:
            break
        drafts = step["proposed"][: step["verified"]]
        here = output[written : written + len(step["new"])]
        accepted = 0
        most = min(len(drafts), len(here), len(step["new"]) - 1)
        while accepted < most and drafts[accepted] == here[accepted]:
            accepted += 1
        written += len(here)
        found.verified += len(drafts)
        if drafts:
            counts = found.by_source.setdefault(step["source"], [0, 0])
            counts[0] += accepted
            counts[1] += len(drafts) - accepted
            found.lengths.append(accepted)
    return found


def read_logs(directory: Path, req_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The step logs of requests that have ended, a list of documents each: one a choice."""
    wanted = set(req_ids)
    found: dict[str, list[dict[str, Any]]] = {}
    for path in directory.glob("*.yaml"):
        name = re.sub(r"^\d+_", "", path.stem).rpartition("-")[0]
        if name in wanted and not is_live(path):
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            found.setdefault(name, []).append(yaml.load(path.read_text(), loader))
    return found


def scrape(url: str) -> Counter[str]:
    """`/metrics` as sample → value, our samples only."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("gpu_align_"):
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

"""Requests to a running server, its answers, its `/metrics`, and its step logs with a recount of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from tests.vllm.engines import edited
from tests.vllm.tiny_llama import WORDS


class Answer(NamedTuple):
    """A response of any endpoint. texts: one a choice. usage: the last one; empty where there is none."""

    id: str
    texts: tuple[str, ...]
    usage: dict[str, Any]

    @property
    def written(self) -> int:
        """Tokens, by its usage."""
        return int(self.usage.get("output_tokens", self.usage.get("completion_tokens", -1)))

    @property
    def details(self) -> dict[str, Any]:
        """Of its usage, those of the output."""
        return self.usage.get("output_tokens_details") or self.usage.get("completion_tokens_details") or {}

    @property
    def accepted_rejected(self) -> tuple[int, int]:
        """Tokens of the prediction, −1 where it does not say."""
        accepted, rejected = (
            int(self.details.get(f"{verdict}_prediction_tokens", -1)) for verdict in ("accepted", "rejected")
        )
        return accepted, rejected


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The documents of a response: those of a stream's events, as many as came, or its one."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    return events or [json.loads(body)] * body.lstrip().startswith(b"{")


def written(found: Any) -> Iterator[str]:
    """All that a document of any endpoint holds of the answer, calls too, in its order."""
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, str) and key in ("content", "text", "arguments", "partial_json", "delta"):
                yield value
            elif isinstance(value, dict) and key == "input":  # Anthropic's arguments
                yield json.dumps(value)
            yield from written(value)
    for each in found if isinstance(found, list) else ():
        yield from written(each)


def read_answer(body: bytes) -> Answer:
    """Of a response, streamed or not, or as much as came of a stream."""
    found, usage, texts = "", {}, dict[int, str]()
    for event in events_of(body):
        whole = event.get("response", event)
        found, usage = whole.get("id") or found, whole.get("usage") or usage
        for item in event.get("output", ()):
            texts[0] = item["content"][0]["text"]
        if event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return Answer(found, tuple(texts[index] for index in sorted(texts)), usage)


# --- requests and what answers and /metrics say ---

CLIENTS = 32


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
    return {
        "verbatim": text,
        "edited": " ".join(edited(words, seed, WORDS)),
        "half": " ".join(words[len(words) // 2 :]),
        "long": " ".join(words + draw.choices(WORDS, k=40)),
        "unrelated": " ".join(draw.choices(WORDS, k=40)),
        "one": words[0],
    }


async def post_all(url: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """The bodies of the answers to paths and bodies, in their order; at most `CLIENTS` at once."""
    timeout, limits = httpx.Timeout(300, pool=None), httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    return [answer.content for answer in answers]


def ask_all(url: str, bodies: Sequence[dict[str, Any]], path: str = "/v1/chat/completions") -> list[Answer]:
    requests = [(path, {"model": "tiny", **body}) for body in bodies]
    return [read_answer(body) for body in asyncio.run(post_all(url, requests))]


def scrape(url: str, *others: str) -> Counter[str]:
    """`/metrics` as sample → value: ours, and those that begin with one of `others`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return samples_of(response.read().decode(), *others)


def samples_of(text: str, *others: str) -> Counter[str]:
    samples: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(("gpu_align_", *others)):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)  # type: ignore[assignment]  # histograms' sums are whole here
    return samples


def moved(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """How far each sample moved; those that did not are left out."""
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


# --- step logs ---


class LoggedStep(NamedTuple):
    source: str
    verified: int
    accepted: int


def recount(log: dict[str, Any], num_tokens: int) -> list[LoggedStep]:
    """The steps of an output of so many tokens.

    A draft is accepted where the output has the same token at the same place; a step's last token is the model's
    own, whatever it is.
    """
    steps, written = [], 0
    for logged in log["steps"]:
        if written >= num_tokens:
            break
        drafts, new = logged["proposed"][: logged["verified"]], logged["new"]
        accepted = 0
        while accepted < min(len(drafts), len(new) - 1, num_tokens - written):
            if drafts[accepted] != new[accepted]:
                break
            accepted += 1
        steps.append(LoggedStep(logged["source"], len(drafts), accepted))
        written += len(new)
    return steps


def of_prediction(steps: Sequence[LoggedStep]) -> tuple[int, int]:
    """Accepted and rejected tokens of the prediction."""
    own = [step for step in steps if step.source == "prediction"]
    accepted = sum(step.accepted for step in own)
    return accepted, sum(step.verified for step in own) - accepted


class Logs:
    """The files of the step logs, each read once; they are written with the engine's next step."""

    _loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._read: set[str] = set()

    def of(self, answer_id: str, choices: int, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(self._found.get(answer_id, ())) < choices and time.monotonic() < deadline:
            self._look()
            time.sleep(0.05)
        return self._found.pop(answer_id, [])

    def _look(self) -> None:
        for path in self._directory.glob("*.yaml"):
            if path.name not in self._read:
                self._read.add(path.name)
                (name,) = re.findall(r"(?:chatcmpl|cmpl|resp)[-_][0-9a-f]{16,32}", path.name)
                self._found.setdefault(name, []).append(yaml.load(path.read_text(), self._loader))

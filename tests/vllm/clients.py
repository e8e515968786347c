"""Requests to a running server, its answers, its `/metrics`, and its step logs with a recount of them.

    async with Client(url) as client:
        status, body = await client.post("/v1/completions", json_bytes)

Plain HTTP/1.1 over asyncio's streams: what a program sends are the bytes that it has made.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from tests.vllm.engines import is_live


def request_head(path: str, length: int) -> bytes:
    """The bytes before a JSON body of that length."""
    kind = b"host: test\r\ncontent-type: application/json\r\n"
    return b"POST %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n" % (path.encode(), kind, length)


class Client:
    """One connection, opened when it is needed and kept; one request at a time."""

    def __init__(self, url: str, seconds: float = 120) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._seconds = seconds
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def open(self) -> asyncio.StreamWriter:
        if self.writer is None or self.writer.is_closing():
            self.reader, self.writer = await asyncio.open_connection(self._host, self._port, limit=2**24)
        return self.writer

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
            self.writer = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Errors as those of `response`."""
        writer = await self.open()
        writer.write(request_head(path, len(body)) + body)
        with suppress(ConnectionError):  # a server may answer before it has read everything, and close
            await writer.drain()
        return await self.response()

    async def response(self) -> tuple[int, bytes]:
        """Status and body of the next response, whole.

        Raises `asyncio.TimeoutError` if none comes, `OSError` or `EOFError` where the server closes instead.
        """
        return await asyncio.wait_for(self._response(), self._seconds)

    async def _response(self) -> tuple[int, bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        if length := re.search(rb"content-length: *(\d+)", head):
            body = await self.reader.readexactly(int(length[1]))
        elif b"transfer-encoding: chunked" in head:
            body = await self._chunks()
        else:
            body = await self.reader.read()
        if b"connection: close" in head:
            self.close()
        return status, body

    async def _chunks(self) -> bytes:
        chunks = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            chunks.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readexactly(2)
        return b"".join(chunks)


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


def read_answer(body: bytes) -> Answer:
    """Of a response, streamed or not, or as much as came of a stream."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    if not events and body.lstrip().startswith(b"{"):
        events = [json.loads(body)]
    found, usage, texts = "", {}, dict[int, str]()
    for event in events:
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

WORDS = [f"w{i}" for i in range(400)]
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
            if path.name not in self._read and not is_live(path):
                self._read.add(path.name)
                (name,) = re.findall(r"(?:chatcmpl|cmpl|resp)[-_][0-9a-f]{16,32}", path.name)
                self._found.setdefault(name, []).append(yaml.load(path.read_text(), self._loader))

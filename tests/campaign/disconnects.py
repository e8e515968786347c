"""Clients that close their connection to a server at every phase of a request, over plain sockets.

What the server's processes hold is read through a hook: code that it runs first makes the drafter, after each
step, and the front end, after each request, write it to a file.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from request_server import serve
from usage_harness import moved, scrape
from v2_harness import VOCABULARY, edited

from tests.campaign.campaign import Campaign, Row, Tally
from tests.campaign.http_client import JSON_HEAD, read_answer, request_head
from tests.campaign.http_client import Client as Connection
from tests.campaign.sampling_oracle import Oracle

MAX_TOKENS = 96
PROMPT_LEN = 12
PHASES = (
    "after the headers",
    "in the body",
    "after the body",
    "while it waits for the answer",
    "before the first chunk",
    "in the stream",
)
#: Requests that nobody disconnects, one in so many.
STAY = 5
CLIENTS = 24

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


class Client(NamedTuple):
    """One request. phase: when its connection is closed; empty: never. reset: by RST instead of FIN."""

    body: dict[str, Any]
    expected: list[str]
    phase: str
    seconds: float
    chunks: int
    reset: bool


class Server:
    """A running server that is disconnected from."""

    def __init__(self, c: Campaign, oracle: Oracle, url: str, held: Path) -> None:
        self._rng, self._url, self._held_files = c.rng, url, held
        prompts = [c.rng.choices(VOCABULARY, k=PROMPT_LEN) for _ in range(c.size(40, 8))]
        self._known = list(zip(prompts, oracle.greedy(prompts, MAX_TOKENS), strict=True))

    def row(self, tally: Tally) -> Row:
        control = [client for client in (self._client("") for _ in range(12)) if "prediction" in client.body]
        before = self._counted(tally, control)
        phases, others = Counter[str](), 0
        while tally.goes_on():
            clients = [self._client(self._phase()) for _ in range(tally.campaign.size(200, 40))]
            closed, wrong = asyncio.run(self._all(clients))
            phases.update(closed)
            others += sum(not client.phase for client in clients)
            held = self._held()
            tally.check(not wrong and not held, {"wrong": wrong, "held": held}, count=len(closed))
        after = self._counted(tally, control)
        # A sum of ratios is what is left of two larger ones, to within rounding.
        same = before == pytest.approx(after, rel=1e-9)
        tally.check(same, {"counters of the same requests": [before, after]}, count=0)
        told = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])
        return tally.row(f"{told}; {others} others, nothing held after any batch, counters exact")

    def _phase(self) -> str:
        return "" if self._rng.randrange(STAY) == 0 else self._rng.choice(PHASES)

    def _client(self, phase: str) -> Client:
        prompt, output = self._rng.choice(self._known)
        words = self._rng.choices(VOCABULARY, k=30)
        predicted = self._rng.choice((None, output, edited(output, self._rng.randrange(10**6)), words))
        stream = self._rng.random() < 0.5 if not phase else phase in PHASES[-2:]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        if predicted is not None:
            body["prediction"] = {"type": "content", "content": " ".join(_words(predicted))}
        seconds, chunks = self._rng.random() ** 2 * 0.5, self._rng.randint(1, 12)
        return Client(body, _words(output), phase, seconds, chunks, self._rng.random() < 0.5)

    async def _all(self, clients: Sequence[Client]) -> tuple[list[str], list[Any]]:
        """The phases in which connections were closed, and answers that are wrong."""
        limit = asyncio.Semaphore(CLIENTS)

        async def one(client: Client) -> tuple[bool, Any]:
            async with limit:
                return await asyncio.wait_for(ask(self._url, client), 120)

        answers = await asyncio.gather(*(one(client) for client in clients))
        closed, wrong = [], []
        for client, (was_closed, answer) in zip(clients, answers, strict=True):
            if was_closed:
                closed.append(client.phase)
            elif answer != client.expected:
                wrong.append({"client": client._asdict(), "answer": answer})
        return closed, wrong

    def _counted(self, tally: Tally, control: Sequence[Client]) -> dict[str, float]:
        """How far our counters move with these requests, one after the other."""
        before = scrape(self._url)
        for client in control:
            _, wrong = asyncio.run(self._all([client]))
            tally.check(not wrong, {"control": wrong}, count=0)
        self._held()
        found = moved(before, scrape(self._url))
        return {name: amount for name, amount in found.items() if "_created" not in name}

    def _held(self, seconds: float = 20) -> dict[str, Any]:
        """What is still held when the server has had time to notice."""
        deadline = time.monotonic() + seconds
        while (held := self._held_now()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return held

    def _held_now(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        gauges = "vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc"
        found: dict[str, Any] = {
            line: line for line in lines if line.startswith(gauges) and float(line.rsplit(" ", 1)[1])
        }
        for name in ("worker", "frontend"):
            path = self._held_files / name
            counts = path.read_text() if path.exists() else "nothing was told"
            if counts.strip("0 "):
                found[name] = counts
        return found


async def ask(url: str, client: Client) -> tuple[bool, list[str] | str]:
    """Whether the connection was closed before the answer was there, and the words of the answer."""
    connection = Connection(url)
    writer, body = await connection.open(), json.dumps(client.body).encode()
    reader = connection.reader
    writer.write(request_head("POST", "/v1/completions", len(body), JSON_HEAD + b"connection: close\r\n"))
    try:
        part = {PHASES[0]: 0, PHASES[1]: int(len(body) * client.seconds)}.get(client.phase, len(body))
        writer.write(body[:part])
        await writer.drain()
        if part < len(body):
            await asyncio.sleep(client.seconds / 10)
            return True, ""
        if client.phase == PHASES[2]:
            return True, ""
        if client.phase in PHASES[3:5]:
            wanted = reader.read(1) if client.phase == PHASES[3] else reader.readuntil(b"\r\n\r\n")
            done, _ = await asyncio.wait([task := asyncio.ensure_future(wanted)], timeout=client.seconds)
            task.cancel()
            if client.phase == PHASES[4] or not done:
                return True, ""
            return False, client.expected  # it was too late
        data = b""
        while line := await reader.readline():
            data += line
            if client.phase and data.count(b"data: {") >= client.chunks:
                return True, ""
        return False, words_of(data)
    finally:
        if client.reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def words_of(response: bytes) -> list[str] | str:
    """Of an answer; the whole response where it is none."""
    head, _, body = response.partition(b"\r\n\r\n")
    return read_answer(body).texts[0].split() if head[9:12] == b"200" else response.decode()


def _words(tokens: Sequence[int]) -> list[str]:
    return [f"w{token - VOCABULARY.start}" for token in tokens]


@contextmanager
def disconnects(c: Campaign, oracle: Oracle, model: Path, directory: Path) -> Iterator[Server]:
    """A server with the tiny model."""
    folder = directory / "server"
    folder.mkdir()
    variables = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "5000", "GPU_ALIGN_DEBUG_DIR": ""}
    tokens, hook = ("--max-num-batched-tokens", "64"), HOOK.format(directory=str(folder))
    with serve(model, folder, *tokens, environment=variables, runner="V1", before=hook) as running:
        yield Server(c, oracle, running.url, folder)

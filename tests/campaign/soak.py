"""A server that goes on: resident memory of its processes, request after request.

One V1 server, 64 clients, short answers, predictions of every kind that nobody has sent before. Memory is read
from /proc every 500 requests; what counts is the slope of the least-squares line after the first 2,000, by when
allocators and caches have their size.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from request_server import serve
from tiny_llama import build
from usage_harness import WORDS
from vllm_harness import Server

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.http_client import Client, read_answer, resident

CLIENTS = 64
MOST_SLOPE = 1.0  # MiB per 1,000 requests
FLAGS = ("--max-num-seqs", "64", "--num-gpu-blocks-override", "256", "--max-model-len", "128")
QUIET = ("--disable-uvicorn-access-log",)
#: oneDNN keeps what it has made for a batch size, up to 1,024 times. In the worker these are hundreds
#: of MiB, which grow for tens of thousands of requests, with predictions or without.
ENVIRONMENT = {
    "GPU_ALIGN_DEBUG_DIR": "",
    "GPU_ALIGN_RECIPES": "base",
    "GPU_ALIGN_MEMORY_TOKENS": "5000",  # full after a thousand answers
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
KINDS = ("none", "own", "edited", "unrelated", "long", "ids", "one")


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Endpoint and body of a request: a prompt of its own, and a prediction of one of seven kinds or none."""
    words = draw.choices(WORDS, k=draw.randrange(4, 24))
    kind, tokens = draw.choice(KINDS), draw.randrange(4, 9)
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    predicted = {
        "own": words,
        "edited": [draw.choice(WORDS) if draw.random() < 0.2 else word for word in words],
        "unrelated": draw.choices(WORDS, k=40),
        "long": draw.choices(WORDS, k=200),
        "one": words[:1],
    }
    if kind == "ids":
        body["vllm_xargs"] = {"gpu_align_prediction": [draw.randrange(4, 404) for _ in range(30)]}
    elif kind != "none":
        body["prediction"] = {"type": "content", "content": " ".join(predicted[kind])}
    text = " ".join(words)
    path = draw.choice(["/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
    if path == "/v1/responses":
        return path, {**body, "input": text, "max_output_tokens": tokens}
    if draw.random() < 0.25:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == "/v1/completions":
        return path, {**body, "prompt": text, "max_tokens": tokens}
    return path, {**body, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def slope(served: list[int], memory: list[float]) -> float:
    """MiB per 1,000 requests, by least squares."""
    return float(np.polyfit(np.array(served) / 1000, memory, 1)[0])


class Soak:
    """Requests until `total`, and the processes' memory every `every` of them."""

    def __init__(self, c: Campaign, server: Server, tallies: tuple[Tally, Tally], every: int) -> None:
        self._draw, self._url, self._tallies, self._every = c.rng, server.url, tallies, every
        self._pids = [server.pid], [child.pid for child in server.engine_processes()]
        self._left = tallies[0].at_least
        self.served: list[int] = []
        self.memory: tuple[list[float], list[float]] = ([], [])

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        async with Client(self._url) as client:
            while self._left > 0:
                self._left -= 1
                path, body = request(self._draw)
                status, answer = await client.post(path, json.dumps(body).encode())
                wanted = body.get("max_tokens", body.get("max_output_tokens"))
                holds = status == 200 and read_answer(answer).written == wanted
                for tally in self._tallies:
                    tally.check(holds, {"path": path, "body": body, "status": status, "answer": answer[:500]})
                    tally.goes_on()
                if self._tallies[0].count % self._every == 0:
                    self.sample()

    def sample(self) -> None:
        self.served.append(self._tallies[0].count)
        for pids, values in zip(self._pids, self.memory, strict=True):
            values.append(resident(pids))


def run(c: Campaign) -> Iterator[Row]:
    every, skipped = c.size(500, 50), c.size(2000, 150)
    names = ("resident memory of the API server", "resident memory of the engine core and its worker")
    tallies = (c.tally(names[0], 20_000, 300), c.tally(names[1], 20_000, 300))
    # Within a few hundred requests allocators grow by tens of MiB at once: there only a MiB a request is too much.
    most = c.size(1, 1000) * MOST_SLOPE
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model")
        with serve(model, Path(folder), *FLAGS, *QUIET, environment=ENVIRONMENT, runner="V1") as server:
            begun = time.monotonic()
            soak = Soak(c, server, tallies, every)
            asyncio.run(soak.run())
            rate = soak.served[-1] / (time.monotonic() - begun)
    first = soak.served.index(skipped)
    for tally, memory in zip(tallies, soak.memory, strict=True):
        found = slope(soak.served[first:], memory[first:])
        tally.check(found <= most, {"slope": found, "served": soak.served, "MiB": memory}, count=0)
        middle = memory[(first + len(memory)) // 2]
        ends = (
            f"{memory[first]:.0f} MiB after {skipped:,}, {middle:.0f} half-way, {memory[-1]:.0f} at the end"
        )
        yield tally.row(f"{found:+.2f} MiB per 1,000 requests; {ends}; {rate:.0f} requests/s")


if __name__ == "__main__":
    main(run)

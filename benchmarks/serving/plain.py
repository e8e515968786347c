"""What a request without a prediction costs beside the plugin: ``python -m benchmarks.serving.plain MODEL``.

Three servers run at once and are asked in turns, in random order: without speculation, with vLLM's n-gram drafter
that finds nothing to propose, and with the plugin. Printed are ms a token: medians of a round's requests, and of
the rounds. Other programs beside it, or a model that fills the cores, make the figures of no use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from gpu_align.tools.bench.servers import (
    HOST,
    PLUGIN_DRAFTS,
    command_line,
    environment,
    free_port,
    running,
)
from gpu_align.tools.doctor import has_gpu

#: No output repeats 60 tokens that are in the text before it.
NGRAM = {"method": "ngram", "prompt_lookup_min": 60, "prompt_lookup_max": 60}
KINDS: dict[str, dict[str, Any] | None] = {"none": None, "ngram": NGRAM, "plugin": {**PLUGIN_DRAFTS}}
NUM_DRAFT_TOKENS, TOKENS, REQUESTS = 16, 300, 6


async def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """ms a token of each kind: a median of `REQUESTS` requests, one after another, for each round."""
    draw, found = random.Random(1), {kind: list[float]() for kind in KINDS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=600))
        urls: dict[str, str] = {}
        for kind, speculation in KINDS.items():
            port = free_port()
            options = ["--served-model-name", "model", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
            command = command_line(model, speculation, port, NUM_DRAFT_TOKENS, options, gpu=has_gpu())
            urls[kind] = f"http://{HOST}:{port}"
            env, log = environment(gpu=has_gpu()) | {"OMP_NUM_THREADS": "1"}, folder / f"{kind}.log"
            await stack.enter_async_context(running(command, urls[kind], log, env, lambda _: None, 600))
        for number in range(-1, rounds):  # the first is not counted
            prompts = [[draw.randrange(4, 400) for _ in range(24)] for _ in range(REQUESTS)]
            for kind in draw.sample(list(KINDS), len(KINDS)):
                times = [await _ask(client, urls[kind], prompt) for prompt in prompts]
                found[kind] += [median(times)] if number >= 0 else []
    return found


async def _ask(client: httpx.AsyncClient, url: str, prompt: list[int]) -> float:
    body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
    return float((time.perf_counter() - started) * 1e3 / answer["usage"]["completion_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub name; three servers must fit")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    found = asyncio.run(measure(options.model, options.rounds))
    print(*(f"{kind} {median(times):.3f}" for kind, times in found.items()), "ms a token", sep=", ")
    ratios = [ours / ngram for ours, ngram in zip(found["plugin"], found["ngram"], strict=True)]
    print(f"plugin / ngram, by round: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

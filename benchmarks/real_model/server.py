"""vLLM on the CPU: what the model answers, and what an answer costs the processes of a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.real_model.model import CACHE
from benchmarks.real_model.tasks import Chat, Task
from benchmarks.tables import write_json
from gpu_align.tools.bench.measure import is_loop
from gpu_align.tools.bench.servers import HOST, KINDS, command_line, environment, free_port, running

K, MAX_TOKENS = 32, 256
#: Mode → the kind of its server, and further fields of a request but the prediction. n-gram as `bench` has it.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}), "n-gram": ("ngram", {}), "gpu_align": ("gpu-align", {}),
    "gpu_align, prompt alone": ("gpu-align", {"vllm_xargs": {"gpu_align": "on"}}),
}  # fmt: skip


class Ask(NamedTuple):
    """A request for an answer."""

    messages: Chat
    temperature: float = 0.0
    seed: int = 1


class Answer(NamedTuple):
    """Token ids of the prompt, as the chat template makes it, and of the answer with its end token."""

    prompt: list[int]
    output: list[int]
    text: str
    cpu_s: float = 0.0  # of the server's processes meanwhile, prefill included

    @property
    def counts(self) -> bool:
        """Whether figures hold it: the model ended it, and it does not end in a loop."""
        return len(self.output) < MAX_TOKENS and not is_loop(self.text)


class Server(NamedTuple):
    """A server that runs."""

    client: httpx.AsyncClient
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        each = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in each)

    async def ask(self, ask: Ask, **fields: Any) -> Answer:
        """One request; its prompt is prefilled anew, unless `fields` have another ``cache_salt``."""
        more = {"max_tokens": MAX_TOKENS, "return_token_ids": True, "cache_salt": uuid.uuid4().hex, **fields}
        before = self.cpu_s()
        response = await self.client.post("/v1/chat/completions", json={**ask._asdict(), **more})
        found = response.raise_for_status().json()
        [choice], seconds = found["choices"], round(self.cpu_s() - before, 2)
        return Answer(found["prompt_token_ids"], choice["token_ids"], choice["message"]["content"], seconds)


@contextlib.asynccontextmanager
async def served(model: Path, kind: str) -> AsyncIterator[Server]:
    """A server of one thread; its log and its step logs are in `CACHE`."""
    print(f"server {kind}: starting", file=sys.stderr)
    url, log = f"http://{HOST}:{(port := free_port())}", CACHE / f"server-{kind}.log"
    options = ("--max-model-len", "2048")
    command = command_line(str(model), KINDS[kind].speculation, port, K, options, gpu=False)
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    env = {**environment(gpu=False), **threads, "GPU_ALIGN_DEBUG_DIR": str(CACHE / "steps")}
    async with (
        running(command, url, log, env, lambda _: None, 900.0) as pid,
        httpx.AsyncClient(base_url=url, timeout=900.0, trust_env=False) as client,
    ):
        yield Server(client, psutil.Process(pid))


async def record(model: Path, asks: Sequence[Ask], streams: int = 8) -> list[Answer]:
    """The answer to each, of a server without drafts; kept in a file, and asked once."""
    path = CACHE / "answers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    wanted = {key: ask for ask in asks if (key := json.dumps(ask)) not in known}
    if wanted:
        turn = asyncio.Semaphore(streams)
        async with served(model, "none") as server:

            async def answer(key: str, ask: Ask) -> None:
                async with turn:
                    known[key] = await server.ask(ask, cache_salt="recorded")

            try:
                await asyncio.gather(*(answer(*each) for each in wanted.items()))
            finally:
                write_json(path, known)
    return [Answer(*known[json.dumps(ask)]) for ask in asks]


async def turns(model: Path, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Each task by each of `MODES` in turns: CPU seconds, and whether the answer is the one without drafts."""
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        kinds = {kind for kind, _ in MODES.values()}
        servers = {kind: await stack.enter_async_context(served(model, kind)) for kind in sorted(kinds)}
        for number, task in enumerate(tasks):
            found, shift = {}, number % len(MODES)
            for mode in (*list(MODES)[shift:], *list(MODES)[:shift]):
                kind, fields = MODES[mode]
                if mode == "gpu_align":
                    fields = {"prediction": {"type": "content", "content": task.prediction}}
                found[mode] = await servers[kind].ask(Ask(task.messages), **fields)
            same = {mode: answer.output == found["none"].output for mode, answer in found.items()}
            seconds = {mode: found[mode].cpu_s for mode in MODES}
            about = {"id": task.id, "tokens": len(found["none"].output), "counts": found["none"].counts}
            rows.append({**about, "identical": all(same.values()), "cpu_s": seconds})
    return rows

"""The tasks, what the model answers in vLLM on the CPU, and what an answer costs the processes of a server.

A line of ``tasks.jsonl`` is a kind: instruction, example (input and answer), three inputs, predictions where these
are not the inputs, and `teacher`: further inputs, five to learn a recipe pack from and five to replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.real_model.model import CACHE
from gpu_align.files import write_at_once
from gpu_align.tools.bench import measure
from gpu_align.tools.bench.servers import HOST, KINDS, command_line, environment, free_port, running

K, MAX_TOKENS = 32, 256
LINES = Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
TASK_KINDS: dict[str, dict[str, Any]] = {(kind := json.loads(line))["kind"]: kind for line in LINES}
Chat = list[dict[str, str]]
#: Mode → the kind of its server, and further fields of a request but the prediction. n-gram as `bench` has it.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}), "n-gram": ("ngram", {}), "gpu_align": ("gpu-align", {}),
    "gpu_align, prompt alone": ("gpu-align", {"vllm_xargs": {"gpu_align": "on"}}),
}  # fmt: skip


class Task(NamedTuple):
    """One request, and the prediction that its client would send."""

    id: str
    messages: Chat
    prediction: str

    @property
    def half(self) -> str:
        """``unseen``: no setting may be chosen by it. By the hash of `id`."""
        return ("seen", "unseen")[hashlib.sha256(self.id.encode()).digest()[0] & 1]


def tasks() -> list[Task]:
    """All of them, in the order of the file."""
    return [
        Task(f"{kind} {i + 1}", chat(kind, text), of.get("predictions", of["inputs"])[i])
        for kind, of in TASK_KINDS.items()
        for i, text in enumerate(of["inputs"])
    ]


def chat(kind: str, text: str) -> Chat:
    """The example of a kind, then the same request for another text."""
    of = TASK_KINDS[kind]
    question, answer = of["example"]
    said = (f"{of['instruction']}\n\n{question}", answer, f"{of['instruction']}\n\n{text}")
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]


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
        return len(self.output) < MAX_TOKENS and not measure.is_loop(self.text)


@contextlib.asynccontextmanager
async def served(model: Path, kind: str) -> AsyncIterator[Callable[..., Awaitable[Answer]]]:
    """A server of one thread, as a function of an `Ask` and further fields; its logs are in `CACHE`.

    A prompt is prefilled anew, unless the fields have another ``cache_salt``.
    """
    print(f"server {kind}: starting", file=sys.stderr)
    url, log = f"http://{HOST}:{(port := free_port())}", CACHE / f"server-{kind}.log"
    command = command_line(
        str(model), KINDS[kind].speculation, port, K, ("--max-model-len", "2048"), gpu=False
    )
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    env = {**environment(gpu=False), **threads, "GPU_ALIGN_DEBUG_DIR": str(CACHE / "steps")}
    patient = {"timeout": httpx.Timeout(900.0, pool=None), "limits": httpx.Limits(max_connections=8)}
    async with (
        running(command, url, log, env, lambda _: None, 900.0) as pid,
        httpx.AsyncClient(base_url=url, trust_env=False, **patient) as client,
    ):
        server = psutil.Process(pid)

        def cpu_s() -> float:
            each = [server, *server.children(recursive=True)]
            return sum(sum(process.cpu_times()[:2]) for process in each)

        async def ask(asked: Ask, **fields: Any) -> Answer:
            more = {"max_tokens": MAX_TOKENS, "return_token_ids": True, "cache_salt": uuid.uuid4().hex}
            before, body = cpu_s(), {**asked._asdict(), **more, **fields}
            found = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            [choice], seconds = found["choices"], round(cpu_s() - before, 2)
            return Answer(
                found["prompt_token_ids"], choice["token_ids"], choice["message"]["content"], seconds
            )

        yield ask


def record(model: Path, asks: Sequence[Ask]) -> list[Answer]:
    """The answer to each, of a server without drafts; kept in a file, and asked once."""
    path = CACHE / "answers.json"
    known = json.loads(path.read_text()) if path.exists() else {}

    async def answer(wanted: dict[str, Ask]) -> None:
        async with served(model, "none") as ask:
            found = (ask(each, cache_salt="recorded") for each in wanted.values())
            known.update(zip(wanted, await asyncio.gather(*found), strict=True))

    if wanted := {key: ask for ask in asks if (key := json.dumps(ask)) not in known}:
        asyncio.run(answer(wanted))
        write_at_once(path, [json.dumps(known).encode()])
    return [Answer(*known[json.dumps(ask)]) for ask in asks]


async def turns(model: Path, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Each task by each of `MODES` in turns: CPU seconds, and whether the answer is the one without drafts."""
    found: list[dict[str, Answer]] = [{} for _ in tasks]
    async with contextlib.AsyncExitStack() as stack:
        kinds = sorted({kind for kind, _ in MODES.values()})
        servers = {kind: await stack.enter_async_context(served(model, kind)) for kind in kinds}
        for turn in measure.turns(list(MODES), [1], len(tasks)):
            (kind, fields), task = MODES[turn.mode], tasks[turn.round]
            if turn.mode == "gpu_align":
                fields = {"prediction": {"type": "content", "content": task.prediction}}
            found[turn.round][turn.mode] = await servers[kind](Ask(task.messages), **fields)
    return [
        {
            "id": task.id, "tokens": len(made["none"].output), "counts": made["none"].counts,
            "identical": all(answer.output == made["none"].output for answer in made.values()),
            "cpu_s": {mode: made[mode].cpu_s for mode in MODES},
        }
        for task, made in zip(tasks, found, strict=True)
    ]  # fmt: skip

"""Request bodies against one V1 server: malformed, and a thousand of the longest at once.

Memory for N requests at once, each with a body of B bytes (`GPU_ALIGN_MAX_BODY_BYTES`) and a prediction of T
tokens (`GPU_ALIGN_MAX_PREDICTION_TOKENS`), beyond what an idle server has:

    API server     N · (4 B + 64 T)     the body as it arrived, joined, and as text, and one copy of these for what
                                        the allocator keeps; token ids as Python's numbers and as bytes
    engine core    N · 64 T + 12 A      the same ids in its queue, and in its worker, which is counted in; A tokens
                                        of `GPU_ALIGN_ARENA_TOKENS`

and 64 MiB for each process. A body whose text holds a character beyond Latin-1 takes 2 or 4 bytes a character.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from request_server import serve
from tiny_llama import build
from vllm_harness import Server

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.http_client import Client, request_head, resident
from tests.campaign.wire_bodies import (
    ENDPOINTS,
    Wrong,
    as_json,
    documents,
    good,
    mutations,
    posted,
    transfers,
    values,
)

TOKENS = 2048  # of the context, and so of a prediction
BODY = 2**20
ARENA = 2 * 8 * (TOKENS + 256)  # tokens: less than GPU_ALIGN_ARENA_TOKENS can hold all
SLACK = 64.0  # MiB
MIB = 2**20
FLAGS = ("--max-model-len", str(TOKENS), "--num-gpu-blocks-override", "64", "--disable-uvicorn-access-log")
#: vLLM gives up a chat template that has waited for 30 s, also behind the tokenising of other requests. With a
#: thousand at once that is too early on a busy machine.
ENVIRONMENT = {
    "GPU_ALIGN_DEBUG_DIR": "",
    "GPU_ALIGN_RECIPES": "base",
    "GPU_ALIGN_MEMORY_TOKENS": "20000",
    "GPU_ALIGN_MAX_BODY_BYTES": str(BODY),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # as in soak.py
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "600",
}
HEALTH = Wrong("health", "/health", request_head("GET", "/health", None))


async def answer_to(url: str, wrong: Wrong) -> int:
    """The status; 0 if the server closed the connection without one, −1 if nothing happened."""
    client = Client(url, seconds=30)
    try:
        writer = await client.open()
        writer.write(wrong.message)
        with suppress(ConnectionError):
            await writer.drain()
        if wrong.ends:
            writer.write_eof()
        return (await client.response())[0]
    except asyncio.TimeoutError:
        return -1
    except (EOFError, OSError):
        return 0
    finally:
        client.close()


async def vllm_answers_so(url: str, wrong: Wrong, status: int) -> bool:
    """Whether the same bytes get the same status where the key is another than `prediction`. On /invocations vLLM
    catches no error but `JSONDecodeError`: what nests too deep is a 500 there, whatever it is about."""
    message = wrong.message
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        message = message.replace("redictio".encode(encoding), "omethinx".encode(encoding))
    return message != wrong.message and await answer_to(url, wrong._replace(message=message)) == status


async def malformed(url: str, tally: Tally, cases: list[Wrong]) -> Counter[int]:
    """After each, /health answers; after each twentieth a good request is served."""
    statuses: Counter[int] = Counter()
    for index, wrong in enumerate(cases):
        status = await answer_to(url, wrong)
        holds = status in wrong.statuses
        if wrong.path == "/invocations" and status == 500:
            holds = await vllm_answers_so(url, wrong, status)
        statuses[status] += 1
        goes_on = await answer_to(url, HEALTH) == 200
        if index % 20 == 0:
            served = Wrong("good", wrong.path, posted(wrong.path, as_json(good(wrong.path))))
            goes_on &= await answer_to(url, served) == 200
        shown = wrong.message[:500].decode("latin-1")
        case = {"name": wrong.name, "path": wrong.path, "status": status, "goes on": goes_on, "sent": shown}
        # What is odd and taken all the same is not counted.
        tally.check(holds and goes_on, case, count=status not in (200, 500))
        tally.goes_on()
    return statuses


def longest(path: str, number: int) -> tuple[bytes, bytes]:
    """Beginning and end of a body between which words go: nobody else has sent its prediction."""
    own = " ".join(f"w{(number * 7 + i * i) % 400}" for i in range(100))
    text = json.dumps(good(path, {"type": "content", "content": f"{own} HERE"}))
    head, _, tail = text.encode().partition(b"HERE")
    return head, tail


async def at_once(url: str, tally: Tally, amount: int) -> Counter[int]:
    """That many bodies as long as is allowed, all on their way at the same time."""
    words = memoryview(b"w7 w11 w13 " * (BODY // 11 + 1))
    paths = [path for path in ENDPOINTS if not path.endswith("batch")]
    statuses: Counter[int] = Counter()
    begun, all_begun = 0, asyncio.Event()

    async def one(number: int) -> None:
        nonlocal begun
        path = paths[number % len(paths)]
        head, tail = longest(path, number)
        middle = words[: BODY - len(head) - len(tail)]
        async with Client(url, seconds=600) as client:
            writer = await client.open()
            writer.write(request_head("POST", path, BODY) + head)
            begun += 1
            if begun == amount:
                all_begun.set()
            await all_begun.wait()
            status, answer = -1, b""
            with suppress(asyncio.TimeoutError, EOFError, OSError):
                for start in range(0, len(middle), 2**17):
                    writer.write(middle[start : start + 2**17])
                    await writer.drain()
                writer.write(tail)
                status, answer = await client.response()
        statuses[status] += 1
        tally.check(
            status == 200 or 400 <= status < 500 or status == 503, {"path": path, "answer": answer[:500]}
        )
        tally.goes_on()

    await asyncio.gather(*(one(number) for number in range(amount)))
    return statuses


def memory(server: Server, tally: Tally, amount: int) -> str:
    both = [server.pid], [child.pid for child in server.engine_processes()]
    before = [resident(pids) for pids in both]
    for pid in (pid for pids in both for pid in pids):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the highest resident size so far
    statuses = asyncio.run(at_once(server.url, tally, amount))
    grown = [resident(pids, "VmHWM") - old for pids, old in zip(both, before, strict=True)]
    ids = amount * 64 * TOKENS / MIB
    most = [amount * 4 * BODY / MIB + ids + SLACK, ids + 12 * ARENA / MIB + SLACK]
    for name, found, limit in zip(("API server", "engine core"), grown, most, strict=True):
        tally.check(found <= limit, {"process": name, "grown by MiB": found, "at most": limit}, count=0)
    told = ", ".join(f"{n:,} × {status}" for status, n in sorted(statuses.items()))
    return (
        f"{told}; {BODY // MIB} MiB and {TOKENS:,} tokens each: API server +{grown[0]:,.0f} MiB, at most "
        f"N (4 B + 64 T) + {SLACK:.0f} MiB = {most[0]:,.0f}; engine core +{grown[1]:,.0f} MiB, at most "
        f"N 64 T + 12 A + {SLACK:.0f} MiB = {most[1]:,.0f}"
    )


def run(c: Campaign) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model", max_len=TOKENS)
        with serve(model, Path(folder), *FLAGS, environment=ENVIRONMENT, runner="V1") as server:
            tally = c.tally("malformed bodies on every endpoint: 4xx, and the server goes on", 600, 60)
            cases = [
                case
                for path in ENDPOINTS
                for case in (
                    *values(path, 16 * TOKENS),
                    *documents(path),
                    *transfers(path),
                    *mutations(path, c.rng, c.size(40, 5)),
                )
            ]
            statuses = asyncio.run(malformed(server.url, tally, c.rng.sample(cases, c.size(len(cases), 120))))
            told = ", ".join(f"{n:,} × {status or 'closed'}" for status, n in sorted(statuses.items()))
            upstream = "; vLLM's /invocations answers 500 to the same bodies without the field" * (
                500 in statuses
            )
            yield tally.row(f"{told}{upstream}")
            tally = c.tally(
                "requests at once with the longest prediction: all answered, memory bounded", 1000, 30
            )
            yield tally.row(memory(server, tally, tally.at_least))


if __name__ == "__main__":
    main(run)

"""Bodies that arrive slowly or never end, and what others notice meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from usage_harness import WORDS

from tests.campaign.campaign import Tally
from tests.campaign.http_client import JSON_HEAD, Client, request_head
from tests.campaign.wire_bodies import ENDPOINTS, as_json, good

CHUNKED = JSON_HEAD + b"transfer-encoding: chunked\r\n"
#: Nobody may wait longer for an answer of /health, s: as long as three times without slow bodies, or this.
LONGEST_WAIT = 1.0


class Slow:
    """Bodies that arrive in small pieces: whole ones, good and malformed, and two kinds that never end."""

    def __init__(self, url: str, tally: Tally, draw: random.Random) -> None:
        self._url, self._tally, self._draw = url, tally, draw
        self._longest_pause = tally.campaign.size(250, 80) / 1000  # s
        self._over = asyncio.Event()
        self.kinds: Counter[str] = Counter()

    async def all(self, bodies: list[tuple[str, str, bytes]]) -> None:
        waiting = [(body[0], asyncio.create_task(self._one(*body))) for body in bodies]
        await asyncio.gather(*(task for kind, task in waiting if kind != "never ends"))
        self._over.set()
        await asyncio.gather(*(task for _, task in waiting))

    def make(self, amount: int) -> list[tuple[str, str, bytes]]:
        """Kinds, endpoints and bodies; beforehand, because it takes the time of this process."""
        made = []
        for number in range(amount):
            kind = ("served", "refused", "never ends", "goes away")[number % 4]
            path = self._draw.choice([*ENDPOINTS])
            words = " ".join(self._draw.choices(WORDS, k=self._draw.choice([200, 2_000, 15_000])))
            hint = {"type": "text" if kind == "refused" else "content", "content": words}
            made.append((kind, path, as_json(good(path, hint))))
        return made

    async def _one(self, kind: str, path: str, body: bytes) -> None:
        draw, pieces = self._draw, self._draw.randrange(10, 60)
        size, chunked = len(body) // pieces + 1, draw.random() < 0.5
        pause = draw.uniform(0.02, self._longest_pause)
        part = body if kind in ("served", "refused") else body[: -draw.randrange(1, len(body) // 2)]
        status: int | None = None
        async with Client(self._url, seconds=60) as client:
            writer = await client.open()
            writer.write(
                request_head("POST", path, None, CHUNKED)
                if chunked
                else request_head("POST", path, len(body))
            )
            for start in range(0, len(part), size):
                piece = part[start : start + size]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await asyncio.sleep(pause)
            if kind in ("served", "refused"):
                writer.write(b"0\r\n\r\n" if chunked else b"")
                status = (await client.response())[0]
            if kind == "never ends":
                await self._over.wait()
                with suppress(asyncio.TimeoutError):  # nothing may come
                    status = len(await asyncio.wait_for(client.reader.read(1), 0.1))
        wanted = {"served": 200, "refused": 400}.get(kind)
        self.kinds[kind] += 1
        self._tally.check(
            status == wanted, {"kind": kind, "path": path, "status": status, "chunked": chunked}
        )


class Watch:
    """What others notice meanwhile: seconds of each GET /health and of each small request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = False
        self.health: list[float] = []
        self.requests: list[float] = []
        self.failed: list[int] = []

    async def during(self, work: Any) -> None:
        watching = [
            asyncio.create_task(self._watch(None)),
            *(asyncio.create_task(self._watch(p)) for p in ENDPOINTS),
        ]
        await work
        self._over = True
        await asyncio.gather(*watching)

    async def _watch(self, path: str | None) -> None:
        async with Client(self._url, seconds=300) as client:
            while not self._over:
                started = time.monotonic()
                answer = client.post(path, as_json(good(path))) if path else client.get("/health")
                status, _ = await answer
                (self.requests if path else self.health).append(time.monotonic() - started)
                if status != 200:
                    self.failed.append(status)
                await asyncio.sleep(0.02 if path else 0.002)


async def slow(url: str, tally: Tally, draw: random.Random, amount: int) -> str:
    before, meanwhile, bodies = Watch(url), Watch(url), Slow(url, tally, draw)
    made = bodies.make(amount)
    await before.during(asyncio.sleep(tally.campaign.size(5, 2)))
    await meanwhile.during(bodies.all(made))
    longest, usual = max(meanwhile.health), max(before.health)
    case = {"longest": longest, "without": usual, "failed": meanwhile.failed}
    tally.check(longest <= max(LONGEST_WAIT, 3 * usual) and not meanwhile.failed, case, count=0)
    served = f"one of {len(meanwhile.requests):,} requests {max(meanwhile.requests) * 1e3:.0f} ms"
    return (
        f"{bodies.kinds['never ends'] + bodies.kinds['goes away']} never ended; GET /health took "
        f"{longest * 1e3:.0f} ms at most (without them {usual * 1e3:.0f} ms), {served}"
    )

"""A client that costs little beside the server that it attacks, its answers, and the memory of server processes.

    async with Client(url) as client:
        status, body = await client.post("/v1/completions", json_bytes)

Plain HTTP/1.1 over asyncio's streams: what a program sends are the bytes that it has made.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

JSON_HEAD = b"content-type: application/json\r\n"


def request_head(method: str, path: str, length: int | None, more: bytes = JSON_HEAD) -> bytes:
    """The bytes before a body. length: what it says of the body's length; None: nothing."""
    says = b"" if length is None else b"content-length: %d\r\n" % length
    return b"%s %s HTTP/1.1\r\nhost: test\r\n%s%s\r\n" % (method.encode(), path.encode(), more, says)


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
        return await self.send(request_head("POST", path, len(body)) + body)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self.send(request_head("GET", path, None))

    async def send(self, message: bytes) -> tuple[int, bytes]:
        """Send these bytes, whatever they are, and read one response. Errors as those of `response`."""
        writer = await self.open()
        writer.write(message)
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


def resident(pids: list[int], field: str = "VmRSS") -> float:
    """Resident memory of these processes together, MiB. field: "VmHWM" for the highest that it was."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith(field)).split()[1])
    return total / 1024

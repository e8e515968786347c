"""Refuses a request body that brings a prediction and is too large to be parsed on the event loop.

vLLM parses JSON on the event loop, where every other request waits for it: a few milliseconds for a megabyte of
text, up to a microsecond for each key, array and object. A thread does not help, because the parser holds
Python's lock. No limit on the prediction can help after that, so these two are on the body, before anything is
parsed. Bodies without a prediction pass, whatever their size.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import limits
from vllm_integration.frontend.body_scan import VALUES_PER_ITEM, BodyScan
from vllm_integration.frontend.faults import tell, unless_it_fails
from vllm_integration.seams.install import strict

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/invocations",  # the same requests, as SageMaker sends them
)

#: Bytes that are looked at without letting others run.
_SLICE = 65536
#: What has failed, as the log says it.
_LIMIT = "limit a request body"


class BodyLimit:
    """ASGI middleware: HTTP 413 for a body over `GPU_ALIGN_MAX_BODY_BYTES` or `GPU_ALIGN_MAX_BODY_ITEMS` that has
    the key `prediction`.

    A body whose content-length is too short for either passes at once. Any other is read to its end, also one that
    is refused, because some clients read the answer only after they have sent everything; a refused body is not
    kept.

    A body that cannot be read here goes to vLLM as it is, with one ERROR line. (With `GPU_ALIGN_STRICT=1` the
    error is raised.)
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ENDPOINTS):
            return await self._app(scope, receive, send)
        body = unless_it_fails(_LIMIT, _to_be_read, scope)
        if body is None:
            return await self._app(scope, receive, send)
        messages = await body.read(receive)
        if (found := body.exceeds()) is None:
            return await self._app(scope, replay(messages, receive), send)
        reason, message = found
        limits.count_refused(reason)
        await refuse(send, 413, message)


def _to_be_read(scope: Message) -> _Body | None:
    """What reads this request's body; None where nothing of it can be over a limit."""
    if not in_use(scope):
        return None
    settings = Settings.from_env()
    if _content_length(scope) <= min(settings.max_body_bytes, settings.max_body_items):
        return None
    return _Body(settings)


def _content_length(scope: Message) -> float:
    """What the client says about its body's length; infinite when it says nothing."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return float("inf")


def in_use(scope: Message) -> bool:
    """Whether the application of this request serves an engine that drafts from predictions."""
    engine_client = getattr(scope["app"].state, "engine_client", None)
    return engine_client is not None and drafts_predictions(engine_client.vllm_config)


class _Body:
    """One request's body on its way in."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scan = BodyScan()
        self._is_whole = False
        self._is_refused = False
        self._has_failed = False

    async def read(self, receive: Receive) -> list[Message]:
        """All its messages; not those of a body that is refused."""
        messages: list[Message] = []
        while not self._is_whole:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return [*messages, message]
            chunk = message.get("body", b"")
            for start in range(0, len(chunk), _SLICE):
                if start:
                    await asyncio.sleep(0)
                self._look_at(chunk[start : start + _SLICE])
            self._is_whole = not message.get("more_body", False)
            messages.append(message)
            if self._is_refused:
                messages.clear()
        return messages

    def _look_at(self, part: bytes) -> None:
        """Once this has failed, nothing more is looked at: what has been refused by then stays refused."""
        if self._has_failed:
            return
        scan, settings = self._scan, self._settings
        try:
            scan.feed(part)
            is_over = scan.size > settings.max_body_bytes or scan.items > settings.max_body_items
            self._is_refused |= is_over and scan.brings_prediction
        except Exception as error:
            if strict():
                raise
            self._has_failed = True
            tell(_LIMIT, error)

    def exceeds(self) -> tuple[limits.Reason, str] | None:
        """The limit that the whole body is over, and what to tell the client; None if it is served."""
        scan, settings = self._scan, self._settings
        if not (self._is_whole and self._is_refused):
            return None
        if scan.size > settings.max_body_bytes:
            limit = f"{settings.max_body_bytes} bytes (GPU_ALIGN_MAX_BODY_BYTES), got {scan.size}"
            return "bytes", f"prediction: expected a request body of at most {limit}"
        limit = (
            f"{settings.max_body_items} keys, arrays and objects, {VALUES_PER_ITEM} plain values counting as one "
            f"(GPU_ALIGN_MAX_BODY_ITEMS), got {scan.items}"
        )
        return "items", f"prediction: expected a request body of at most {limit}"


def replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that begins with messages that were received already."""
    rest = iter(messages)

    async def again() -> Message:
        message = next(rest, None)
        return await receive() if message is None else message

    return again


async def refuse(send: Send, code: int, message: str) -> None:
    """Answer with an error that names the field."""
    error = {
        "message": message,
        "type": "BadRequestError",
        "param": "prediction",
        "code": code,
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})

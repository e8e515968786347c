"""Refuses a request body that brings a prediction and is too long to be parsed on the event loop.

vLLM parses JSON on the event loop, where every other request waits for it: about 4 ms for a megabyte of
text. No limit on the prediction can help after that, so this one is on the bytes, before anything is parsed.
Bodies without a prediction pass, whatever their length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import limits, redaction
from vllm_integration.frontend.faults import unless_it_fails
from vllm_integration.seams.install import seam
from vllm_integration.wire import prediction as wire

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/invocations",  # the same requests, as SageMaker sends them
)

_KEY = re.compile(rb'"(?:prediction|%s)"\s*:' % wire.KEY.encode())
_OVERLAP = 64  # a key may lie across two chunks; one with more white space before its colon is let through


class BodyLimit:
    """ASGI middleware: HTTP 413 for a body over `GPU_ALIGN_MAX_BODY_BYTES` that has the key `prediction`.

    A body whose content-length is within the limit passes at once. Any other is read to its end, also one that is
    refused, because some clients read the answer only after they have sent everything; a refused body is not kept.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ENDPOINTS):
            return await self._app(scope, receive, send)
        if not _in_use(scope):
            return await self._app(scope, receive, send)
        limit = Settings.from_env().max_body_bytes
        if _content_length(scope) <= limit:
            return await self._app(scope, receive, send)
        messages = await _read(receive, limit)
        if messages is not None:
            return await self._app(scope, _replay(messages, receive), send)
        limits.count_refused("bytes")
        await _refuse(send, limit)


def _content_length(scope: Message) -> float:
    """What the client says about its body's length; infinite when it says nothing."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return float("inf")


def _in_use(scope: Message) -> bool:
    engine_client = getattr(scope["app"].state, "engine_client", None)
    return engine_client is not None and drafts_predictions(engine_client.vllm_config)


async def _read(receive: Receive, limit: int) -> list[Message] | None:
    """All messages of the body; None when it is longer than `limit` and brings a prediction."""
    messages: list[Message] = []
    size, found, tail = 0, False, b""
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has gone
            return [*messages, message]
        chunk = message.get("body", b"")
        size += len(chunk)
        if not found:
            window = tail + chunk
            found = _KEY.search(window) is not None
            tail = window[-_OVERLAP:]
        messages.append(message)
        if found and size > limit:
            messages.clear()
        if not message.get("more_body", False):
            return None if found and size > limit else messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    rest = iter(messages)

    async def replay() -> Message:
        message = next(rest, None)
        return await receive() if message is None else message

    return replay


async def _refuse(send: Send, limit: int) -> None:
    error = {
        "message": f"prediction: expected a request body of at most {limit} bytes, got more",
        "type": "BadRequestError",
        "param": "prediction",
        "code": 413,
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(
    original: Callable[..., Any], args: Any, app: Any, *more: Any, **kwargs: Any
) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost: behind authentication, before parsing.

    An HTTP server starts here, so this is also where its log is kept free of predictions.
    """
    from starlette.middleware import Middleware

    unless_it_fails("keep predictions out of tracebacks", redaction.install)
    app.user_middleware.append(Middleware(BodyLimit))
    return original(args, app, *more, **kwargs)

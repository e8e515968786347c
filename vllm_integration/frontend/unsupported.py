"""Refuses a `prediction` where nothing would read it, instead of dropping it silently."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from vllm_integration.frontend import limits
from vllm_integration.frontend.body_limit import App, Message, Receive, Send, in_use, refuse, replay
from vllm_integration.frontend.body_scan import BodyScan
from vllm_integration.frontend.faults import tell
from vllm_integration.seams.install import is_installed, strict

#: Endpoints that generate, or prepare what is generated, and have no place for a prediction.
ENDPOINTS = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/v1/systemone",
    "/generative_scoring",
)
#: Another one where vLLM has changed so much that the field cannot be read there.
_MESSAGES = "/v1/messages"


class RefusedPredictions:
    """ASGI middleware: HTTP 400 for a body with the key `prediction` on one of `ENDPOINTS`; `null` is none.

    Other paths pass untouched, and so does everything on servers that do not draft from predictions. A body that
    cannot be read here goes to vLLM as it is, with one ERROR line (with `GPU_ALIGN_STRICT=1` the error is raised).
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        path = _endpoint_of(scope["path"]) if is_post else None
        if path is None or not in_use(scope):
            return await self._app(scope, receive, send)
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":  # the client has gone
                break
        try:
            refused = await _brings_prediction(messages)
        except Exception as error:
            if strict():
                raise
            tell("look for a prediction in a request body", error)
            refused = False
        if not refused:
            return await self._app(scope, replay(messages, receive), send)
        limits.count_refused("unsupported")
        await refuse(send, 400, f"prediction: {path} does not take a prediction")


def _endpoint_of(path: str) -> str | None:
    """Which endpoint a path is that has no place for a prediction; None for any other."""
    if path.endswith(_MESSAGES):
        return None if is_installed("messages") else _MESSAGES
    return next((endpoint for endpoint in ENDPOINTS if path.endswith(endpoint)), None)


async def _brings_prediction(messages: list[Message]) -> bool:
    scan = BodyScan()
    for message in messages:
        scan.feed(message.get("body", b""))
    if not scan.brings_prediction:
        return False
    body = b"".join(message.get("body", b"") for message in messages)
    try:
        document: Any = await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError):  # vLLM says what is wrong with it
        return False
    return isinstance(document, dict) and document.get("prediction") is not None

"""vLLM's own HTTP application, its routes, request models and error handlers, around a serving that only says
"served"; and what drives it without a socket."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm_fakes import config
from vllm_harness import MAX_MODEL_LEN

from vllm_integration.frontend import middleware
from vllm_integration.frontend.usage import HttpRequest, http_request

#: A good request to each endpoint.
ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}]},
    "/v1/completions": {"prompt": "w5"},
    "/v1/responses": {"input": "w5"},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "w5"}]]},
}


class Renderer:
    """A token is a character."""

    def __init__(self) -> None:
        self.tokenizer: Any = self
        self.read: list[str] = []
        self._executor = ThreadPoolExecutor(1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        self.read.append(text)
        return [*map(ord, text)]


class Engine:
    """As much of an engine's client as the front end touches."""

    def __init__(self, method: str = "custom_class", limit: int = MAX_MODEL_LEN, **settings: Any) -> None:
        self.vllm_config = config(max_model_len=limit, **settings)
        self.vllm_config.speculative_config.method = method
        self.renderer = Renderer()


class Serving:
    """Says "served", and keeps what it got: the request, and what its tasks know of it."""

    def __init__(self, engine_client: Any = None) -> None:
        self.engine_client = engine_client or Engine()
        self.got: list[tuple[Any, HttpRequest | None]] = []

    def create_error_response(self, message: str, param: str | None = None) -> Any:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        return create_error_response(message, param=param)

    async def serve(self, request: Any, raw_request: Any = None) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

        self.got.append((request, http_request.get()))
        return ErrorResponse(error=ErrorInfo(message="served", type="served", code=200))

    create_chat_completion = create_responses = create_completion = create_batch_chat_completion = serve


def make_app(serving: Serving | None = None) -> Any:
    """The application, with our middleware."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion import api_router as chat
    from vllm.entrypoints.openai.completion import api_router as completion
    from vllm.entrypoints.openai.responses import api_router as responses
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    app = FastAPI()
    for module in (chat, completion, responses):
        module.attach_router(app)
    init_exception_handler(app)
    middleware.init_entrypoints_middleware(lambda args, app: None, None, app)
    serving = serving or Serving()
    for name in ("chat", "chat_batch", "completion", "responses"):
        setattr(app.state, f"openai_serving_{name}", serving)
    app.state.engine_client = serving.engine_client
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.enable_server_load_tracking = False
    return app


def taken(
    engine: Engine, document: Any, path: str = "/v1/chat/completions", switch: str | None = None
) -> tuple[Any, HttpRequest | None]:
    """What vLLM gets of a request behind our middleware, and what the request's tasks know; or the error."""
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.append((json.loads((await receive())["body"]), http_request.get()))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    if switch is not None:
        scope["headers"] = [(b"x-gpu-align", switch.encode())]
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(document).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        await middleware.PredictionMiddleware(app)(scope, receive, send)
        assert http_request.get() is None

    asyncio.run(run())
    if got:
        return got[0]  # type: ignore[no-any-return]
    return json.loads(sent[1]["body"])["error"], None


async def send(
    app: Any,
    path: str,
    chunks: list[bytes],
    *,
    length: int | None = None,
    more: tuple[dict[str, Any], ...] = (),
) -> tuple[int, bytes, int]:
    """POST a body that arrives in chunks: the status, the answer, and how many chunks were read.

    length: the Content-Length, if the client says it. more: messages that come instead of the body's end.
    """
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages += more or ({"type": "http.request", "body": b"", "more_body": False},)
    taken, sent = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        if taken > len(messages):
            await asyncio.Event().wait()  # the client waits for its answer
        return messages[taken - 1]

    async def answer(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": headers, "scheme": "http", "root_path": ""}
    scope |= {"server": ("test", 80), "client": ("test", 1), "app": app}
    await app(scope, receive, answer)
    body = b"".join(message.get("body", b"") for message in sent)
    return (sent[0]["status"] if sent else 0), body, min(taken, len(chunks))

"""vLLM's own HTTP application, its routes, request models and error handlers, around a serving that only says
"served"; and what drives it without a socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_fakes import config
from vllm_harness import MAX_MODEL_LEN

from vllm_integration.frontend import endpoints as api
from vllm_integration.seams.install import wrapped_by

#: A good request to each endpoint.
ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}]},
    "/v1/completions": {"prompt": "w5"},
    "/v1/responses": {"input": "w5"},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "w5"}]]},
}


class Serving:
    """Says "served". A token is a character."""

    def __init__(self) -> None:
        self.engine_client = SimpleNamespace(vllm_config=config(max_model_len=MAX_MODEL_LEN))
        self.renderer = self
        self.tokenizer = "a tokenizer"

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: Any) -> dict[str, list[int]]:
        return {"prompt_token_ids": [1] * min(len(prompt["prompt"]), params.truncate_prompt_tokens)}

    def create_error_response(self, message: str, param: str | None = None) -> Any:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        return create_error_response(message, param=param)

    async def serve(self, request: Any, raw_request: Any = None) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

        return ErrorResponse(error=ErrorInfo(message="served", type="served", code=200))

    create_chat_completion = create_responses = wrapped_by(api.serve)(serve)
    create_completion = wrapped_by(api.serve_completion)(serve)
    create_batch_chat_completion = wrapped_by(api.serve_batch)(serve)


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
    api.init_entrypoints_middleware(lambda args, app: None, None, app)
    serving = serving or Serving()
    for name in ("chat", "chat_batch", "completion", "responses"):
        setattr(app.state, f"openai_serving_{name}", serving)
    app.state.engine_client = serving.engine_client
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.enable_server_load_tracking = False
    return app


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

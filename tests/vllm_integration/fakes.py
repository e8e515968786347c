"""Stand-ins for unit tests: vLLM's configuration and requests, and its HTTP application.

The application has vLLM's own routes, request models and error handlers, around a serving that only says "served".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
import prometheus_client

from tests.vllm.engines import SERVER_MAX_LEN
from vllm_integration.frontend import middleware
from vllm_integration.frontend.usage import HttpRequest, http_request
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, survival_levels
from vllm_integration.wire.steps import encode


def config(
    K: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 64,
    vocab_size: int = 100,
    rank: int = 0,
    tp: int = 1,
    v2: bool = False,
    method: str = "custom_class",
    layers: str = "",
    architecture: str = "",
    **speculative: Any,
) -> Any:
    """As much of a `VllmConfig` as is read. layers: "is_hybrid" or "is_attention_free". speculative: more of its
    `speculative_config`."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=K, method=method, model="vllm_integration.PredictedOutputs", **speculative
        ),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            get_vocab_size=lambda: vocab_size,
            skip_tokenizer_init=True,
            architecture=architecture,
            **{name: name == layers for name in ("is_hybrid", "is_attention_free")},
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=False,
            scheduler_cls=None,
        ),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=512),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tp),
        use_v2_model_runner=v2,
    )


def request_of(req_id: str, *, predicted: bool = True, max_tokens: int = 100) -> Any:
    """As much of a vLLM request as the draft budget reads."""
    params = SimpleNamespace(extra_args={wire.KEY: [1, 2]} if predicted else None, max_tokens=max_tokens)
    return SimpleNamespace(request_id=req_id, sampling_params=params, output_token_ids=range(0))


def report_of(drafts: Mapping[str, Sequence[float]], *, K: int = 16, age: int = 0) -> DraftReport:
    """A report of drafts whose tokens survive with these probabilities."""
    length = np.array([len(survival) for survival in drafts.values()], dtype=np.int32)
    survival = np.zeros((len(drafts), K))
    for row, values in enumerate(drafts.values()):
        survival[row, : len(values)] = values
    nowhere = np.zeros_like(length)
    levels = survival_levels(survival, length)
    return DraftReport([StepDrafts(list(drafts), age, nowhere, length, nowhere, levels)])


# --- messages ---


class Step(NamedTuple):
    """One verification step, as plain numbers; fields as in `wire.steps.Steps`."""

    source: int
    length: int
    verified: int
    accepted: int


def message(steps: Sequence[Step], *, before: int = 0, own: bool = True, refused: int = 0) -> str:
    """What travels with one output: `steps`, the last of them its own if `own`."""
    numbers = [number for step in steps for number in step] + [before, own + 2 * refused]
    return encode(np.array(numbers, dtype=np.int16), [len(numbers)])[0]


def refused(reason: str, action: str = "refused") -> float:
    """Predictions of this process that were not taken whole."""
    labels = {"reason": reason, "action": action}
    return prometheus_client.REGISTRY.get_sample_value("gpu_align_predictions_refused_total", labels) or 0


# --- the HTTP application ---

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

    def __init__(self, method: str = "custom_class", limit: int = SERVER_MAX_LEN, **settings: Any) -> None:
        self.vllm_config = config(max_model_len=limit, method=method, **settings)
        self.renderer = Renderer()


class Serving:
    """Says "served"."""

    def __init__(self) -> None:
        self.engine_client = Engine()

    def create_error_response(self, message: str, param: str | None = None) -> Any:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        return create_error_response(message, param=param)

    async def serve(self, request: Any, raw_request: Any = None) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

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
    engine: Engine,
    document: Any,
    path: str = "/v1/chat/completions",
    switch: str | None = None,
    answer_of_vllm: Any = None,
) -> tuple[Any, HttpRequest | None]:
    """What vLLM gets of a request behind our middleware, and what the request's tasks know; or the error."""
    got: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        got.append((json.loads((await receive())["body"]), http_request.get()))
        headers = [] if answer_of_vllm is None else [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = json.dumps(answer_of_vllm, separators=(",", ":")).encode() if headers else b""
        await send({"type": "http.response.body", "body": body})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        await middleware.PredictionMiddleware(vllm)(scope, receive, send)
        assert http_request.get() is None

    header = {} if switch is None else {"x-gpu-align": switch}
    _, answer = post(app, path, json.dumps(document).encode(), **header)
    return got[0] if got else (json.loads(answer)["error"], None)


def post(app: Any, path: str, body: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, bytes]:
    """POST a body, which may come in parts, to an application: the status and the answer."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            given = {"content-type": "application/json", **headers}
            return await client.post(path, content=body, headers=given)

    answer = asyncio.run(run())
    return answer.status_code, answer.content

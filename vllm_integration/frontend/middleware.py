"""The ASGI middleware of predictions, the innermost of vLLM's HTTP server. It takes out of a request what is ours
before vLLM parses it, hands it to the request's tasks, and completes the `usage` of the response."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config.in_use import drafts_predictions
from ..config.settings import Settings, drafts_without_prediction
from ..seams.guard import Guard
from ..seams.install import seam
from ..wire import request as wire
from . import conversation, metrics, status
from .prediction import (
    ENDPOINTS,
    FIELD,
    HEADER,
    UNSUPPORTED_ENDPOINTS,
    FieldError,
    count_refused,
    counting,
    reading,
    serve_without_prediction,
    take,
    tell_once,
)
from .skeletons import Template, learn_style, style_key
from .usage import HttpRequest, http_request

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Its `usage` stays as it is.
_MESSAGES = "/v1/messages"
#: Bytes of a body that are looked at on the event loop; longer ones are in a thread.
_SHORT = 65536
_limiting = Guard("body limit", "does not limit request bodies", core=True, then=metrics.show_faults)


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(
    original: Callable[..., Any], args: Any, app: Any, *more: Any, **kwargs: Any
) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost: behind authentication, before parsing. An HTTP
    server starts here: it says what it is."""
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(PredictionMiddleware))
    Guard("status", "does not say what this server is", then=metrics.show_faults).run(status.announce)
    return original(args, app, *more, **kwargs)


class PredictionMiddleware:
    """ASGI middleware.

    HTTP 413: a body over `GPU_ALIGN_MAX_BODY_BYTES` brings a prediction. HTTP 400: something is malformed, or a
    prediction comes to one of `UNSUPPORTED_ENDPOINTS`.

    Other paths pass untouched, as does everything on servers that do not draft from predictions. A body in which
    nothing can be ours is not parsed, and goes to vLLM as it came. One that is refused is read to its end, because
    some clients read the answer only after they have sent everything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        body: _Body | None = reading.run(_to_be_read, scope) if is_post else None
        if body is None:
            tells = is_post and scope["path"].endswith(ENDPOINTS)
            return await self._app(scope, _replay([], receive, tells=True) if tells else receive, send)
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":  # the client has gone
                return await self._app(scope, _replay(messages, receive), send)
        request = None
        try:
            request, rest = await body.take(b"".join(message.get("body", b"") for message in messages))
            if rest is not None:
                messages = [{"type": "http.request", "body": rest, "more_body": False}]
        except FieldError as error:
            from starlette.responses import JSONResponse

            error.count()
            told = {
                "message": str(error),
                "type": "BadRequestError",
                "param": error.parameter,
                "code": error.code,
            }
            kind = {"type": "error"} if body.endpoint == _MESSAGES else {}
            return await JSONResponse({**kind, "error": told}, status_code=error.code)(scope, receive, send)
        except Exception as error:
            serve_without_prediction("A request", error)
        if request is not None and body.endpoint != _MESSAGES:
            send = _completing(send, request)
        token = http_request.set(request)  # in the context of this request's own task
        try:
            await self._app(scope, _replay(messages, receive), send)
        finally:
            http_request.reset(token)


def _to_be_read(scope: Scope) -> _Body | None:
    """Return the reader of this request's body, or None if the body is not read."""
    endpoints = (each for each in (*ENDPOINTS, *UNSUPPORTED_ENDPOINTS) if scope["path"].endswith(each))
    endpoint = max(endpoints, key=len, default="")
    engine_client = getattr(scope["app"].state, "engine_client", None)
    if not endpoint or engine_client is None or not drafts_predictions(engine_client.vllm_config):
        return None
    switch = dict(scope["headers"]).get(HEADER)
    return _Body(
        Settings.of(engine_client.vllm_config),
        endpoint,
        engine_client,
        switch,
        Template.of(scope["app"].state),
    )


#: Keys that bring a prediction.
_KEYS = (FIELD.encode(), wire.KEY.encode())


def _pattern(*keys: bytes) -> re.Pattern[bytes]:
    """All that JSON reads as one of these keys: each letter may be written as backslash, u and four digits."""
    letters = (b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in key) for key in keys)
    return re.compile(rb'"(?:%s)"[ \t\n\r]*:' % b"|".join(letters))


_KEY, _OPTIONS_KEY = _pattern(*_KEYS), _pattern(b"vllm_xargs")
#: Keys that a client may have meant.
_MISSPELT = re.compile(rb'"[\w-]{0,8}predict[\w-]{0,8}"[ \t\n\r]*:')
#: Without one of these a body has no such key.
_MAY_BE = (b"predict", b"vllm_xargs", rb"\u")


def scan(body: bytes) -> tuple[bool, bool]:
    """Of a body of JSON: whether one of `_KEYS` is a key of an object in it, however written; whether there may be
    anything that `take` looks at. JSON may be UTF-16 or UTF-32, which have bytes of zero, as no UTF-8 of it."""
    body = body.replace(b"\0", b"")
    if not any(part in body for part in _MAY_BE):
        return False, False
    brings_prediction = _KEY.search(body) is not None
    return brings_prediction, brings_prediction or any(
        each.search(body) for each in (_OPTIONS_KEY, _MISSPELT)
    )


class _Body:
    """One request's body on its way in. switch: what its header says of drafts, if anything."""

    def __init__(
        self,
        settings: Settings,
        endpoint: str,
        client: Any,
        switch: bytes | None = None,
        template: Template = Template(),  # noqa: B008 (it does not change)
    ) -> None:
        self.endpoint, self._is_limited = endpoint, endpoint in ENDPOINTS
        self._settings, self._client, self._template = settings, client, template
        self._switch = None if switch is None else switch.decode("latin-1")

    async def take(self, body: bytes) -> tuple[HttpRequest | None, bytes | None]:
        """Read the request's prediction and choices, and its body without them; None for a part that does not
        change. Raises `FieldError`."""
        vllm_config, renderer = self._client.vllm_config, self._client.renderer
        run = functools.partial(asyncio.get_running_loop().run_in_executor, renderer._executor)
        look, settings = functools.partial(_limiting.run, scan, body), self._settings
        found = look() if len(body) <= _SHORT else await run(look)
        brings_prediction, may_be_ours = found or (False, True)
        if brings_prediction and self._is_limited and len(body) > settings.max_body_bytes:
            most = f"{settings.max_body_bytes} bytes (GPU_ALIGN_MAX_BODY_BYTES)"
            message = f"{FIELD}: expected a request body of at most {most}, got {len(body)}"
            raise FieldError(message, "bytes", code=413)
        always = settings.conversation or settings.draft_without_prediction
        is_asked = self._is_limited and (self._switch is not None or always)
        prediction = rest = document = None
        if may_be_ours or is_asked:
            taken = await run(take, body, self.endpoint, self._switch, vllm_config, renderer)
            prediction, rest, document = taken.prediction, taken.body, taken.document
            try:
                prediction = await conversation.join(run, taken, vllm_config, renderer, self._template)
            except Exception as error:
                count_refused("conversation", "dropped")
                serve_without_prediction("A conversation", error)
        if prediction is None and settings.usage_details and drafts_without_prediction(settings):
            prediction = wire.Prediction()
        if prediction is None:
            return None, rest
        request = HttpRequest(prediction, settings)
        if document is not None:
            views = conversation.views_of(renderer)
            request.answered = functools.partial(learn_style, views, style_key(document))
        return request, rest


def _completing(send: Send, request: HttpRequest) -> Send:
    """A `send` that completes the `usage` of a response of JSON, or of a stream's last event."""
    held: Message | None = None  # the start of JSON, whose length may change
    is_stream = False

    async def complete(message: Message) -> None:
        nonlocal held, is_stream
        if message["type"] == "http.response.start":
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            is_stream = content_type.startswith(b"text/event-stream")
            if content_type.startswith(b"application/json"):
                held = message
                return
        elif message["type"] == "http.response.body" and (held or is_stream):
            read = _completed_events if is_stream else _completed
            message = {"body": b"", **message}  # optional, as the headers are
            if is_stream or not message.get("more_body", False):
                body = counting.run(read, message["body"], request)
                message = message if body is None else {**message, "body": body}
            if held is not None:
                headers = [each for each in held["headers"] if each[0] != b"content-length"]
                if not message.get("more_body", False):
                    headers.append((b"content-length", str(len(message["body"])).encode()))
                await send({**held, "headers": headers})
                held = None
        await send(message)

    return complete


def _completed(body: bytes, request: HttpRequest) -> bytes | None:
    """The JSON of a response with the counts; None where there are none."""
    document = json.loads(body) if b'"usage":{' in body else None
    if document is None:
        return None
    request.answered(document)
    if not request.complete(document):
        return None
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _completed_events(chunk: bytes, request: HttpRequest) -> bytes | None:
    """The same of the events of a stream. What a user writes cannot look like the marks of the last one: quotes
    inside of JSON strings are escaped."""
    if not (b'"usage":{' in chunk and (b'"choices":[]' in chunk or b'"response":{' in chunk)):
        return None
    start = b"data: "
    lines = chunk.split(b"\n")
    for place, line in enumerate(lines):
        if line.startswith(start + b"{"):
            lines[place] = start + (_completed(line[len(start) :], request) or line[len(start) :])
    return b"\n".join(lines)


def _replay(messages: list[Message], receive: Receive, *, tells: bool = False) -> Receive:
    """A `receive` that begins with messages that were received already. tells: of a prediction, once."""
    rest = iter(messages)

    async def again() -> Message:
        message = next(rest, None) or await receive()
        if tells and b'"prediction":' in message.get("body", b""):
            tell_once(
                "Requests bring predictions; this server does not draft from them (--speculative-config)"
            )
        return message

    return again

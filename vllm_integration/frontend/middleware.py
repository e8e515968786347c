"""The ASGI middleware of predictions, the innermost of vLLM's HTTP server. It takes out of a request what is ours
before vLLM parses it, hands it to the request's tasks, and completes the `usage` of the response."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import json
import re
from typing import TYPE_CHECKING, Any

import gpu_align

from ..config.in_use import drafts_predictions, engine_here, inner_tokens
from ..config.settings import SHOWN_HASH, Settings, drafts_without_prediction, packs_of
from ..seams.guard import Guard, logger, shown_reason, warn_once
from ..seams.install import Original, off_reason, seam
from ..wire import request as wire
from . import conversation, metrics
from .prediction import (
    ENDPOINTS,
    FIELD,
    HEADER,
    UNSUPPORTED_ENDPOINTS,
    FieldError,
    choices_of,
    count_refused,
    counting,
    reading,
    serve_without_prediction,
    take,
    unsupported,
)
from .usage import HttpRequest, http_request

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Its `usage` stays as it is.
_MESSAGES = "/v1/messages"
#: Endpoints of vLLM that change weights, or are called when they have changed.
_MODEL_CHANGES = (
    "/collective_rpc", "/reset_prefix_cache", "/sleep", "/pause", "/update_weights", "/finish_weight_update",
    "/update_weight_version", "/load_lora_adapter",
)  # fmt: skip
#: Bytes of a body that are looked at on the event loop; longer ones are in a thread.
_SHORT = 65536
#: Bytes of a longer body that are read between two turns of the loop; characters of its strings that may be ours.
_PIECE, _LONGEST = 16384, 128
#: Text with whole strings whose escapes are blanked, then a bracket; a string with its escapes.
_PART = re.compile(r'(?:[^][{}"]+|"[^"]*")*([][{}]?)')
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_limiting = Guard("body limit", "does not limit request bodies", core=True, then=metrics.show_faults)


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(original: Original, args: Any, app: Any, *more: Any, **kwargs: Any) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost. A server starts here: it says what it is."""
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(PredictionMiddleware))
    Guard("status", "does not say what this server is", then=metrics.show_faults).run(announce)
    return original(args, app, *more, **kwargs)


def announce() -> None:
    """Say what the server of this process is, where it drafts from predictions: in the log and on `/metrics`.
    Reads the packs, which may take a second; one that cannot be read here has no hash."""
    if (engine := engine_here()) is None:
        return
    import vllm

    settings, speculative, inner = Settings.of(engine), engine.speculative_config, inner_tokens(engine)
    facts = {
        "version": gpu_align.__version__,
        "vllm": vllm.__version__,
        "runner": "V2" if engine.use_v2_model_runner else "V1",
        "num_draft_tokens": speculative.num_speculative_tokens,
        "drafter": f"{speculative.method}, {inner} tokens" if inner else "",
        "max_num_seqs": engine.scheduler_config.max_num_seqs,
    }
    packs = [(name, (found or "")[:SHOWN_HASH]) for name, found in packs_of(settings)]
    short = ",".join(f"{name}@{found.removeprefix('sha256:')}".rstrip("@") for name, found in packs)
    metrics.set_info(**facts, recipes=short)
    metrics.show_faults()
    if off_reason() is not None:
        return
    told = [f"{name} {found or 'not read'}" for name, found in packs]
    beside = f"; other requests by {facts['drafter']}" if inner else ""
    memory = f"response memory of {settings.memory_tokens} tokens"
    changed = [f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in settings.changed().items()]
    line = (
        f"gpu_align {facts['version']} drafts on vLLM {facts['vllm']}, {facts['runner']} model runner, "
        f"K={facts['num_draft_tokens']}{beside}; `prediction` on {', '.join(ENDPOINTS[:-1])}; "
        f"recipes: {', '.join(told) or 'off'}; "
        f"{memory if settings.memory_tokens else 'no response memory'}; "
        f"settings: {' '.join(changed) or 'defaults'}"
    )
    logger.info("%s", shown_reason(line, longest=2000))


class PredictionMiddleware:
    """ASGI middleware.

    HTTP 413: a body over `GPU_ALIGN_MAX_BODY_BYTES` brings a prediction. HTTP 400: something is malformed, or a
    prediction comes to one of `UNSUPPORTED_ENDPOINTS`.

    Other paths, and engines that are not ours, are left alone. A body in which nothing can be ours goes to vLLM
    unparsed; one over that limit as it comes, and is not kept here. One that is refused is read to its end: some
    clients read the answer only after they have sent everything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        body: _Body | None = reading.run(_to_be_read, scope) if is_post else None
        if body is None:
            tells = is_post and scope["path"].endswith(ENDPOINTS)
            if is_post and scope["path"].endswith(_MODEL_CHANGES):
                reading.run(conversation.forget_styles, scope["app"].state)
            return await self._app(scope, _replay([], receive, tells=True) if tells else receive, send)
        messages: list[Message] = []
        num_bytes, request, long = 0, None, None
        while long is None and (not messages or messages[-1].get("more_body", False)):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":  # the client has gone
                return await self._app(scope, _replay(messages, receive), send)
            num_bytes += len(messages[-1].get("body", b""))
            long = LongBody() if num_bytes > body.max_bytes else None
        try:
            if long is not None:
                request = body.passed_on()
            else:
                request, rest = await body.take(b"".join(message.get("body", b"") for message in messages))
                if rest is not None:
                    messages = [{"type": "http.request", "body": rest, "more_body": False}]
        except FieldError as error:
            return await _answer(error, body.endpoint)(scope, receive, send)
        except Exception as error:
            serve_without_prediction("A request", error)
        received, sent = _replay(messages, receive), send
        if long is not None:
            received, sent = _looked_at(long, body, received, send)
        if request is not None and body.endpoint != _MESSAGES:
            sent = _completing(sent, request)
        token = http_request.set(request)  # in the context of this request's own task
        try:
            await self._app(scope, received, sent)
        except Exception:  # vLLM's own, as for a client that has gone
            if long is None or long.refused is None:
                raise
        finally:
            http_request.reset(token)
        if long is not None and long.refused is not None:
            await _answer(long.refused, body.endpoint)(scope, receive, send)


def _looked_at(long: LongBody, body: _Body, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Both for a body over the limit: if that brings a prediction, as if the client had gone."""

    async def look() -> Message:
        message = await receive()
        part = message.get("body", b"")
        for start in range(0, len(part), _PIECE):
            _limiting.run(long.feed, part[start : start + _PIECE])
            await asyncio.sleep(0)  # others get turns
        if message["type"] == "http.request" and not message.get("more_body", False):
            long.refused = body.refusal(long)
        return message if long.refused is None else {"type": "http.disconnect"}

    async def send_if_served(message: Message) -> None:
        if long.refused is None:
            await send(message)

    return look, send_if_served


def _answer(error: FieldError, endpoint: str) -> ASGIApp:
    from starlette.responses import JSONResponse

    error.count()
    told = {"message": str(error), "type": "BadRequestError", "param": error.parameter, "code": error.code}
    kind = {"type": "error"} if endpoint == _MESSAGES else {}
    return JSONResponse({**kind, "error": told}, status_code=error.code)


def _to_be_read(scope: Scope) -> _Body | None:
    """The reader of this request's body, or None if the body is not read."""
    endpoints = (each for each in (*ENDPOINTS, *UNSUPPORTED_ENDPOINTS) if scope["path"].endswith(each))
    endpoint, state = max(endpoints, key=len, default=""), scope["app"].state
    client = getattr(state, "engine_client", None)
    if not endpoint or client is None or not drafts_predictions(client.vllm_config):
        return None
    return _Body(endpoint, client, dict(scope["headers"]).get(HEADER), conversation.Template.of(state))


def _pattern(key: bytes) -> bytes:
    """A key of JSON: each letter may be written as backslash, u and four digits."""
    letters = b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in key)
    return rb'"%s"[ \t\n\r]*:' % letters


#: Keys that `take` reads, and those that a client may have meant.
_OURS = re.compile(
    b"|".join((*map(_pattern, (FIELD.encode(), b"vllm_xargs")), rb'"[\w-]{0,8}predict[\w-]{0,8}"[ \t\n\r]*:'))
)


def scan(body: bytes) -> bool:
    """Whether a body of JSON may hold what `take` looks at. UTF-16 and UTF-32 have bytes of zero."""
    body = body.replace(b"\0", b"")
    return any(part in body for part in (b"predict", b"vllm_xargs", rb"\u")) and bool(_OURS.search(body))


class LongBody:
    """A body of JSON that comes in pieces, of which two levels are kept, without long texts: they tell whether it
    predicts. ::

        for piece in pieces:
            body.feed(piece)
        body.document()    # {"prediction": {"type": "content", "content": ""}, "messages": 0, "vllm_xargs": {…}}

    Arrays, and objects in objects, are 0. What is no JSON, or longer than `_SHORT` in these levels, is {}.
    """

    def __init__(self) -> None:
        self.num_bytes, self._depth, self._level = 0, 0, 0
        self.refused: FieldError | None = None
        #: Text that is kept, and a string that has begun.
        self._kept, self._open = "", ""
        self._decoder: Any = None

    def feed(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        self._decoder = self._decoder or codecs.getincrementaldecoder(json.detect_encoding(piece))("replace")
        text, self._open = self._open + self._decoder.decode(piece), ""
        plain = text.replace(r"\\", "__").replace(r"\"", "__")  # what is left of quotes is around strings
        if plain.count('"') % 2:
            begun, escape = plain.rindex('"'), "\\" * plain.endswith("\\")
            plain, self._open = plain[:begun], text[begun:]
            if len(self._open) > _LONGEST:  # of a long one only that it is, and whether an escape has begun
                self._open = '"'.ljust(_LONGEST, "_") + escape
        for found in _PART.finditer(plain) if len(self._kept) <= _SHORT else ():
            mark, is_kept = found[1], self._level == self._depth
            if is_kept:
                part = text[found.start() : found.start(1)]
                self._kept += _STRING.sub(lambda s: s[0] if len(s[0]) <= _LONGEST else '""', part)
            if mark in ("[", "{"):
                self._level += is_kept and mark == "{" and self._depth < 2
                self._depth += 1
                mark = mark if self._level == self._depth else "0"
            elif mark:
                self._level -= is_kept
                self._depth -= 1
            self._kept += mark if is_kept else ""

    def document(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if len(self._kept) <= _SHORT and isinstance(found := json.loads(self._kept), dict):
                return found
        return {}


class _Body:
    """One request's body on its way in. switch: what its header says of drafts, if anything."""

    def __init__(
        self, endpoint: str, client: Any, switch: bytes | None, template: conversation.Template
    ) -> None:
        self.endpoint, self._is_limited = endpoint, endpoint in ENDPOINTS
        self._settings, self._client, self._template = Settings.of(client.vllm_config), client, template
        self.max_bytes = self._settings.max_body_bytes
        self._switch = None if switch is None else switch.decode("latin-1")

    def passed_on(self) -> HttpRequest | None:
        """Tell the tasks of a request whose body is not read here. Raises `FieldError`."""
        chosen = choices_of({wire.SWITCH_KEY: self._switch}, self._settings)
        return HttpRequest(wire.Prediction(**chosen), self._settings) if self._is_limited else None

    def refusal(self, long: LongBody) -> FieldError | None:
        """Why a body over the limit is refused, if it is."""
        document = long.document()
        xargs = document.get("vllm_xargs")
        xargs = xargs if isinstance(xargs, dict) else {}
        predicts = document.get(FIELD) is not None
        if not self._is_limited:
            return unsupported(self.endpoint) if predicts else None
        if not predicts and xargs.get(wire.KEY) is None:
            return None
        try:
            choices = choices_of({wire.SWITCH_KEY: xargs.get(wire.SWITCH_KEY, self._switch)}, self._settings)
        except FieldError as error:
            return error
        if choices.get("drafts") is False:
            return None
        most = f"{self.max_bytes} bytes (GPU_ALIGN_MAX_BODY_BYTES)"
        message = f"{FIELD}: expected a request body of at most {most}, got {long.num_bytes}"
        return FieldError(message, "bytes", code=413)

    async def take(self, body: bytes) -> tuple[HttpRequest | None, bytes | None]:
        """The request's prediction and choices, and its body without them, if they change. Raises `FieldError`."""
        vllm_config, renderer = self._client.vllm_config, self._client.renderer
        run = functools.partial(asyncio.get_running_loop().run_in_executor, renderer._executor)
        look, settings = functools.partial(_limiting.run, scan, body), self._settings
        found = look() if len(body) <= _SHORT else await run(look)
        is_asked = self._switch is not None or settings.conversation or settings.draft_without_prediction
        prediction = rest = document = None
        if found is not False or (self._is_limited and is_asked):
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
            views, key = conversation.views_of(renderer), conversation.style_key(document)
            request.answered = functools.partial(conversation.learn_style, views, key)
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
    if b'"usage":{' not in body:
        return None
    document = json.loads(body)
    request.answered(document)
    if not request.complete(document):
        return None
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _completed_events(chunk: bytes, request: HttpRequest) -> bytes | None:
    """The same of the events of a stream. In a text of the model the marks of the last one have escaped quotes."""
    if not (b'"usage":{' in chunk and (b'"choices":[]' in chunk or b'"response":{' in chunk)):
        return None
    lines = chunk.split(b"\n")
    for place, line in enumerate(lines):
        if line.startswith(b"data: {") and (found := _completed(line.removeprefix(b"data: "), request)):
            lines[place] = b"data: " + found
    return b"\n".join(lines)


def _replay(messages: list[Message], receive: Receive, *, tells: bool = False) -> Receive:
    """A `receive` that begins with messages that were received already. tells: of a prediction, once."""
    rest = iter(messages)

    async def again() -> Message:
        message = next(rest, None) or await receive()
        if tells and b'"prediction":' in message.get("body", b""):
            found = "Requests bring predictions; this server does not draft from them"
            warn_once(f"{found} (--speculative-config)")
        return message

    return again

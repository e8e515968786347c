"""Reads a request body as it arrives, before it is parsed: how large it is, and whether it brings a prediction.

Everything is done by functions of C on whole chunks: a megabyte of text takes two to three milliseconds, a
megabyte of quotation marks ten times as long.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..config.in_use import drafts_predictions
from ..config.settings import Settings
from ..seams.install import is_installed
from ..wire import request as wire
from . import prediction as limits
from .prediction import guard

#: Keys that bring a prediction.
KEYS = (b"prediction", wire.KEY.encode())
#: So many plain values of arrays and objects cost as much as one key, array or object.
VALUES_PER_ITEM = 4

_WHITE_SPACE = b" \t\n\r"


def _with_escapes(key: bytes) -> bytes:
    """A pattern of all that JSON reads as this key: each letter may be written as backslash, u and four digits."""
    return b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in key)


_KEY = re.compile(rb'"(?:%s)"[ \t\n\r]*:' % b"|".join(map(_with_escapes, KEYS)))
#: The longest of these: six bytes a letter, and the quotation marks.
_LONGEST = 6 * max(map(len, KEYS)) + 2


class BodyScan:
    """A scan of one body of JSON: `feed` it the chunks.

    size: bytes so far. brings_prediction: whether one of `KEYS` is a key of an object in it, however written.

    A quotation mark that no backslash precedes begins or ends a string, also where a chunk ends: what lies in
    strings is no structure. JSON may also be UTF-16 or UTF-32, which then have bytes of zero, as no UTF-8 of JSON
    has; what is structure is not told apart there, and all is counted.
    """

    def __init__(self) -> None:
        self.size = 0
        self.brings_prediction = False
        self._structures = 0
        self._commas = 0
        self._in_string = False
        self._is_wide = False
        self._tail = b""  # of what was searched for a key, which may go on in the next chunk
        self._backslash = b""  # the last byte, where what it escapes has not arrived

    @property
    def items(self) -> int:
        """Keys, arrays and objects so far, and a quarter of the commas between their values."""
        return self._structures + self._commas // VALUES_PER_ITEM

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        self.size += len(chunk)
        if self._is_wide or b"\0" in chunk:
            self._is_wide = True
            chunk = structure = chunk.replace(b"\0", b"")
        else:
            structure = self._outside_strings(chunk)
        if not self.brings_prediction:
            self._look_for_key(chunk)
        self._structures += structure.count(b"{") + structure.count(b"[") + structure.count(b":")
        self._commas += structure.count(b",")

    def _look_for_key(self, chunk: bytes) -> None:
        window = self._tail + chunk
        self.brings_prediction = _KEY.search(window) is not None
        # Any amount of white space may lie between a key and its colon.
        self._tail = window.rstrip(_WHITE_SPACE)[-_LONGEST:]

    def _outside_strings(self, chunk: bytes) -> bytes:
        chunk = self._backslash + chunk
        end = len(chunk) - (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
        self._backslash = chunk[end:]
        parts = chunk[:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = parts[self._in_string :: 2]
        self._in_string ^= len(parts) % 2 == 0  # an odd number of quotation marks
        return b"".join(outside)


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
_LIMIT = "could not limit a request body"


class BodyLimit:
    """ASGI middleware: HTTP 413 for a body over `GPU_ALIGN_MAX_BODY_BYTES` or `GPU_ALIGN_MAX_BODY_ITEMS` that has
    the key `prediction`.

    A body whose content-length is too short for either passes at once. Any other is read to its end, also one that
    is refused, because some clients read the answer only after they have sent everything; a refused body is not
    kept. A body that cannot be read here goes to vLLM as it is.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ENDPOINTS):
            return await self._app(scope, receive, send)
        body: _Body | None = guard.run(_LIMIT, _to_be_read, scope)
        if body is None:
            return await self._app(scope, receive, send)
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":  # the client has gone
                return await self._app(scope, replay(messages, receive), send)
            await body.look_at(messages[-1].get("body", b""))
            if body.is_refused:
                messages[-1] = {**messages[-1], "body": b""}
                del messages[:-1]
        if not body.is_refused:
            return await self._app(scope, replay(messages, receive), send)
        reason, message = body.exceeds()
        limits.count_refused(reason)
        await refuse(send, 413, message)


def _to_be_read(scope: Message) -> _Body | None:
    """What reads this request's body; None where nothing of it can be over a limit."""
    if not in_use(scope):
        return None
    settings = Settings.from_env()
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    shortest = min(settings.max_body_bytes, settings.max_body_items)
    return None if length.isdigit() and int(length) <= shortest else _Body(settings)


def in_use(scope: Message) -> bool:
    """Whether the application of this request serves an engine that drafts from predictions."""
    engine_client = getattr(scope["app"].state, "engine_client", None)
    return engine_client is not None and drafts_predictions(engine_client.vllm_config)


class _Body:
    """One request's body on its way in. is_refused: it is over a limit and brings a prediction."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scan = BodyScan()
        self._can_be_read = True
        self.is_refused = False

    async def look_at(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), _SLICE):
            if start:
                await asyncio.sleep(0)
            if self._can_be_read:  # what has been refused by then stays refused
                self._can_be_read = bool(guard.run(_LIMIT, self._feed, chunk[start : start + _SLICE]))

    def _feed(self, part: bytes) -> bool:
        scan, settings = self._scan, self._settings
        scan.feed(part)
        is_over = scan.size > settings.max_body_bytes or scan.items > settings.max_body_items
        self.is_refused |= is_over and scan.brings_prediction
        return True

    def exceeds(self) -> tuple[limits.Reason, str]:
        """The limit that a refused body is over, and what to tell the client."""
        scan, settings = self._scan, self._settings
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


#: Endpoints that generate, or prepare what is generated, and have no place for a prediction.
UNSUPPORTED_ENDPOINTS = (
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
    """ASGI middleware: HTTP 400 for a body with the key `prediction` on one of
    `UNSUPPORTED_ENDPOINTS`; `null` is none.

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
            guard.fail("could not look for a prediction in a request body", error)
            refused = False
        if not refused:
            return await self._app(scope, replay(messages, receive), send)
        limits.count_refused("unsupported")
        await refuse(send, 400, f"prediction: {path} does not take a prediction")


def _endpoint_of(path: str) -> str | None:
    """Which endpoint a path is that has no place for a prediction; None for any other."""
    if path.endswith(_MESSAGES):
        return None if is_installed("messages") else _MESSAGES
    return next((endpoint for endpoint in UNSUPPORTED_ENDPOINTS if path.endswith(endpoint)), None)


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

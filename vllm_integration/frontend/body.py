"""Reads a request body as it arrives, before it is parsed: how large it is, and whether it brings a prediction.

Everything is done by functions of C on whole chunks: a megabyte of text takes two to three milliseconds, a
megabyte of quotation marks ten times as long.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from ..config.in_use import drafts_predictions
from ..config.settings import Settings
from ..seams.install import is_installed
from ..wire import request as wire
from . import status
from .prediction import FIELD, count_refused, guard

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Keys that bring a prediction.
_KEYS = (FIELD.encode(), wire.KEY.encode())
#: So many plain values of arrays and objects cost as much as one key, array or object.
VALUES_PER_ITEM = 4

_WHITE_SPACE = b" \t\n\r"


#: All that JSON reads as one of these keys: each letter may be written as backslash, u and four digits.
_KEY = re.compile(
    rb'"(?:%s)"[ \t\n\r]*:'
    % b"|".join(b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in key) for key in _KEYS)
)
#: The longest of these: six bytes a letter, and the quotation marks.
_LONGEST = 6 * max(map(len, _KEYS)) + 2


class BodyScan:
    """A scan of one body of JSON: `feed` it the chunks.

    size: bytes so far. brings_prediction: whether one of `_KEYS` is a key of an object in it, however written.

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


#: Where a prediction is read; on the last are the same requests, as SageMaker sends them.
ENDPOINTS = (*status.ENDPOINTS, "/invocations")
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

#: Bytes that are looked at without letting others run.
_SLICE = 65536
#: What has failed, as the log says it.
_CHECK = "could not check a request body"


class BodyLimit:
    """ASGI middleware: HTTP 413 for a body over `GPU_ALIGN_MAX_BODY_BYTES` or `GPU_ALIGN_MAX_BODY_ITEMS` that has
    the key `prediction`; HTTP 400 for one of any size on `UNSUPPORTED_ENDPOINTS` that has it, unless it is `null`.

    Other paths pass untouched, and so does everything on servers that do not draft from predictions. A body whose
    content-length is too short for a limit passes at once. Any other is read to its end, also one that is refused,
    because some clients read the answer only after they have sent everything; one that is too large is not kept. A
    body that cannot be read here goes to vLLM as it is.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        body: _Body | None = guard.run(_CHECK, _to_be_read, scope) if is_post else None
        if body is None:
            return await self._app(scope, receive, send)
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":  # the client has gone
                return await self._app(scope, _replay(messages, receive), send)
            await body.look_at(messages[-1].get("body", b""))
            if body.is_too_large:
                messages = [{**messages[-1], "body": b""}]
        refusal = await body.refusal(messages)
        if refusal is None:
            return await self._app(scope, _replay(messages, receive), send)
        from starlette.responses import JSONResponse

        code, reason, message = refusal
        count_refused(reason)
        error = {"message": f"prediction: {message}", "type": "BadRequestError", "param": FIELD, "code": code}
        await JSONResponse({"error": error}, status_code=code)(scope, receive, send)


def _to_be_read(scope: Scope) -> _Body | None:
    """What reads this request's body; None where nothing of it can be refused."""
    path = scope["path"]
    is_limited = path.endswith(ENDPOINTS)
    unsupported = next((endpoint for endpoint in UNSUPPORTED_ENDPOINTS if path.endswith(endpoint)), "")
    if path.endswith(_MESSAGES) and not is_installed("messages"):
        unsupported = _MESSAGES
    engine_client = getattr(scope["app"].state, "engine_client", None)
    if not (unsupported or is_limited) or engine_client is None:
        return None
    if not drafts_predictions(engine_client.vllm_config):
        return None
    settings = Settings.here()
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    shortest = min(settings.max_body_bytes, settings.max_body_items)
    if not unsupported and length.isdigit() and int(length) <= shortest:
        return None
    return _Body(settings, unsupported, is_limited)


class _Body:
    """One request's body on its way in. unsupported: the endpoint, where it has no place for a prediction.
    is_too_large: it is over a limit and brings a prediction."""

    def __init__(self, settings: Settings, unsupported: str, is_limited: bool) -> None:
        self.is_too_large = False
        self._settings, self._unsupported, self._is_limited = settings, unsupported, is_limited
        self._scan = BodyScan()
        self._can_be_read = True

    async def look_at(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), _SLICE):
            if start:
                await asyncio.sleep(0)
            if self._can_be_read:  # what has been refused by then stays refused
                self._can_be_read = bool(guard.run(_CHECK, self._feed, chunk[start : start + _SLICE]))

    def _feed(self, part: bytes) -> bool:
        scan, settings = self._scan, self._settings
        scan.feed(part)
        is_over = scan.size > settings.max_body_bytes or scan.items > settings.max_body_items
        self.is_too_large |= self._is_limited and is_over and scan.brings_prediction
        return True

    async def refusal(self, messages: list[Message]) -> tuple[int, str, str] | None:
        """The status, the reason as `metrics.REFUSED` has it, and what to tell the client; None for a body that
        vLLM gets. messages: the whole body."""
        scan, settings = self._scan, self._settings
        expected = "expected a request body of at most"
        if self.is_too_large and scan.size > settings.max_body_bytes:
            limit = f"{settings.max_body_bytes} bytes (GPU_ALIGN_MAX_BODY_BYTES), got {scan.size}"
            return 413, "bytes", f"{expected} {limit}"
        if self.is_too_large:
            limit = (
                f"{settings.max_body_items} keys, arrays and objects, {VALUES_PER_ITEM} plain values counting as "
                f"one (GPU_ALIGN_MAX_BODY_ITEMS), got {scan.items}"
            )
            return 413, "items", f"{expected} {limit}"
        if not (self._unsupported and self._can_be_read and scan.brings_prediction):
            return None
        whole = b"".join(message.get("body", b"") for message in messages)
        try:
            document: Any = await asyncio.to_thread(json.loads, whole)
        except (ValueError, RecursionError):  # vLLM says what is wrong with it
            return None
        if not isinstance(document, dict) or document.get(FIELD) is None:
            return None
        return 400, "unsupported", f"{self._unsupported} does not take a prediction"


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that begins with messages that were received already."""
    rest = iter(messages)

    async def again() -> Message:
        message = next(rest, None)
        return await receive() if message is None else message

    return again

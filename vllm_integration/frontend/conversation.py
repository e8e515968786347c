"""Drafts from what a request holds, in forms in which its answer may hold it: from its prediction, or from its own
messages where it brings none.

A tool's result is read with line numbers and written back without, or inside a JSON string: other tokens than
those of the prompt, from which a request drafts anyway. Nothing is drafted before the answer repeats such a text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gpu_align import views

from ..config.settings import Settings
from ..seams.install import strict
from ..wire import request as wire
from .prediction import (
    CONVERSATION,
    FIELD,
    FieldError,
    Limits,
    count_refused,
    tokenize_params,
    type_name,
)

logger = logging.getLogger("vllm.gpu_align")

_JSON_FORMATS = ("json_object", "json_schema", "structural_tag")
#: Bytes of token ids that this process keeps of earlier turns.
_KEPT_BYTES = 64 * 2**20


class Views:
    """Token ids of the views of each message, the latest used; a conversation that grows costs what is new in it.
    Of one `cache_salt` nothing is found by another."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: bytes, token_ids: bytes) -> None:
        if key not in self._kept:
            self.num_bytes += len(key) + len(token_ids)
        self._kept[key] = token_ids
        while self.num_bytes > self._max_bytes:
            old, gone = self._kept.popitem(last=False)
            self.num_bytes -= len(old) + len(gone)


#: Of this process.
kept = Views()


async def predict(serving: Any, request: Any) -> wire.Prediction | None:
    """The prediction that the conversation of a request makes, newest messages first, as many as its limits allow;
    None where it holds no other form of a text. Whatever takes time in proportion to the texts runs in a thread.

    request: of chat completions, responses or completions. Token ids as a prompt have no forms.
    """
    if serving.renderer.tokenizer is None:
        return None
    limits = Limits.of(serving.engine_client.vllm_config)
    may_be_json = expects_json(request)
    texts: list[tuple[str, bool]] = []
    characters = limits.characters
    for text, is_result in texts_of(request):
        texts.append((text[:characters], is_result))
        characters -= len(text)
        if characters <= 0:
            break
    keys = await asyncio.to_thread(_keys, getattr(request, "cache_salt", None), may_be_json, texts)
    parts: list[bytes] = []
    room = 4 * limits.tokens
    for message, key in zip(texts, keys, strict=True):
        if room <= 0:
            break
        token_ids = kept.get(key)
        if token_ids is None:
            token_ids = await _encode(serving, *message, may_be_json, limits)
            kept.put(key, token_ids)
        parts.append(token_ids[:room])
        room -= len(token_ids)
    token_ids = b"".join(parts)
    return wire.Prediction(token_ids=token_ids, kind=wire.TextKind.MEMORY) if token_ids else None


def _keys(salt: str | None, may_be_json: bool, texts: list[tuple[str, bool]]) -> list[bytes]:
    # The length keeps a salt and a text that begins alike apart.
    told = f"{'' if salt is None else f'{len(salt)}:{salt}'}\n{may_be_json}"
    wholes = (f"{told}\n{is_result}\n{text}".encode("utf-8", "surrogatepass") for text, is_result in texts)
    return [hashlib.blake2b(whole, digest_size=32).digest() for whole in wholes]


async def _encode(serving: Any, text: str, is_result: bool, may_be_json: bool, limits: Limits) -> bytes:
    made = await asyncio.to_thread(_views_of, text, is_result, may_be_json)
    params = tokenize_params(limits)
    prompts = [await serving.renderer.tokenize_prompt_async({"prompt": view}, params) for view in made]
    ids = [prompt["prompt_token_ids"][: limits.tokens] for prompt in prompts]
    return await asyncio.to_thread(lambda: b"".join(map(_encoded, ids)))


def _encoded(token_ids: list[int]) -> bytes:
    return wire.encode_token_ids(CONVERSATION, np.array(token_ids, np.int32), tell=False)


def _views_of(text: str, is_result: bool, may_be_json: bool) -> list[str]:
    try:
        wire.check_text(CONVERSATION, text)
    except ValueError:  # a lone surrogate: no tokenizer takes it
        return []
    return views.of_message(wire.normalise_newlines(text), may_be_json, is_result)


def texts_of(request: Any) -> Iterator[tuple[str, bool]]:
    """The texts of a request, newest first, and which are results of tools."""
    for name in ("messages", "input", "prompt"):
        items = getattr(request, name, None)
        if isinstance(items, str):
            items = [items]
        for item in reversed(items) if isinstance(items, list) else ():
            if isinstance(item, str):
                yield item, False
                continue
            yield from ((text, False) for text in _arguments(item))
            for field in ("content", "output"):
                is_result = field == "output" or _of(item, "role") == "tool"
                yield from ((text, is_result) for text in _strings(item, field))


def expects_json(request: Any) -> bool:
    """Whether the answer may be a tool call, or has to be JSON."""
    if getattr(request, "tools", None) and getattr(request, "tool_choice", None) != "none":
        return True
    asked = (getattr(request, "response_format", None), _of(getattr(request, "text", None), "format"))
    return any(_of(each, "type") in _JSON_FORMATS for each in asked)


def _of(item: Any, name: str) -> Any:
    """A field of a JSON object, or of vLLM's model of one."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def _strings(item: Any, field: str) -> Iterator[str]:
    content = _of(item, field)
    if isinstance(content, str):
        yield content
        return
    if content is not None and not isinstance(content, (list, dict)) and isinstance(item, dict):
        content = item[field] = list(content)  # pydantic's, which can be read once: vLLM reads the list then
    for part in content if isinstance(content, list) else ():
        if isinstance(text := _of(part, "text"), str):
            yield text


def _arguments(item: Any) -> Iterator[str]:
    calls = _of(item, "tool_calls")
    for call in (item, *(_of(each, "function") for each in calls or () if isinstance(calls, list))):
        if isinstance(text := _of(call, "arguments"), str):
            yield text


def asked_for(value: object) -> bool:
    """Whether a request drafts from its conversation. value: what it says itself, if anything."""
    if value is None:
        return Settings.here().conversation
    # vLLM makes 0 and 1 of JSON's booleans.
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise FieldError(f"{CONVERSATION}: expected a boolean, got something else", parameter=CONVERSATION)
    return bool(value)


def views_for(value: object, text: str, request: Any) -> tuple[str, ...]:
    """Names of the views (`gpu_align.views`) that are drafted from beside the text of a `prediction` field: those
    that it names under `views`, else JSON's where the answer may hold the text as a string of JSON."""
    where, names = f"{FIELD}.views", value.get("views") if isinstance(value, dict) else None
    if names is None:
        return ("json",) if text and _may_answer_in_json(request, text) else ()
    if not isinstance(names, list):
        raise FieldError(f"{where}: expected an array of names, got {type_name(names)}")
    known = ", ".join(views.NAMES)
    if len(names) > len(views.NAMES):
        raise FieldError(
            f"{where}: expected at most {len(views.NAMES)} names, got {len(names)}; they are {known}"
        )
    try:
        views.check_names(where, names)
    except ValueError as error:
        raise FieldError(str(error)) from None
    if names and not text:
        raise FieldError(f"{where}: expected no names with an empty prediction, got some of {known}")
    return tuple(names)


def _may_answer_in_json(request: Any, text: str) -> bool:
    """Where the answer is JSON and no call of a tool, a text that is JSON is the answer itself."""
    is_answer = text.lstrip().startswith(("{", "[")) and not getattr(request, "tools", None)
    return expects_json(request) and not is_answer


async def with_views(
    token_ids: list[int],
    text: str,
    names: Sequence[str],
    limits: Limits,
    tokenize: Callable[[str], Awaitable[list[int]]],
) -> list[int]:
    """The ids of `text`, then those of its views, as far as they are within the limit."""
    try:
        made = await asyncio.to_thread(views.make, text, names)
        for view in made:
            remaining = max(limits.tokens - len(token_ids), 0)
            ids = await tokenize(view[: limits.characters]) if remaining else []
            token_ids = [*token_ids, *ids[:remaining]]
            if not remaining or len(ids) > remaining or len(view) > limits.characters:
                count_refused("view", "truncated" if remaining else "dropped")
    except Exception as error:  # its message might repeat the text
        if strict():
            raise
        count_refused("view", "dropped")
        logger.warning("A prediction is used without its views: %s", type(error).__name__)
    return token_ids

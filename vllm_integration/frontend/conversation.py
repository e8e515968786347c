"""Drafts from what a request holds besides a prediction, in token ids.

Its messages, in forms in which its answer may hold them: a tool's result is read with line numbers and written
back without, or inside a JSON string. Skeletons (`gpu_align.texts.skeletons`) of its tools, as the chat template
of the server writes calls, and of the JSON that its answer has to be. Equal ones are read once a tenant.
"""

from __future__ import annotations

import functools
import hashlib
import json
import marshal
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from gpu_align.texts import skeletons, views

from ..config.settings import SHIPPED_RECIPES, Settings
from ..wire import request as wire
from .prediction import CONVERSATION, Limits, Taken, count_refused, expects_json, ids_of

#: Bytes of token ids, with all that holds them, that a front end keeps of earlier turns.
_KEPT_BYTES = 64 * 2**20
#: Of an entry besides its key and its ids, in a dictionary that is half full.
_ENTRY_BYTES = 110
#: Characters of new texts that are tokenised at once.
_AT_ONCE = 65536
#: Seconds after which no further tool of a request is read.
_MOST_SECONDS = 0.004
#: Fields of a request that its skeletons depend on.
_READ = (
    "cache_salt", "tools", "tool_choice", "response_format", "text", "output_config", "structured_outputs",
)  # fmt: skip
#: Of a conversation in which calls are rendered: some templates show tools before they render any.
_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}
]
#: How the answers that vLLM's parsers read hold a call, for servers whose template renders none: name, arguments.
_FORMATS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": "[TOOL_CALLS]%s%s",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "phi4_mini_json": 'functools[{"name": "%s", "arguments": %s}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "openai": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>",
}


#: Calls what takes time in proportion to the texts, in a thread, a part at a time, so that others get turns.
Run = Callable[..., Awaitable[Any]]


class Views:
    """Token ids of the views of each message, the latest used. Of one `cache_salt` nothing is found by another.
    Any thread may call: the event loop reads, and threads write."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, token_ids: bytes) -> None:
        with self._lock:
            if (old := self._kept.pop(key, None)) is not None:
                self.num_bytes -= _size(key, old)
            self._kept[key] = token_ids
            self.num_bytes += _size(key, token_ids)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: bytes, token_ids: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(token_ids) + _ENTRY_BYTES


#: By the renderer of their engine, as two engines in a process may have other tokenizers.
_views: WeakKeyDictionary[Any, Views] = WeakKeyDictionary()


def views_of(renderer: Any) -> Views:
    """The views that an engine's front end keeps."""
    return _views.setdefault(renderer, Views())


def forget_styles(state: Any) -> None:
    """The model of the server with this state changes: forget how it writes JSON, with the views."""
    if (client := getattr(state, "engine_client", None)) is not None:
        _views.pop(client.renderer, None)


def style_key(document: dict[str, Any]) -> bytes:
    """The key under which `Views` have the style of JSON of a request's tenant and model."""
    named = json.dumps(["style", document.get("cache_salt"), document.get("model")])
    return hashlib.blake2b(named.encode(), digest_size=32).digest()


def learn_style(kept: Views, key: bytes, document: dict[str, Any]) -> None:
    """Remember how a response that is JSON, and whole, is written."""
    for choice in document.get("choices") or ():
        text = choice["text"] if "text" in choice else (choice.get("message") or {}).get("content")
        if choice.get("finish_reason") == "stop" and (style := skeletons.style_of(text)):
            kept.put(key, bytes([skeletons.STYLES.index(style)]))


class Template(NamedTuple):
    """How a server writes calls: the text of `--chat-template`, and `--tool-call-parser`."""

    text: str | None = None
    parser: str | None = None

    @classmethod
    def of(cls, state: Any) -> Template:
        """state: of the application."""
        renderer, args = getattr(state, "online_renderer", None), getattr(state, "args", None)
        return cls(getattr(renderer, "chat_template", None), getattr(args, "tool_call_parser", None))


@functools.lru_cache(maxsize=8)
def _calls_of(tokenizer: Any, template: Template) -> skeletons.Calls | None:
    """How the model's calls read; None where neither its template nor its parser says so."""

    def by_template(messages: list[dict[str, Any]], ends_open: bool) -> str:
        more = {"chat_template": template.text, "tokenize": False, "add_generation_prompt": ends_open}
        return str(tokenizer.apply_chat_template(messages, tools=_TOOLS, **more))

    def by_parser(messages: list[dict[str, Any]], ends_open: bool) -> str:
        functions = [call["function"] for call in messages[-1].get("tool_calls", ())]
        told = [(each["name"], json.dumps(each["arguments"])) for each in functions]
        return "".join(_FORMATS[template.parser or ""] % each for each in told)

    for render in (by_template, by_parser):
        with suppress(skeletons.SkeletonError):
            return skeletons.Calls(render)
    return None


def skeleton_of(
    document: dict[str, Any], vllm_config: Any, renderer: Any, template: Template, alone: bool
) -> bytes:
    """Token ids, int32, of the skeletons of a request, with gaps. alone: nothing else comes
    before them. What cannot be read is counted, and costs a request its skeletons."""
    if renderer.tokenizer is None:
        return b""
    grammar: Any = getattr(vllm_config, "structured_outputs_config", None)
    # A grammar holds from the first token on, but where a model thinks before it answers.
    forced = alone and not document.get("tools") and not getattr(grammar, "reasoning_parser", "")
    kept = views_of(renderer)
    styles = skeletons.styles_of(document, skeletons.STYLES[(kept.get(style_key(document)) or b"\0")[0]])
    if getattr(grammar, "disable_any_whitespace", False):
        styles = (skeletons.COMPACT,)
    try:
        asked = [document.get(name) for name in _READ]
        told = marshal.dumps([tuple(template), styles, forced, asked], 2)
        key = hashlib.blake2b(told, digest_size=32).digest()
        limits = Limits.of(vllm_config)
        if (found := kept.get(key)) is None:
            calls = functools.partial(_calls_of, renderer.tokenizer, template)
            pieces = skeletons.of_request(document, calls, styles, _MOST_SECONDS)
            encode = functools.partial(_encoded, renderer, limits)
            ids = skeletons.join(pieces, encode, forced) if pieces else []
            kept.put(key, found := np.array(ids, "<i4").tobytes())
        if len(found) > 4 * (limits.tokens // 2):
            raise skeletons.SkeletonError("size")
        return bytes(found)
    except (skeletons.SkeletonError, ValueError, RecursionError) as error:  # of marshal: nested too deep
        count_refused(f"skeleton_{getattr(error, 'reason', 'size')}", "dropped")
    return b""


def _encoded(renderer: Any, limits: Limits, texts: list[str]) -> list[list[int]]:
    if texts and getattr(renderer.tokenizer, "is_fast", False):  # all at once
        return list(renderer.tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [ids_of(renderer, limits, text) for text in texts]


async def join(
    run: Run, taken: Taken, vllm_config: Any, renderer: Any, template: Template
) -> wire.Prediction | None:
    """Collect the text to draft from: the prediction, then the skeletons of tools and schema if there
    is room; without a prediction the skeletons, then the forms of its conversation if it asks for them."""
    prediction, document = taken.prediction, taken.document
    if document is None:
        return prediction
    skeleton = b""
    given = prediction.token_ids if prediction is not None else None
    if skeletons.announces(document):
        skeleton = await run(skeleton_of, document, vllm_config, renderer, template, not given)
    if prediction is not None and given:
        ids = given + skeleton
        fits = skeleton and len(ids) <= 4 * Limits.of(vllm_config).tokens
        return replace(prediction, token_ids=ids) if fits else prediction
    forms = await predict(run, document, vllm_config, renderer, len(skeleton)) if taken.forms else b""
    if not skeleton + forms:
        return prediction
    found = replace(prediction or wire.Prediction(), token_ids=skeleton + forms, kind=wire.TextKind.MEMORY)
    if not skeleton:
        return found
    # What a request announces is as likely as an answer to a request like it. Of the shipped recipes, which are of
    # code and prose, hardly one in ten is right inside of JSON.
    is_json = not document.get("tools") and Settings.of(vllm_config).recipes == SHIPPED_RECIPES
    recipes = () if is_json and found.recipes is None else found.recipes
    kind = skeletons.kind_of(np.frombuffer(skeleton + forms, "<i4"))
    return replace(found, kind=kind, recipes=recipes)


async def predict(
    run: Run, document: dict[str, Any], vllm_config: Any, renderer: Any, used: int = 0
) -> bytes:
    """The token ids that the conversation of a request makes, newest messages first, as many as its limits allow;
    none where it holds no other form of a text. used: bytes of the room that are not for these."""
    if renderer.tokenizer is None:
        return b""
    limits, may_be_json, kept = Limits.of(vllm_config), expects_json(document), views_of(renderer)
    texts = iter(await run(_newest, document, may_be_json, limits.characters))
    parts: list[bytes] = []
    room, size = 4 * limits.tokens - used, 1
    while room > 0 and size:
        chunk, size = [], 0
        while size < _AT_ONCE and (text := next(texts, None)) is not None:
            chunk.append((text, found := kept.get(text.key)))
            size += (found is None) * (len(text.text) + 1)
        new = [text for text, found in chunk if found is None]
        made = iter(await run(_encode, new, may_be_json, limits, renderer) if new else ())
        for text, found in chunk:
            if found is None:
                kept.put(text.key, found := next(made))
            parts.append(found[: max(room, 0)])
            room -= len(found)
    return b"".join(parts)


class Text(NamedTuple):
    """A text of a conversation, and the key of its views."""

    text: str
    is_result: bool
    key: bytes


def _newest(document: dict[str, Any], may_be_json: bool, characters: int) -> list[Text]:
    """The newest texts of so many characters."""
    salt = document.get("cache_salt")
    # The length keeps a salt and a text that begins alike apart.
    told = f"{'' if salt is None else f'{len(str(salt))}:{salt}'}\n{may_be_json}"
    texts: list[Text] = []
    for whole, is_result in texts_of(document):
        text = whole[:characters]
        named = f"{told}\n{is_result}\n{text}".encode("utf-8", "surrogatepass")
        texts.append(Text(text, is_result, hashlib.blake2b(named, digest_size=32).digest()))
        characters -= len(whole)
        if characters <= 0:
            break
    return texts


def _encode(texts: Sequence[Text], may_be_json: bool, limits: Limits, renderer: Any) -> list[bytes]:
    """The ids of the views of each text."""
    encoded = []
    for text, is_result, _ in texts:
        made: list[str] = []
        with suppress(ValueError):  # a lone surrogate: no tokenizer takes it
            wire.check_text(CONVERSATION, text)
            made = views.of_message(wire.normalise_newlines(text), may_be_json, is_result)
        ids = (ids_of(renderer, limits, view)[: limits.tokens] for view in made)
        encoded.append(b"".join(np.array(each, "<i4").tobytes() for each in ids))
    return encoded


def texts_of(document: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The texts of a request, newest first, and which are results of tools."""
    for name in ("messages", "input", "prompt"):
        items = document.get(name)
        if isinstance(items, str):
            items = [items]
        if not isinstance(items, list) or (items and isinstance(items[0], (int, list))):  # token ids
            continue
        for item in reversed(items):
            yield from _texts(item, isinstance(item, dict) and item.get("role") == "tool")


def _texts(item: Any, is_result: bool) -> Iterator[tuple[str, bool]]:
    """Of a message, or of a part of one."""
    if isinstance(item, str):
        yield item, is_result
    if not isinstance(item, dict):
        return
    calls = found if isinstance(found := item.get("tool_calls"), list) else []
    for call in (item, *(call.get("function") for call in calls if isinstance(call, dict))):
        if isinstance(call, dict) and isinstance(text := call.get("arguments"), str):
            yield text, False
    if item.get("type") == "tool_use":  # Anthropic's
        yield json.dumps(item.get("input")), False
    is_result = is_result or item.get("type") == "tool_result"
    for name in ("content", "output", "text"):
        part = item.get(name)
        for each in part if isinstance(part, list) else [part]:
            yield from _texts(each, is_result or name == "output")

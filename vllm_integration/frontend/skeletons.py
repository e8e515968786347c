"""The skeletons of a request (`gpu_align.texts.skeletons`) in token ids: of its tools, as the chat template of the
server writes calls, and of the JSON that its answer has to be. Equal tools and schemas are read once a tenant."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import marshal
from typing import Any, NamedTuple

import numpy as np

from gpu_align.texts import skeletons

from .prediction import Limits, count_refused, ids_of

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


def style_key(document: dict[str, Any]) -> bytes:
    """The key under which `Views` have the style of JSON of a request's tenant and model."""
    named = json.dumps(["style", document.get("cache_salt"), document.get("model")])
    return hashlib.blake2b(named.encode(), digest_size=32).digest()


def learn_style(kept: Any, key: bytes, document: dict[str, Any]) -> None:
    """Remember how a response that is JSON, and whole, is written. kept: as `Views`."""
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
        with contextlib.suppress(skeletons.SkeletonError):
            return skeletons.Calls(render)
    return None


def skeleton_of(
    document: dict[str, Any], vllm_config: Any, renderer: Any, template: Template, kept: Any, alone: bool
) -> bytes:
    """Token ids, int32, of the skeletons of a request, with gaps. kept: as `Views`. alone: nothing else comes
    before them. What cannot be read is counted, and costs a request its skeletons."""
    if renderer.tokenizer is None:
        return b""
    grammar: Any = getattr(vllm_config, "structured_outputs_config", None)
    # A grammar holds from the first token on, but where a model thinks before it answers.
    forced = alone and not document.get("tools") and not getattr(grammar, "reasoning_parser", "")
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

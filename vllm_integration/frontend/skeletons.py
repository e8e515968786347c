"""The skeletons of a request (`gpu_align.skeletons`) in token ids: of its tools, as the server's chat template
writes calls, and of the JSON that its answer has to be. Equal tools and schemas are read once, for one tenant."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import marshal
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpu_align import skeletons

from .prediction import Limits, count_refused, ids_of

#: Seconds after which no further tool of a request is read.
_MOST_SECONDS = 0.004
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


class Template(NamedTuple):
    """How a server renders conversations: `--chat-template`, its further arguments as items, the parser."""

    text: str | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    parser: str | None = None

    @classmethod
    def of(cls, state: Any) -> Template:
        """state: of the application."""
        renderer, args = getattr(state, "online_renderer", None), getattr(state, "args", None)
        arguments = getattr(renderer, "default_chat_template_kwargs", None) or {}
        plain = tuple(
            (name, value) for name, value in arguments.items() if isinstance(value, (str, bool, int))
        )
        return cls(getattr(renderer, "chat_template", None), plain, getattr(args, "tool_call_parser", None))


@functools.lru_cache(maxsize=8)
def _calls_of(tokenizer: Any, template: Template) -> skeletons.Calls | None:
    """How the model's calls read; None where neither its template nor its parser says so."""

    def rendered(messages: list[dict[str, Any]], ends_open: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=_TOOLS, chat_template=template.text, tokenize=False,
                add_generation_prompt=ends_open, **dict(template.arguments),
            )
        )  # fmt: skip

    def parsed(messages: list[dict[str, Any]], ends_open: bool) -> str:
        calls = messages[-1].get("tool_calls", ())
        functions = (call["function"] for call in calls)
        return "".join(
            _FORMATS[template.parser or ""] % (each["name"], json.dumps(each["arguments"]))
            for each in functions
        )

    for render in (rendered, parsed):
        try:
            return skeletons.Calls(render)
        except skeletons.SkeletonError:
            continue
    return None


def announces(document: dict[str, Any]) -> bool:
    """Whether there is anything that a skeleton is made of."""
    return bool(document.get("tools")) or next(_schemas_of(document), None) is not None


def skeleton_of(
    document: dict[str, Any], vllm_config: Any, renderer: Any, template: Template, kept: Any
) -> bytes:
    """Token ids, int32, of the skeletons of a request, with gaps; none where there are none. kept: as `Views`.

    What cannot be read is counted, and costs a request its skeletons.
    """
    tools, schemas = document.get("tools") or [], [*_schemas_of(document)]
    if not (tools or schemas) or renderer.tokenizer is None:
        return b""
    try:
        asked = [document.get("cache_salt"), tuple(template), tools, schemas, document.get("tool_choice")]
        key = hashlib.blake2b(marshal.dumps(asked, 2), digest_size=32).digest()
        if (found := kept.get(key)) is None:
            limits = Limits.of(vllm_config)
            pieces = _pieces(document, tools, schemas, renderer.tokenizer, template, vllm_config)
            ids = skeletons.join(_encoded(pieces, renderer, limits)) if pieces else []
            if len(ids) > limits.tokens // 2:
                raise skeletons.SkeletonError("size")
            kept.put(key, found := np.array(ids, "<i4").tobytes())
        return bytes(found)
    except skeletons.SkeletonError as error:
        count_refused(f"skeleton_{error.reason}", "dropped")
    except (ValueError, RecursionError):  # nested too deep
        count_refused("skeleton_size", "dropped")
    return b""


def _pieces(
    document: dict[str, Any],
    tools: Any,
    schemas: Sequence[Any],
    tokenizer: Any,
    template: Template,
    vllm_config: Any,
) -> list[str]:
    if not isinstance(tools, list):
        raise skeletons.SkeletonError("names")
    found = [piece for schema in schemas for style in _styles(document, vllm_config)
             for piece in skeletons.of_schema(schema, style)]  # fmt: skip
    choice = document.get("tool_choice")
    if tools and choice != "none" and not (isinstance(choice, dict) and choice.get("type") == "none"):
        calls = _calls_of(tokenizer, template)
        if calls is None:
            raise skeletons.SkeletonError("template")
        found += calls.of_tools(tools, perf_counter() + _MOST_SECONDS)
    return found


def _encoded(pieces: Sequence[str], renderer: Any, limits: Limits) -> list[list[int]]:
    if pieces and getattr(renderer.tokenizer, "is_fast", False):  # all at once
        return list(renderer.tokenizer(list(pieces), add_special_tokens=False)["input_ids"])
    return [ids_of(renderer, limits, piece) for piece in pieces]


def _schemas_of(document: dict[str, Any]) -> Iterator[Any]:
    """The JSON schemas that the answer has to follow: a format's, or those of tools that have to be called."""
    text, given = document.get("text"), document.get("structured_outputs")
    for asked in (document.get("response_format"), text.get("format") if isinstance(text, dict) else None):
        if isinstance(asked, dict) and asked.get("type") == "json_schema":
            inner = asked.get("json_schema", asked)
            if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
                yield inner["schema"]
    if isinstance(given, dict) and given.get("json") is not None:
        with contextlib.suppress(ValueError):  # vLLM refuses it
            yield json.loads(given["json"]) if isinstance(given["json"], str) else given["json"]
    yield from _forced(document.get("tools"), document.get("tool_choice"))


def _forced(tools: Any, choice: Any) -> Iterator[Any]:
    """The schemas by one of which the grammar of `tool_choice` lets the model write."""
    kind, chosen = (
        (choice.get("type"), choice.get("function", choice)) if isinstance(choice, dict) else (choice, {})
    )
    named = chosen.get("name") if isinstance(chosen, dict) else None
    if not isinstance(tools, list) or (named is None and kind not in ("required", "any")):
        return
    functions = [each.get("function", each) for each in tools if isinstance(each, dict)]
    for function in (
        each for each in functions if isinstance(each, dict) and named in (None, each.get("name"))
    ):
        schema = function.get("parameters", function.get("input_schema"))
        if named is None:
            given = schema if isinstance(schema, dict) else {}
            definitions = {key: given[key] for key in ("$defs", "definitions") if key in given}
            call = {"properties": {"name": {"const": function.get("name")}, "parameters": schema}}
            schema = {"type": "array", "items": call, **definitions}
        yield schema


def _styles(document: dict[str, Any], vllm_config: Any) -> tuple[Any, ...]:
    """Which JSON the answer is written in: the grammar's, an earlier answer's, or any."""
    messages = document.get("messages")
    grammar: Any = getattr(vllm_config, "structured_outputs_config", None)
    if getattr(grammar, "disable_any_whitespace", False):
        return (skeletons.COMPACT if grammar.backend == "guidance" else skeletons.SPACED,)
    for message in reversed(messages if isinstance(messages, list) else []):
        text = (
            message.get("content")
            if isinstance(message, dict) and message.get("role") == "assistant"
            else None
        )
        if isinstance(text, str) and text.startswith(("{", "[")):
            spaced = skeletons.SPACED if '": ' in text else skeletons.COMPACT
            return (skeletons.LINES if "\n" in text else spaced,)
    return skeletons.SPACED, skeletons.COMPACT, skeletons.LINES

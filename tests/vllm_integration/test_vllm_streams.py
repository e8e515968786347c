"""Streamed tool calls and thoughts: the same where a step brings many tokens as where it brings one."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.clients import events_of
from tests.vllm.engines import Server
from tests.vllm_integration.parser_answers import (
    ELSEWHERE,
    SINGLE,
    Call,
    format_of,
    make_tokenizer,
    thought_of,
)
from vllm_integration.frontend import conversation, streams

WRITE: Call = ("write", {"path": "a b.py", "text": 'import os\nprint("é")'})
READ: Call = ("read", {"path": "b.py", "lines": 3})
NESTED: Call = ("write", {"path": "a.py", "more": {"a": [1, {"b": "c]}"}], "d": {}}})
MARKED: Call = ("write", {"path": "a.py", "text": 'x </tool_call> }]" </parameter> ```, y'})
#: The calls, and the text before and after them.
ANSWERS: dict[str, tuple[list[Call], str, str]] = {
    "one call": ([WRITE], "", ""),
    "two calls": ([WRITE, READ], "", ""),
    "text before": ([READ], "I read it.\n", ""),
    "text around": ([WRITE, READ], "First.\n", "\nDone: [x] {y}."),
    "nested JSON": ([NESTED, READ], "", ""),
    "markers in a string": ([MARKED, READ], "", ""),
    "no call": ([], "I have nothing to write <here>.", ""),
}
THOUGHTS = {
    "a thought": ("I think.\nTwice.", "The answer.\n"),
    "a long one": ("a, " * 40, "def f():\n    return 1\n" * 3),
    "no answer": ("I think.", ""),
    "a marker in the answer": ("I think.", "<p> and </p>"),
}
BOTH = [
    ("hermes", "deepseek_r1"),
    ("deepseek_v31", "deepseek_v3"),
    ("step3", "step3"),
    ("hunyuan_a13b", "hunyuan_a13b"),
    ("granite-20b-fc", "granite"),
    ("kimi_k3", "kimi_k3"),
    ("olmo3", "olmo3"),
    ("ernie45", "ernie45"),
    ("minimax_m3", "minimax_m3"),
    ("xlam", "qwen3"),
    ("qwen3_coder", "qwen3"),
]
BURSTS = (2, 4, 17, 33)
PROMPT = [5, 6, 7]
_TYPES = {"path": "string", "text": "string", "lines": "integer", "more": "object"}
_SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in ("write", "read")
]
#: Content, thought, and of each call its name and its arguments.
Read = tuple[str, str, list[tuple[str, str]]]

tokenizer = functools.cache(make_tokenizer)


@pytest.fixture(autouse=True)
def _wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    from vllm_integration.seams.install import wrapped_by

    monkeypatch.setattr(streams, "engine_here", lambda: "an engine of ours")
    monkeypatch.setattr(
        DelegatingParser, "parse_delta", wrapped_by(streams.parse_delta)(DelegatingParser.parse_delta)
    )


def set_up(tool: str | None, reasoning: str | None, **more: Any) -> tuple[Any, Any]:
    """A new parser, as for one request, and the request."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    cls: Any = ParserManager.get_parser(
        tool_parser_name=tool, reasoning_parser_name=reasoning, enable_auto_tools=tool is not None
    )
    tools = {"tools": TOOLS, "tool_choice": "auto"} if tool else {}
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **tools, **more)
    thinks = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
    parser = cls(tokenizer(), request.tools, chat_template_kwargs=thinks if reasoning else {})
    request.skip_special_tokens = False
    return parser, request


def tokens_of(answer: str) -> list[tuple[int, str]]:
    """The tokens that a model writes, and the text that each brings; the last one ends the answer."""
    from tokenizers.decoders import DecodeStream

    stream, fast = DecodeStream(ids=PROMPT, skip_special_tokens=False), tokenizer()._tokenizer
    ids = tokenizer().encode(answer, add_special_tokens=False)
    return [*((each, stream.step(fast, each) or "") for each in ids), (tokenizer().eos_token_id, "")]


def streamed(tool: str | None, reasoning: str | None, answer: str, burst: int) -> tuple[Read, int]:
    """What a client puts together, and how many chunks it got; the first token comes alone, from the prompt."""
    parser, request = set_up(tool, reasoning, stream=True)
    tokens = tokens_of(answer)
    starts, deltas = [0, *range(1, len(tokens), burst), len(tokens)], []
    for start, end in pairwise(starts):
        part = tokens[start:end]
        delta = parser.parse_delta(
            "".join(text for _, text in part),
            [each for each, _ in part],
            request,
            prompt_token_ids=PROMPT,
            finished=end == len(tokens),
        )
        deltas += [] if delta is None else [delta.model_dump()]
    return put_together(deltas), len(deltas)


def put_together(deltas: Sequence[dict[str, Any]]) -> Read:
    content, thought, calls = "", "", dict[int, list[str]]()
    for delta in deltas:
        content += delta.get("content") or ""
        thought += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            entry = calls.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
    return content, thought, [(name, arguments) for _, (name, arguments) in sorted(calls.items())]


def whole(tool: str | None, reasoning: str | None, answer: str) -> Read:
    """The answer that is not streamed."""
    parser, request = set_up(tool, reasoning)
    ids = [each for each, _ in tokens_of(answer)]
    thought, content, calls = parser.parse(
        answer, request, enable_auto_tools=tool is not None, model_output_token_ids=ids
    )
    return content or "", thought or "", [(call.name, call.arguments) for call in calls or ()]


def alike(read: Read) -> Any:
    """Without white space at the ends, and arguments as values."""

    def value(arguments: str) -> Any:
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments

    content, thought, calls = read
    return content.strip(), thought.strip(), [(name, value(arguments)) for name, arguments in calls]


def registered(kind: str) -> list[str]:
    if kind == "tool":
        from vllm.tool_parsers import ToolParserManager as Manager
    else:
        from vllm.reasoning import ReasoningParserManager as Manager  # type: ignore[assignment]
    return sorted(Manager.list_registered())


@functools.cache
def rows_in_docs() -> dict[str, list[str]]:
    """The parsers that docs/vllm.md names, by what is said of them."""
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    text = text.partition("### Streamed tool calls")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    return {kind: [*re.findall(r"`(\S+?)`", cells)] for kind, cells in ((a.strip(), b) for a, b in rows)}


def unlike(tool: str | None, reasoning: str | None, answers: dict[str, str]) -> dict[str, list[str]]:
    """The answers that are streamed otherwise with drafts than token by token, and those that token by token are
    streamed otherwise than answered whole."""
    found: dict[str, list[str]] = {"with drafts": [], "token by token": []}
    for what, answer in answers.items():
        by_token, _ = streamed(tool, reasoning, answer, 1)
        for burst in BURSTS:
            by_burst, chunks = streamed(tool, reasoning, answer, burst)
            assert chunks <= len(tokens_of(answer)) // burst + 2, "one chunk a burst"
            if by_burst != by_token:
                found["with drafts"].append(f"{what}, {burst}")
        if alike(by_token) != alike(whole(tool, reasoning, answer)):
            found["token by token"].append(what)
    return found


def check(name: str, tool: str | None, reasoning: str | None, answers: dict[str, str]) -> None:
    """What differs is named, and what is named differs."""
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    found, documented = unlike(tool, reasoning, answers), rows_in_docs()
    assert not found["with drafts"] or name in documented["with drafts"], found
    assert not found["token by token"] or name in documented["token by token"], found


def calls_by(name: str) -> dict[str, str]:
    answers = {}
    for what, (calls, before, after) in ANSWERS.items():
        calls = calls[:1] if name in SINGLE else calls
        answers[what] = before + (format_of(name)(calls) if calls else "") + after
    return answers


@pytest.mark.parametrize("name", registered("tool"))
def test_tool_calls_are_streamed_alike(name: str) -> None:
    check(name, name, None, {} if name in ELSEWHERE else calls_by(name))


@pytest.mark.parametrize("name", registered("reasoning"))
def test_thoughts_are_streamed_alike(name: str) -> None:
    before, between, after = thought_of(name).split("{}")
    answers = {what: f"{before}{thought}{between}{text}{after}" for what, (thought, text) in THOUGHTS.items()}
    check(name, None, name, answers)


# `openai` reads ids of its own vocabulary.
@pytest.mark.parametrize("name", sorted({*conversation._FORMATS} - {"openai"}))
def test_a_skeletons_call_is_one_that_the_parser_reads(name: str) -> None:
    """Where the chat template renders no calls, skeletons have the format that is written down for the parser."""
    for tool, arguments in (WRITE, READ):
        answer = conversation._FORMATS[name] % (tool, json.dumps(arguments))
        content, _, calls = whole(name, None, answer)
        assert [(name, json.loads(given)) for name, given in calls] == [(tool, arguments)], answer
        assert not content.strip()


@pytest.mark.parametrize(("tool", "reasoning"), BOTH)
def test_a_thought_and_then_calls(tool: str, reasoning: str) -> None:
    before, between, after = thought_of(reasoning).split("{}")
    texts = {"calls": format_of(tool)([WRITE, READ]), "text": "Nothing."}
    answers = {what: f"{before}I write.{between}{text}{after}" for what, text in texts.items()}
    check(reasoning, tool, reasoning, answers)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """vLLM brings a token's text later then, and the rest of it with the last one."""
    tokens, held, stop = tokens_of("a🙂b" * 4 + "stop")[:-1], 3, len("stop")

    def pieces(burst: int) -> list[str]:
        texts = streams.TokenTexts(tokenizer(), PROMPT, skip_special=False)
        found, sent, decoded = [], 0, ""
        for start in range(0, len(tokens), burst):
            part = tokens[start : start + burst]
            decoded += "".join(text for _, text in part)
            is_last = start + burst >= len(tokens)
            until = len(decoded) - stop if is_last else max(sent, len(decoded) - held)
            found.append((texts.split(decoded[sent:until], [each for each, _ in part], is_last), len(part)))
            sent = until
        assert all(len(each) == length for each, length in found)
        return [piece for each, _ in found for piece in each]

    one_by_one = pieces(1)
    assert "".join(one_by_one) == "a🙂b" * 4
    for burst in BURSTS:
        until = -burst - 3  # the last burst brings what it brings
        assert pieces(burst)[:until] == one_by_one[:until]
        assert "".join(pieces(burst)) == "".join(one_by_one)
    texts = streams.TokenTexts(tokenizer(), PROMPT, skip_special=False)
    assert texts.split("not what was written", [5, 6], finished=False) == []


def test_a_delta_that_cannot_be_split_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    seen: list[Any] = []

    class Parser:
        _engine_based = False
        model_tokenizer: Any = SimpleNamespace()

    def original(self: Any, text: str, ids: Any, request: Any, prompt: Any, *, finished: bool) -> None:
        seen.append((text, ids, finished))

    request, parser = SimpleNamespace(skip_special_tokens=False), Parser()
    streams.parse_delta(original, parser, "ab", [1, 2], request, PROMPT, finished=True)  # no fast tokenizer
    Parser.model_tokenizer = tokenizer()
    streams.parse_delta(original, Parser(), "xy", [1, 2], request, PROMPT, finished=True)  # another text
    monkeypatch.setattr(streams.TokenTexts, "split", lambda *_: 1 / 0)
    streams.parse_delta(original, Parser(), "xz", [1, 2], request, PROMPT, finished=True)
    assert seen == [("ab", [1, 2], True), ("xy", [1, 2], True), ("xz", [1, 2], True)]


@pytest.mark.vllm
def test_a_server_streams_calls_as_it_answers_them(byte_server: Server) -> None:
    answer = format_of("xlam")([WRITE, READ, WRITE])
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Write."}],
        "tools": TOOLS,
        "tool_choice": "auto",
        "structured_outputs": {"choice": [answer]},
        "temperature": 0,
        "max_tokens": 400,
    }
    hint = {"prediction": {"type": "content", "content": answer}}

    def ask(**more: Any) -> httpx.Response:
        answered = httpx.post(f"{byte_server.url}/v1/chat/completions", json={**body, **more}, timeout=300)
        assert answered.status_code == 200, answered.text
        return answered

    message = ask(**hint).json()["choices"][0]["message"]
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert [name for name, _ in expected] == ["write", "read", "write"]
    streams = []
    for more in ({}, hint):
        events = events_of(ask(stream=True, **more).content)
        streams.append([choice["delta"] for event in events for choice in event["choices"]])
    plain, drafted = map(put_together, streams)
    assert plain == drafted
    assert alike(drafted)[2] == [(name, json.loads(given)) for name, given in expected]
    assert len(streams[1]) < len(streams[0]), "bursts"

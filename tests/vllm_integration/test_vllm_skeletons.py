"""Skeletons of a request's tools and schema: which, in what order, for whom, and what is counted without one."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from gpu_align.ops.layout import FIRST_GAP
from gpu_align.texts.skeletons import Calls
from tests.vllm.clients import events_of, moved, scrape, written
from tests.vllm.engines import Server
from tests.vllm_integration.fakes import Engine, Renderer, taken
from vllm_integration.frontend import conversation, metrics
from vllm_integration.frontend.conversation import Template
from vllm_integration.wire import request as wire

PREDICTION, MEMORY, RELATED, SKELETON = wire.TextKind


def kind_of(text: str) -> wire.TextKind:
    """Of a text with skeletons, a token a character."""
    return SKELETON if 16 * text.count("·") >= len(text) else RELATED


class Tokenizer(Renderer):
    """Renders calls as Hermes' models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    def apply_chat_template(self, messages: list[dict[str, Any]], **more: Any) -> str:
        self.asked.append(more)
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        told = "".join(
            f'<call>{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"])}}}' for c in calls
        )
        return "<user>" + "<assistant>" * (more["add_generation_prompt"] or bool(calls)) + told


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("GPU_ALIGN_CONVERSATION", "1")
    engine = Engine(limit=2000)
    engine.renderer = Tokenizer()
    return engine


def text_of(token_ids: bytes) -> str:
    return "".join("·" if each >= FIRST_GAP else chr(each) for each in wire.decode_token_ids(token_ids))


def skeleton_of(engine: Engine, document: dict[str, Any], template: Template) -> bytes:
    return conversation.skeleton_of(document, engine.vllm_config, engine.renderer, template, True)


def drafted_from(engine: Engine, document: dict[str, Any]) -> tuple[str, Any]:
    """The text, with a dot for each gap, and its kind; what vLLM gets is what came."""
    rest, http = taken(engine, document)
    assert rest == {
        **{key: document[key] for key in rest},
        **({"vllm_xargs": {}} if "vllm_xargs" in rest else {}),
    }
    prediction = wire.Prediction() if http is None else http.prediction
    return text_of(prediction.token_ids or b""), prediction.kind


STRING, BOOLEAN = {"type": "string"}, {"type": "boolean"}
SCHEMA = {"type": "object", "properties": {"a": STRING}, "required": ["a"]}
READ = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
LIST = {"type": "function", "function": {"name": "list", "parameters": {"type": "object"}}}
CALL, LISTED = '<call>{"name": "read", "arguments": {"a": "·"}}·', '<call>{"name": "list", "arguments": {}}·'
IN_STYLES = ['{"a": "·"}·', '{"a":"·"}·', '{\n  "a": "·"\n}·']
JSON, COMPACT_FIRST, LINES_FIRST = (
    "".join(IN_STYLES[n] for n in order) for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1))
)
ASKED = [{"role": "user", "content": "Read it."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def answered(text: str) -> list[dict[str, Any]]:
    return [*ASKED, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"tools": [READ]}, f"·{CALL}"),
        ({"tools": [READ, LIST]}, f'·<call>{{"name": "·{CALL}{LISTED}'),
        ({"tools": [{"name": "read", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}}, f"·{CALL}"),
        ({"tools": [READ], "tool_choice": "none"}, ""),
        ({"tools": [], "messages": ASKED}, ""),
        ({"response_format": FORMAT}, JSON),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, JSON),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
        ({"structured_outputs": {"json": "{"}}, ""),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "json_object"}}, ""),
        ({"tools": [READ, LIST], "tool_choice": {"type": "function", "function": {"name": "read"}}},
         f'·{JSON}<call>{{"name": "·{CALL}{LISTED}'),
        ({"tools": [READ], "tool_choice": {"type": "tool", "name": "read"}}, f"·{JSON}{CALL}"),
        # An earlier answer says in which of the spellings.
        ({"messages": answered('{"b": 1}'), "response_format": FORMAT}, '{"a": "·"}·'),
        ({"messages": answered('{"b":1}'), "response_format": FORMAT}, '{"a":"·"}·'),
        ({"messages": answered('{\n"b":1}'), "response_format": FORMAT}, '{\n  "a": "·"\n}·'),
    ],
)  # fmt: skip
def test_what_a_request_announces_is_drafted_from(
    engine: Engine, document: dict[str, Any], expected: str
) -> None:
    kind = kind_of(expected) if expected else PREDICTION
    assert drafted_from(engine, {"messages": ASKED, **document}) == (expected, kind)


def test_a_tool_that_has_to_be_called_may_be_any_of_them(engine: Engine) -> None:
    text, _ = drafted_from(engine, {"messages": ASKED, "tools": [READ, LIST], "tool_choice": "required"})
    assert (
        '·[{"name": "read", "parameters": {"a": "·"}}, {"name": "read", "parameters": {"a": "·"}}]·' in text
    )
    assert '·[{"name":"list","parameters":·},' in text
    assert text.endswith(f"{CALL}{LISTED}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"disable_any_whitespace": True}, '{"a":"·"}·'),
        # Thoughts come first, which no grammar forces.
        ({"disable_any_whitespace": True, "reasoning_parser": "qwen3"}, '·{"a":"·"}·'),
    ],
)
def test_the_servers_grammar(engine: Engine, settings: dict[str, Any], expected: str) -> None:
    engine.vllm_config.structured_outputs_config = SimpleNamespace(**settings)
    assert drafted_from(engine, {"messages": ASKED, "response_format": FORMAT}) == (
        expected,
        kind_of(expected),
    )


def test_nothing_is_forced_after_a_prediction(engine: Engine) -> None:
    prediction = {"type": "content", "content": "text"}
    text, _ = drafted_from(engine, {"messages": ASKED, "response_format": FORMAT, "prediction": prediction})
    assert text == f"text·{JSON}"


@pytest.mark.parametrize(
    ("answer", "more", "expected"),
    [
        ('{"b":1}', {}, COMPACT_FIRST),
        ('{\n"b": 1}', {}, LINES_FIRST),
        ("prose", {}, JSON),
        ("{}", {}, JSON),
        # Of an answer that is cut nothing is known, and none is another tenant's or another model's.
        ('{"b":', {}, JSON),
        *(('{"b":1}', {"finish_reason": reason}, JSON) for reason in ("length", "abort", "error", None)),
        ('{"b":1}', {"cache_salt": "b"}, JSON),
        ('{"b":1}', {"model": "an adapter"}, JSON),
    ],
)
def test_the_last_answer_to_a_tenant_says_which_spelling_is_likely(
    engine: Engine, answer: str, more: dict[str, Any], expected: str
) -> None:
    document = {"model": "m", "messages": ASKED, "response_format": FORMAT, "cache_salt": "a"}
    end = {"finish_reason": more.get("finish_reason", "stop")}
    asked = {**document, **{key: value for key, value in more.items() if key in document}}
    for choice in ({"message": {"role": "assistant", "content": answer}, **end}, {"text": answer, **end}):
        engine.renderer = Tokenizer()
        document_of_vllm = {"choices": [choice], "usage": {"completion_tokens": 3}}
        taken(engine, asked, answer_of_vllm=document_of_vllm)
        assert drafted_from(engine, document) == (expected, kind_of(expected))


def test_json_by_a_schema_uses_no_recipes_of_code_and_prose(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipes(**more: Any) -> Any:
        body = {"messages": ASKED, "response_format": FORMAT, **more}
        return taken(engine, body)[1].prediction.recipes

    monkeypatch.setenv("GPU_ALIGN_RECIPES", "base")
    assert recipes() == ()
    assert recipes(tools=[READ]) is None, "a call may hold a file"
    assert recipes(vllm_xargs={"recipes": ["base"]}) == ("base",)
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "base,mine.json.gz")
    assert recipes() is None


NUMBERED = "1: a\n2: b\n3: c\n"
FORMS = "a\\nb\\nc\\n"


def test_predictions_come_first_and_forms_last(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": NUMBERED}]
    text, kind = drafted_from(engine, {"messages": messages, "tools": [READ]})
    assert text.startswith(f"·{CALL}{FORMS}")
    assert kind == kind_of(text)
    monkeypatch.delenv("GPU_ALIGN_CONVERSATION")
    given = {"messages": messages, "prediction": {"type": "content", "content": "old"}}
    assert drafted_from(engine, given) == ("old", PREDICTION)
    assert drafted_from(engine, {**given, "tools": [READ]}) == (f"old·{CALL}", PREDICTION)
    full = {**given, "tools": [READ], "prediction": {"type": "content", "content": "x" * 1990}}
    assert drafted_from(engine, full) == ("x" * 1990, PREDICTION)
    for more, expected in (
        ({}, ""),
        ({"vllm_xargs": {"gpu_align": "on"}}, f"·{CALL}"),
        ({"vllm_xargs": {"gpu_align": "off"}}, ""),
        ({"use_beam_search": True}, ""),
    ):
        text, _ = drafted_from(engine, {"messages": ASKED, "tools": [READ], **more})
        assert text == expected
    monkeypatch.setenv("GPU_ALIGN_DRAFT_WITHOUT_PREDICTION", "1")
    assert drafted_from(engine, {"messages": messages, "tools": [READ]}) == (f"·{CALL}", kind_of(f"·{CALL}"))
    monkeypatch.setenv("GPU_ALIGN_MEMORY_TOKENS", "100")  # earlier answers have the place
    assert drafted_from(engine, {"messages": messages, "tools": [READ]})[0] == ""


def parameters(**schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a thousand parameters": ({"tools": parameters(properties={f"p{n}": STRING for n in range(1000)})}, "size"),
    "a schema of itself": ({"tools": parameters(properties={"a": {"$ref": "#"}})}, "size"),
    **{f"named {name!r}": ({"tools": [{"function": {"name": name}}]}, "names") for name in ("a\0", '"', "a\nb")},
    "tools that are none": ({"tools": "f"}, "names"),
    "a description of a megabyte": (
        {"tools": [{"function": {**LIST["function"], "description": "d" * 2**20}}]}, ""  # type: ignore[dict-item]
    ),
    "a thousand tools": ({"tools": [READ] * 1000}, "size"),
    "more than there is room for": (
        {"tools": parameters(properties={f"{n:0100}": STRING for n in range(20)})}, "size"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_request_without_skeletons_is_served_and_counted(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(metrics, "count_refused", lambda *args: counted.append(args))
    drafted_from(engine, {"messages": ASKED, "tools": [READ]})  # the template is read
    document, reason = BAD[name]
    begun = time.thread_time()
    found = skeleton_of(engine, document, Template())
    assert time.thread_time() - begun < 0.05
    assert bool(found) == (not reason)
    assert counted == ([(f"skeleton_{reason}", "dropped")] if reason else [])
    assert set(counted) <= set(metrics.REFUSED)
    assert drafted_from(engine, {"messages": ASKED, **document})[0] == text_of(found)


def test_servers_whose_template_has_no_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parser says how calls read; that of no parser is not known."""
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(metrics, "count_refused", lambda *args: counted.append(args))
    engine.renderer = Renderer()
    for parser, expected in (("llama3_json", '·{"name": "read", "parameters": {"a": "·"}}·'), (None, "")):
        found = skeleton_of(engine, {"tools": [READ]}, Template(parser=parser))
        assert text_of(found) == expected
    assert counted == [("skeleton_template", "dropped")]
    engine.renderer.tokenizer = tokenizer = Tokenizer()
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *_, **__: renders.append(1) or 1 / 0)
    renders: list[int] = []
    for _ in range(2):
        drafted_from(engine, {"messages": ASKED, "tools": [READ]})
    assert (counted[1:], len(renders)) == ([("skeleton_template", "dropped")] * 2, len(Calls._STYLES)), "once"


def test_what_a_server_renders_with(engine: Engine) -> None:
    online = SimpleNamespace(chat_template="text")
    state = SimpleNamespace(online_renderer=online, args=SimpleNamespace(tool_call_parser="hermes"))
    assert Template.of(state) == Template("text", "hermes")
    assert Template.of(SimpleNamespace()) == Template()
    skeleton_of(engine, {"tools": [READ]}, Template.of(state))
    asked = engine.renderer.asked[0]
    assert (asked["chat_template"], asked["tokenize"]) == ("text", False)


@pytest.mark.parametrize(
    "tools",
    [[READ], parameters(properties={f"{n:0100}": STRING for n in range(20)})],
    ids=["read", "too many"],
)
def test_equal_tools_are_read_once_for_each_tenant(engine: Engine, tools: list[dict[str, Any]]) -> None:
    read = []
    for salt in (None, "a", "b", None, "a"):
        before = len(engine.renderer.read)
        drafted_from(engine, {"messages": ASKED, "tools": tools, "cache_salt": salt})
        read.append(len(engine.renderer.read) - before)
    assert min(read[:3]) > 0
    assert read[3:] == [0, 0]


def bodies_of(tenant: str) -> list[tuple[str, dict[str, Any]]]:
    """A schema and a tool that has to be called, on each endpoint that takes them, with the tenant's name in each
    key. The grammar writes all but the values."""
    kinds = {"is": BOOLEAN, "to": {"enum": ["up", "on"]}, "as": {"type": "string", "maxLength": 4}}
    schema = {
        "type": "object",
        "properties": {f"{tenant}_{name}": kind for name, kind in kinds.items()},
        "additionalProperties": False,
        "required": [f"{tenant}_{name}" for name in kinds],
    }
    function = {"name": f"{tenant}_tool", "parameters": schema}
    asked = {"messages": ASKED, "max_tokens": 100}
    whole, inner = {"type": "json_schema", "name": "a", "schema": schema}, {"name": "a", "schema": schema}
    formatted = {"response_format": {"type": "json_schema", "json_schema": inner}}
    chosen = {"type": "function", "function": {"name": function["name"]}}
    anthropic = {"tools": [{"name": function["name"], "input_schema": schema}]}
    return [
        ("/v1/chat/completions", {**asked, **formatted}),
        ("/v1/chat/completions",
         {**asked, "tools": [{"type": "function", "function": function}], "tool_choice": chosen}),
        ("/v1/completions", {"prompt": "Read it.", "max_tokens": 100, **formatted}),
        ("/v1/responses", {"input": ASKED, "max_output_tokens": 100, "text": {"format": whole}}),
        ("/v1/messages", {**asked, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/messages", {**asked, **anthropic, "tool_choice": {"type": "tool", "name": function["name"]}}),
    ]  # fmt: skip


@pytest.mark.vllm
def test_of_a_server_no_answer_changes_and_no_tenant_drafts_from_another(byte_server: Server) -> None:
    """Two tenants at once, with and without skeletons, streamed and not."""

    def ask(path: str, body: dict[str, Any], drafts: str) -> str:
        answer = httpx.post(
            f"{byte_server.url}{path}",
            json={"model": "tiny", "temperature": 0, **body},
            headers={"X-GPU-Align": drafts},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return "".join(written(events_of(answer.content)))

    tenants = ("zqa", "zqb")  # a byte is a token, and half of the room for predictions is for skeletons
    asked = [
        (path, {**body, "stream": stream, "cache_salt": tenant})
        for stream in (False, True)
        for pair in zip(*map(bodies_of, tenants), strict=True)
        for tenant, (path, body) in zip(tenants, pair, strict=True)
    ]
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda each: ask(*each, "off"), asked))
        before = scrape(byte_server.url)
        drafted = list(pool.map(lambda each: ask(*each, "on"), asked))
    assert drafted == plain
    assert all(f"{tenants[n % 2]}_as" in text for n, text in enumerate(plain))
    by = moved(before, scrape(byte_server.url))
    accepted, rejected = (
        by.get(f'gpu_align_draft_tokens_total{{source="memory",verdict="{verdict}"}}', 0)
        for verdict in ("accepted", "rejected")
    )
    assert accepted > 10 * len(asked)
    assert rejected < accepted
    ask(*asked[0], "off")  # one more step writes the last logs
    logs = [yaml.safe_load(path.read_text()) for path in byte_server.logs.glob("*.yaml")]
    seen = [
        [name for name in tenants if name in json.dumps(log)] for log in logs if log.get("prediction_lines")
    ]
    assert [seen.count([name]) for name in tenants] == [len(asked) // 2] * 2, "each has its own, and no other"
    assert [name for names in seen if len(names) > 1 for name in names] == []

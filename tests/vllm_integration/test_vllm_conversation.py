"""Drafts from the messages of a request that brings no prediction: which texts, in which forms, for whom."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
import tracemalloc
from contextvars import ContextVar
from typing import Any

import pytest

from tests.vllm_integration.fakes import Engine, Renderer, taken
from vllm_integration.frontend import conversation, metrics
from vllm_integration.wire import request as wire

FILE = 'def f(a):\n    return "a"\n'
NUMBERED = '1\tdef f(a):\n2\t    return "a"\n3\t\n'
PLAIN = 'def f(a):\n    return "a"\n\n'
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


def forms(text: str, *, in_json: bool = False) -> str:
    """A text, and as it stands in a diff; or as both stand in a JSON string, and the text."""
    lines = text.splitlines(keepends=True)
    marked = "".join(f"{mark}{line}" for mark in " -" for line in lines)
    return json.dumps(text + marked)[1:-1] + text if in_json else text + marked


@pytest.fixture
def engine() -> Engine:
    return Engine(limit=20_000)


async def at_once(step: Any, *args: Any) -> Any:
    return step(*args)


async def token_ids(engine: Any, document: dict[str, Any], run: Any = at_once) -> bytes:
    return await conversation.predict(run, document, engine.vllm_config, engine.renderer)


def text_of(token_ids: bytes | None) -> str | None:
    return "".join(map(chr, wire.decode_token_ids(token_ids))) if token_ids else None


def predicted(engine: Any, document: dict[str, Any]) -> str | None:
    return text_of(asyncio.run(token_ids(engine, document)))


def chat(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"messages": messages, **more}


def anthropic(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return chat([{"role": "user", "content": "Edit it."}, {"role": "user", "content": [*blocks]}], **more)


def tool_result(text: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Edit it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]


def said(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def call_of(arguments: dict[str, str]) -> dict[str, Any]:
    function = {"name": "write", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": NUMBERED}


JSON_TEXT = {"format": {"name": "a", "schema": {}, **FORMAT}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
#: A request; the text that its answer may hold, if any; whether it then stands in JSON.
REQUESTS: dict[str, tuple[dict[str, Any], str | None, bool]] = {
    "what a tool read": (chat(tool_result(NUMBERED)), PLAIN, False),
    "and tools to write with": (chat(tool_result(NUMBERED), tools=TOOLS), PLAIN, True),
    "that are not to be called": (chat(tool_result(NUMBERED), tools=TOOLS, tool_choice="none"), PLAIN, False),
    "in parts": (chat(tool_result([{"type": "text", "text": NUMBERED}])), PLAIN, False),
    "a listing of the user's": (chat(said([{"type": "text", "text": NUMBERED}])), PLAIN, False),
    "for an answer in JSON": (chat(said(NUMBERED, "system"), response_format=FORMAT), PLAIN, True),
    "a file, twice": (chat([*said(FILE), *tool_result(FILE)], tools=TOOLS), FILE, True),
    "a file in tags": (chat(said(f"<file>\n{FILE}</file>"), tools=TOOLS), FILE, True),
    "a text that is no listing": (chat(said(FILE), tools=TOOLS), None, False),
    "an answer": (chat(said(FILE, "assistant"), tools=TOOLS), None, False),
    "without tools": (chat(said(FILE)), None, False),
    "a call": (chat([call_of({"path": "f.py", "content": FILE})]), FILE, False),
    "responses": ({"input": [*said("Edit it."), OUTPUT]}, PLAIN, False),
    "responses, a text": ({"input": NUMBERED}, PLAIN, False),
    "responses in JSON": ({"input": [OUTPUT], "text": JSON_TEXT}, PLAIN, True),
    "responses in JSON, a file": ({"input": [{**OUTPUT, "output": FILE}], "text": JSON_TEXT}, FILE, True),
    "a prompt": ({"prompt": NUMBERED}, PLAIN, False),
    "token ids": ({"prompt": [1, 2, 3]}, None, False),
    "lists of token ids": ({"prompt": [[1, 2], [3]]}, None, False),
    "Anthropic's": (anthropic({**RESULT, "content": NUMBERED}), PLAIN, False),
    "with tools": (anthropic({**RESULT, "content": [{"type": "text", "text": FILE}]}, tools=TOOLS), FILE, True),
    "a text of it": (anthropic({"type": "text", "text": FILE}, tools=TOOLS), None, False),
    "a call of it": (anthropic({"type": "tool_use", "name": "f", "input": {"content": FILE}}), FILE, False),
    "malformed parts": (chat(said([5, None, {"text": 7}, {"text": NUMBERED}])), PLAIN, False),
    "malformed messages": (
        chat([None, 5, [], {"role": 7, "content": {"text": NUMBERED}}, {"tool_calls": [5]}]), PLAIN, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_the_forms_in_which_an_answer_may_hold_a_text(engine: Engine, name: str) -> None:
    document, text, in_json = REQUESTS[name]
    before = copy.deepcopy(document)
    assert predicted(engine, document) == (text and forms(text, in_json=in_json))
    assert document == before


#: What a message may hold that is no listing and no JSON, or is more than is looked at.
BAD = {
    "10 MB": '     1\tif a == "b":\n' * 500_000,
    "a million backslashes": "\\" * 999_999 + "\n",
    "broken JSON": '["' + 'a\\nb\\q", "' * 20_000 + "\n",
    "NULs": "\0\n" * 500_000,
    "a CSV": "".join(f"{n},a,{n + 1}\n" for n in range(50_000)),
    "a log": "".join(f"12:{n // 60:02}:{n % 60:02} up\n" for n in range(3600)),
    "a table": "".join(f"{10 * n}\t{n}\n" for n in range(50_000)),
    "a lone surrogate": "1: a\n2: \ud800\n3: b\n",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_left_as_they_are_and_keep_nobody_waiting(name: str) -> None:
    """Time of the event loop's thread is a small part of what is spent on them."""
    text, engine, sizes = BAD[name], Engine(limit=200_000), list[int]()

    def tokenize(text: str, **_: Any) -> list[int]:
        sizes.append(len(text))
        return [1]

    async def in_thread(step: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(engine.renderer._executor, step, *args)

    engine.renderer.encode = tokenize  # type: ignore[method-assign]
    limits = conversation.Limits.of(engine.vllm_config)
    for tools in (None, TOOLS):
        conversation._views.clear()
        document = {"messages": [{"role": "tool", "content": text}], "tools": tools}
        sizes.clear()
        begun, begun_in_loop = time.process_time(), time.thread_time()
        asyncio.run(token_ids(engine, document, in_thread))
        in_loop, spent = time.thread_time() - begun_in_loop, time.process_time() - begun
        # Without tools there is nothing to draft from; with them the message is a text, behind three forms of it.
        assert len(sizes) == (4 if tools and name != "a lone surrogate" else 0)
        assert sizes[-1:] in ([], [min(len(text), limits.characters)])
        assert spent < 5
        assert in_loop < max(0.02, spent / 3)


def test_a_million_token_ids_are_not_walked() -> None:
    """A prompt of ids, or of lists of them: an entry that cannot be looked at would be an error."""

    class Ids(list[int]):
        def __reversed__(self) -> Any:
            raise AssertionError

    for prompt in (Ids([1]), Ids([[1]]), Ids()):  # type: ignore[list-item]
        assert [*conversation.texts_of({"prompt": prompt if prompt else [1]})] == []


def test_the_newest_messages_come_first_as_far_as_there_is_room(engine: Engine) -> None:
    listings = ["".join(f"{n}: {word}\n" for n in range(1, 4)) for word in ("old", "new")]
    messages = [{"role": "user", "content": text} for text in listings]
    assert predicted(engine, chat(messages)) == forms("new\n" * 3) + forms("old\n" * 3)
    assert predicted(Engine(limit=44), chat(messages)) == forms("new\n" * 3) + "ol"


def test_a_conversation_that_grows_costs_what_is_new_in_it(engine: Engine) -> None:
    """And one that is new is read in few jobs, of so much text each that others get a turn."""
    jobs: list[Any] = []

    async def counted(step: Any, *args: Any) -> Any:
        jobs.append(step)
        return step(*args)

    messages = [{"role": "user", "content": f"1: a{turn}\n2: b\n3: c\n"} for turn in range(300)]
    for turns, expected in ((299, 2), (300, 2), (300, 1)):
        engine.renderer.read.clear()
        jobs.clear()
        ids = asyncio.run(token_ids(engine, chat(messages[:turns]), counted))
        assert (text_of(ids) or "").count("\nb\n") == turns
        assert len(jobs) == expected
        if turns == 300 and expected == 2:
            assert engine.renderer.read == ["a299\nb\nc\n", " a299\n b\n c\n", "-a299\n-b\n-c\n"]
    jobs.clear()
    text = "".join(f"{n}: {n:030}\n" for n in range(1, 2000))
    long = chat([{"role": "user", "content": f"{text}{n}"} for n in range(4)])
    asyncio.run(token_ids(Engine(limit=10**6), long, counted))
    assert len(jobs) == 1 + 4


#: Who asks; the ids of a tenant are its own.
tenant: ContextVar[int] = ContextVar("tenant")
#: Some that a key which joins them with a text would mistake for each other.
SALTS = (None, "", "a", "b", "1:a", "a\nTrue", "None", "0:")


class MarkingRenderer(Renderer):
    """The ids of a text tell for whom it was read."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [tenant.get() << 16 | token for token in super().encode(text, add_special_tokens)]


async def with_others(step: Any, *args: Any) -> Any:
    await asyncio.sleep(0)  # others ask meanwhile
    return step(*args)


def test_ten_thousand_requests_and_none_drafts_from_another_tenants_conversation(
    engine: Any,
) -> None:
    """Few texts, so that nearly each is one that another tenant has sent; more of them than are kept."""
    rng = random.Random(0)
    engine.renderer = MarkingRenderer()
    conversation._views[engine.renderer] = kept = conversation.Views(max_bytes=50_000)
    texts = [f"1: a{number}\n2: b\n3: c\n" for number in range(20)]

    async def wrong_of_one() -> int:
        tenant.set(index := rng.randrange(len(SALTS)))
        said = rng.sample(texts, 2)
        messages = [{"role": "user", "content": text} for text in said]
        document = {"messages": messages, "cache_salt": SALTS[index]}
        encoded = await token_ids(engine, document, with_others)
        own = "".join(forms(conversation.views.make(text, ["unnumbered"])[0]) for text in reversed(said))
        ids = wire.decode_token_ids(encoded).tolist()
        return ids != [index << 16 | ord(character) for character in own]

    async def wrong() -> int:
        return sum([sum(await asyncio.gather(*(wrong_of_one() for _ in range(10)))) for _ in range(1000)])

    assert asyncio.run(wrong()) == 0
    assert 3 * len(SALTS) * len(texts) < len(engine.renderer.read) < 3 * 20_000  # kept, and dropped
    assert 40_000 < kept.num_bytes <= 50_000


def test_kept_views_are_bounded() -> None:
    kept = conversation.Views(max_bytes=1000)
    for number in (1, 2, 3, 1, 4, 5):
        kept.put(bytes([number]) * 32, b"x" * 40)
        kept.get(bytes([1]) * 32)
        assert kept.num_bytes <= 1000
    held = [number for number in range(1, 6) if kept.get(bytes([number]) * 32)]
    assert held == [1, 4, 5] or held == [1, 3, 4, 5]
    kept.put(bytes([9]) * 32, b"x" * 5000)
    assert kept.num_bytes == 0


@pytest.mark.parametrize("size", [0, 40, 4000])
def test_as_many_bytes_are_kept_as_are_counted(size: int) -> None:
    kept, count = conversation.Views(), 20_000
    tracemalloc.start()
    for number in range(count):
        kept.put(number.to_bytes(4, "little") * 8, bytes([number % 250]) * size)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.6 < kept.num_bytes / held < 1.6


def test_a_request_says_itself_whether_it_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**more: Any) -> tuple[str | None, wire.TextKind | None]:
        rest, http = taken(engine, chat([{"role": "user", "content": NUMBERED}], **more))
        assert conversation.CONVERSATION not in (rest.get("vllm_xargs") or {})
        given = http and http.prediction
        return text_of(given and given.token_ids), given and given.kind

    on, off = ({"vllm_xargs": {"conversation": value}} for value in (1, 0))
    nothing, forms_of_it = (None, None), (forms(PLAIN), wire.TextKind.MEMORY)
    assert (found(), found(**off), found(**on)) == (nothing, nothing, forms_of_it)
    monkeypatch.setenv("GPU_ALIGN_CONVERSATION", "1")
    assert (found(), found(**off), found(**on)) == (forms_of_it, nothing, forms_of_it)
    assert found(prediction={"type": "content", "content": "x"}) == ("x", wire.TextKind.PREDICTION)
    assert found(use_beam_search=True) == nothing
    error, _ = taken(engine, chat([], vllm_xargs={"conversation": "yes"}))
    assert error["message"] == "conversation: expected a boolean, got something else"


MALFORMED = [
    {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]},
    {"content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": 5}]},
    {"content": [{"type": "text", "text": "a"}, 5]},
    {"content": [{"type": "text"}, {"type": "text", "text": "b"}]},
]


@pytest.mark.parametrize("message", MALFORMED, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"prediction": {"type": "content", "content": "x"}}], ids=["", "predicted"]
)
def test_vllm_gets_whole_what_is_read_here(
    engine: Engine, message: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its own models read a part of it later: the body goes to vLLM as it came."""
    monkeypatch.setenv("GPU_ALIGN_CONVERSATION", "1")
    document = chat([{"role": "user", **message}, {"role": "user", "content": NUMBERED}])
    rest, http = taken(engine, {**document, **more})
    assert rest == document
    assert http


def test_a_failed_view_costs_no_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(metrics, "count_refused", lambda *args: counted.append(args))
    monkeypatch.setattr(conversation.views, "of_message", lambda *_: 1 / 0)
    document = chat([{"role": "user", "content": NUMBERED}], vllm_xargs={"conversation": 1})
    assert taken(engine, document) == ({**document, "vllm_xargs": {}}, None)
    assert counted == [("conversation", "dropped")]
    assert counted[0] in metrics.REFUSED

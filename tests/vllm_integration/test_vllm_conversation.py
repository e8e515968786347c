"""Drafts from the messages of a request that brings no prediction: which texts, in which forms, for whom."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import config

from vllm_integration.frontend import conversation, endpoints, metrics
from vllm_integration.frontend.prediction import FieldError
from vllm_integration.wire import request as wire

pytest.importorskip("vllm")

FILE = 'def f(a):\n    return "a"\n'
NUMBERED = '1\tdef f(a):\n2\t    return "a"\n3\t\n'
PLAIN = 'def f(a):\n    return "a"\n\n'
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


def forms(text: str, *, in_json: bool = False) -> str:
    """A text, and as it stands in a diff; or as both stand in a JSON string, and the text."""
    lines = text.splitlines(keepends=True)
    marked = "".join(f"{mark}{line}" for mark in " -" for line in lines)
    return json.dumps(text + marked)[1:-1] + text if in_json else text + marked


class Renderer:
    """A token is a character."""

    def __init__(self) -> None:
        self.tokenizer: Any = "a tokenizer"
        self.read: list[str] = []

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: Any) -> dict[str, list[int]]:
        self.read.append(prompt["prompt"])
        return {"prompt_token_ids": list(map(ord, prompt["prompt"]))[: params.truncate_prompt_tokens]}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(conversation, "kept", conversation.Views())
    monkeypatch.delenv("GPU_ALIGN_CONVERSATION", raising=False)
    return serving_of(20_000)


def serving_of(max_model_len: int) -> Any:
    engine = SimpleNamespace(vllm_config=config(max_model_len=max_model_len))
    return SimpleNamespace(engine_client=engine, renderer=Renderer())


def text_of(prediction: wire.Prediction | None) -> str | None:
    if prediction is None:
        return None
    assert prediction.token_ids is not None
    return "".join(map(chr, wire.decode_token_ids(prediction.token_ids)))


def predicted(serving: Any, request: Any) -> str | None:
    return text_of(asyncio.run(conversation.predict(serving, request)))


def chat(messages: list[dict[str, Any]], **more: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate({"messages": messages, **more})


def responses(items: Any, **more: Any) -> Any:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return ResponsesRequest.model_validate({"input": items, **more})


def completion(prompt: Any, **more: Any) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest.model_validate({"prompt": prompt, **more})


def tool_result(text: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Edit it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]


def call_of(arguments: dict[str, str]) -> dict[str, Any]:
    function = {"name": "write", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": NUMBERED}


@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        (lambda: chat(tool_result(NUMBERED)), forms(PLAIN)),
        (lambda: chat(tool_result(NUMBERED), tools=TOOLS), forms(PLAIN, in_json=True)),
        (lambda: chat(tool_result(NUMBERED), tools=TOOLS, tool_choice="none"), forms(PLAIN)),
        (lambda: chat(tool_result([{"type": "text", "text": NUMBERED}])), forms(PLAIN)),
        (lambda: chat([{"role": "user", "content": [{"type": "text", "text": NUMBERED}]}]), forms(PLAIN)),
        (
            lambda: chat([{"role": "system", "content": NUMBERED}], response_format=FORMAT),
            forms(PLAIN, in_json=True),
        ),
        (
            lambda: chat([{"role": "user", "content": FILE}, *tool_result(FILE)], tools=TOOLS),
            forms(FILE, in_json=True),
        ),
        (
            lambda: responses(
                [{**OUTPUT, "output": FILE}], text={"format": {"name": "a", "schema": {}, **FORMAT}}
            ),
            forms(FILE, in_json=True),
        ),
        (lambda: chat([{"role": "user", "content": FILE}], tools=TOOLS), None),
        (lambda: chat([{"role": "assistant", "content": FILE}], tools=TOOLS), None),
        (
            lambda: chat([{"role": "user", "content": f"<file>\n{FILE}</file>"}], tools=TOOLS),
            forms(FILE, in_json=True),
        ),
        (lambda: chat([{"role": "user", "content": FILE}]), None),
        (lambda: chat([call_of({"path": "f.py", "content": FILE})]), forms(FILE)),
        (lambda: responses([{"role": "user", "content": "Edit it."}, OUTPUT]), forms(PLAIN)),
        (lambda: responses(NUMBERED), forms(PLAIN)),
        (
            lambda: responses([OUTPUT], text={"format": {"name": "a", "schema": {}, **FORMAT}}),
            forms(PLAIN, in_json=True),
        ),
        (lambda: completion(NUMBERED), forms(PLAIN)),
        (
            lambda: completion([NUMBERED, NUMBERED.replace("f", "g")]),
            forms(PLAIN.replace("f", "g")) + forms(PLAIN),
        ),
        (lambda: completion([1, 2, 3]), None),
    ],
)
def test_the_forms_in_which_an_answer_may_hold_a_text(
    serving: Any, request_of: Any, expected: str | None
) -> None:
    request = request_of()
    before = request.model_dump_json()
    assert predicted(serving, request) == expected
    assert request.model_dump_json() == before


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
    text, serving, sizes = BAD[name], serving_of(200_000), []

    async def tokenize(prompt: dict[str, str], params: Any) -> dict[str, list[int]]:
        sizes.append(len(prompt["prompt"]))
        return {"prompt_token_ids": [1]}

    serving.renderer.tokenize_prompt_async = tokenize
    limits = conversation.Limits.of(serving.engine_client.vllm_config)
    conversation.tokenize_params(limits)  # imports vLLM's
    for tools in (None, TOOLS):
        conversation.kept = conversation.Views()
        request = SimpleNamespace(messages=[{"role": "tool", "content": text}], tools=tools, cache_salt=None)
        sizes.clear()
        begun, begun_in_loop = time.process_time(), time.thread_time()
        asyncio.run(conversation.predict(serving, request))
        in_loop, spent = time.thread_time() - begun_in_loop, time.process_time() - begun
        assert request.messages[0]["content"] is text
        # Without tools there is nothing to draft from; with them the message is a text, behind three forms of it.
        assert len(sizes) == (4 if tools and name != "a lone surrogate" else 0)
        assert sizes[-1:] in ([], [min(len(text), limits.characters)])
        assert spent < 5
        assert in_loop < max(0.02, spent / 3)


def test_the_newest_messages_come_first_as_far_as_there_is_room(serving: Any) -> None:
    listings = ["".join(f"{n}: {word}\n" for n in range(1, 4)) for word in ("old", "new")]
    messages = [{"role": "user", "content": text} for text in listings]
    assert predicted(serving, chat(messages)) == forms("new\n" * 3) + forms("old\n" * 3)
    assert predicted(serving_of(44), chat(messages)) == forms("new\n" * 3) + "ol"
    prediction = asyncio.run(conversation.predict(serving, chat(messages)))
    assert prediction is not None
    assert prediction.kind == wire.TextKind.MEMORY


def test_a_conversation_that_grows_costs_what_is_new_in_it(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Any] = []
    run_in_thread = asyncio.to_thread
    monkeypatch.setattr(asyncio, "to_thread", lambda *args: (threads.append(args), run_in_thread(*args))[1])
    messages = [{"role": "user", "content": f"1: a{turn}\n2: b\n3: c\n"} for turn in range(40)]
    for turns in (39, 40):
        serving.renderer.read.clear()
        threads.clear()
        assert (predicted(serving, chat(messages[:turns])) or "").count("\nb\n") == turns
    assert serving.renderer.read == ["a39\nb\nc\n", " a39\n b\n c\n", "-a39\n-b\n-c\n"]
    assert len(threads) == 3  # hashes of all, views and token ids of the new one


#: Who asks; the ids of a tenant are its own.
tenant: ContextVar[int] = ContextVar("tenant")
#: Some that a key which joins them with a text would mistake for each other.
SALTS = (None, "", "a", "b", "1:a", "a\nTrue", "None", "0:")


class MarkingRenderer(Renderer):
    """The ids of a text tell for whom it was read."""

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: Any) -> dict[str, list[int]]:
        self.read.append(prompt["prompt"])
        await asyncio.sleep(0)  # others ask meanwhile
        return {"prompt_token_ids": [tenant.get() << 16 | ord(character) for character in prompt["prompt"]]}


def test_ten_thousand_requests_and_none_drafts_from_another_tenants_conversation(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few texts, so that nearly each is one that another tenant has sent; more of them than are kept."""
    rng = random.Random(0)
    monkeypatch.setattr(conversation, "kept", kept := conversation.Views(max_bytes=20_000))
    serving.renderer = MarkingRenderer()
    texts = [f"1: a{number}\n2: b\n3: c\n" for number in range(20)]

    async def wrong_of_one() -> int:
        tenant.set(index := rng.randrange(len(SALTS)))
        said = rng.sample(texts, 2)
        messages = [{"role": "user", "content": text} for text in said]
        request = SimpleNamespace(messages=messages, cache_salt=SALTS[index], tools=None)
        prediction = await conversation.predict(serving, request)
        assert prediction is not None
        assert prediction.token_ids is not None
        own = "".join(forms(conversation.views.make(text, ["unnumbered"])[0]) for text in reversed(said))
        ids = wire.decode_token_ids(prediction.token_ids).tolist()
        return ids != [index << 16 | ord(character) for character in own]

    async def wrong() -> int:
        return sum([sum(await asyncio.gather(*(wrong_of_one() for _ in range(10)))) for _ in range(1000)])

    assert asyncio.run(wrong()) == 0
    assert 3 * len(SALTS) * len(texts) < len(serving.renderer.read) < 3 * 20_000  # kept, and dropped
    assert 15_000 < kept.num_bytes <= 20_000


def test_what_is_kept_of_earlier_turns_is_bounded() -> None:
    kept = conversation.Views(max_bytes=100)
    for number in (1, 2, 1, 3):
        kept.put(bytes([number]), b"x" * 40)
        assert kept.num_bytes <= 100
    assert [number for number in (1, 2, 3) if kept.get(bytes([number]))] == [2, 3]
    assert kept.num_bytes == 82


def test_a_request_says_itself_whether_it_does(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**more: Any) -> str | None:
        request = chat([{"role": "user", "content": NUMBERED}], **more)
        prediction = asyncio.run(endpoints.take(serving, request, plain_text=False))
        assert conversation.CONVERSATION not in (request.vllm_xargs or {})
        return text_of(prediction)

    on, off = ({"vllm_xargs": {"conversation": value}} for value in (1, 0))
    assert (taken(), taken(**off), taken(**on)) == (None, None, forms(PLAIN))
    monkeypatch.setenv("GPU_ALIGN_CONVERSATION", "1")
    assert (taken(), taken(**off), taken(**on)) == (forms(PLAIN), None, forms(PLAIN))
    assert taken(prediction={"type": "content", "content": "x"}) == "x"
    assert taken(use_beam_search=True) is None
    with pytest.raises(FieldError, match=r"conversation: expected a boolean, got something else"):
        taken(vllm_xargs={"conversation": "yes"})


def test_where_it_fails_the_request_goes_on(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(metrics, "count_refused", lambda *args: counted.append(args))
    monkeypatch.setattr(conversation.views, "make", lambda *_: 1 / 0)
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    request = chat([{"role": "user", "content": NUMBERED}], vllm_xargs={"conversation": 1})
    assert asyncio.run(endpoints.take(serving, request, plain_text=False)) is None
    assert counted == [("conversation", "dropped")]
    assert counted[0] in metrics.REFUSED


ARGUMENTS = json.dumps({"path": "f.py", "content": PLAIN})
_CALL = f'{{"name": "write", "%s": {ARGUMENTS}}}'
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_XML = f"<parameter=path>\nf.py\n</parameter>\n<parameter=content>\n{PLAIN}\n</parameter>"
#: vLLM's name of a parser → a call as its models write it.
CALLS = {
    "hermes": f"<tool_call>\n{_CALL % 'arguments'}\n</tool_call>",
    "llama3_json": _CALL % "parameters",
    "mistral": f"[TOOL_CALLS]write{ARGUMENTS}",
    "deepseek_v3": _DEEPSEEK % f"function<｜tool▁sep｜>write\n```json\n{ARGUMENTS}\n```",
    "deepseek_v31": _DEEPSEEK % f"write<｜tool▁sep｜>{ARGUMENTS}",
    "qwen3_coder": f"<tool_call>\n<function=write>\n{_XML}\n</function>\n</tool_call>",
    "openai": f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
}


class _Vocabulary(dict[str, int]):
    def get(self, token: str, default: Any = None) -> int:
        return hash(token) % 2**16 + 10

    __getitem__ = get

    def __contains__(self, token: object) -> bool:
        return True


@pytest.mark.parametrize("name", CALLS)
def test_the_text_of_a_call_is_among_the_views_of_what_was_read_and_of_the_call(
    serving: Any, name: str
) -> None:
    from vllm.tool_parsers import ToolParserManager

    in_form = PLAIN if name == "qwen3_coder" else json.dumps(PLAIN)[1:-1]
    assert CALLS[name].count(in_form) == 1
    assert in_form in (predicted(serving, chat(tool_result(NUMBERED), tools=TOOLS)) or "")
    arguments = ARGUMENTS
    if name != "openai":  # Harmony's parser reads the ids of its own vocabulary
        vocabulary = _Vocabulary()
        tokenizer = SimpleNamespace(
            get_vocab=lambda: vocabulary, encode=lambda text, **_: list(map(ord, text)), vocab=vocabulary,
            convert_tokens_to_ids=vocabulary.get, bos_token="<s>", all_special_tokens=[], all_special_ids=[],
            eos_token="</s>", decode=lambda ids, **_: "".join(map(chr, ids)),
        )  # fmt: skip
        request = chat([{"role": "user", "content": "x"}], tools=TOOLS)
        parser: Any = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        [call] = parser.extract_tool_calls(CALLS[name], request).tool_calls
        arguments = call.function.arguments
    assert predicted(serving, chat([call_of(json.loads(arguments))], tools=TOOLS)) == forms(
        PLAIN, in_json=True
    )

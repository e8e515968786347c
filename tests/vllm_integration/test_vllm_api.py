"""The `prediction` field and the front end's wrappers, without a server."""

from __future__ import annotations

import asyncio
import copy
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from usage_harness import refused
from vllm_fakes import config

from tests.campaign.wire_bodies import is_taken, predictions
from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import conversation
from vllm_integration.frontend import endpoints as api
from vllm_integration.frontend import prediction as limits
from vllm_integration.frontend import usage as response_usage
from vllm_integration.frontend.prediction import FieldError, Limits, parse_prediction
from vllm_integration.seams import install as compat
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.wire.request import PredictedOutputParams

pytestmark = pytest.mark.usefixtures("plugin_on")


GIVEN = Settings(max_prediction_chars=1000, max_prediction_parts=50, max_prediction_depth=5)
LIMITS = Limits(100, GIVEN)
STRICT = Limits(100, GIVEN.model_copy(update={"strict_limits": True}))
PART = {"type": "text", "text": "a"}


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


def nested(depth: int) -> Any:
    """An object that nests `depth` deep."""
    value: Any = {}
    for _ in range(depth - 1):
        value = {"more": value}
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (content("a"), "a"),
        (content(""), ""),
        (content([]), ""),
        (content("a\r\nb\rc\r\r\n"), "a\nb\nc\n\n"),
        (content([{"type": "text", "text": "a\r"}, {"type": "text", "text": "\nb"}]), "a\nb"),
        ({**content([{"type": "text", "text": "a", "cache": 1}]), "extra": 1}, "a"),
        (content("\0\ufeffé🙂"), "\0\ufeffé🙂"),
        ("a\r\nb", "a\nb"),
        # What just fits.
        (content("b" * 1000), "b" * 1000),
        (content([PART] * 50), "a" * 50),
        ({**content("a"), "unknown": nested(4)}, "a"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_text_of_a_prediction(value: Any, text: str) -> None:
    assert parse_prediction(value, STRICT, plain_text=isinstance(value, str)) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("secret", "prediction: .*, got string"),
        (["secret"], "prediction: .*, got array"),
        (True, "prediction: .*, got boolean"),
        (1.5, "prediction: expected a string or .*, got number"),
        ({}, "prediction.type: .* missing"),
        ({"type": "content"}, "prediction.content: .* missing"),
        ({"type": "secret", "content": "a"}, "prediction.type: expected 'content', got another string"),
        ({"type": None, "content": "a"}, "prediction.type: .*, got null"),
        (content(None), "prediction.content: .*, got null"),
        (content({"text": "secret"}), "prediction.content: .*, got object"),
        (content(["secret"]), r"prediction.content\[0\]: .*, got string"),
        (content([{"type": "text"}]), r"prediction.content\[0\].text: .* missing"),
        (content([PART, {"type": "image"}]), r"prediction.content\[1\].type: .*, got another string"),
        (content([{**PART, "text": ["secret"]}]), r"prediction.content\[0\].text: .*, got array"),
        (content([[[[[]]]]]), r"prediction.content\[0\]: .*, got array"),
        (content("secret\ud800"), "prediction.content: .* surrogate at character 6"),
        (content([0] * 50), r"prediction.content\[0\]: .*, got number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_prediction_is_named_and_not_repeated(value: Any, message: str) -> None:
    with pytest.raises(FieldError, match=f"^{message}") as caught:
        parse_prediction(value, LIMITS, plain_text=not isinstance(value, str))
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200


def check(value: Any, *, plain_text: bool) -> None:
    """What the documentation says of a value is what becomes of it."""
    if is_taken(value, plain_text=plain_text, characters=1000, parts=50):
        parse_prediction(value, LIMITS, plain_text=plain_text)
        return
    with pytest.raises(FieldError, match=r"^prediction") as caught:
        parse_prediction(value, LIMITS, plain_text=plain_text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("plain_text", [False, True])
def test_every_value_is_taken_or_refused_as_documented(plain_text: bool) -> None:
    for value in predictions():
        if value is not None:
            check(value, plain_text=plain_text)


@pytest.mark.parametrize(
    ("reason", "value", "text"),
    [
        ("characters", content("b" * 1001), "b" * 1000),
        ("characters", content([{"type": "text", "text": "b" * 400}] * 3), "b" * 1000),
        # What lies beyond the limit is not looked at.
        ("characters", content("b" * 1000 + "\ud800"), "b" * 1000),
        ("parts", content([PART] * 51), "a" * 50),
        ("parts", content([PART] * 50 + [5]), "a" * 50),
        ("nesting", {**content("a"), "unknown": nested(5)}, "a"),
        ("nesting", {**content("a"), "unknown": nested(400)}, "a"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_over_a_limit_is_cut_and_counted_or_refused(
    reason: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(limits.metrics, "count_refused", lambda *what: heard.append(what))
    with pytest.raises(FieldError, match=r"^prediction.*expected at most .*, got more") as caught:
        parse_prediction(value, STRICT)
    assert (caught.value.reason, heard) == (reason, [])
    assert parse_prediction(value, LIMITS) == text
    assert heard == [(reason, "truncated")]


def test_one_token_more_than_the_limit_is_made_and_no_special_ones() -> None:
    """So that it is known whether something was cut."""
    params = pytest.importorskip("vllm") and limits.tokenize_params(LIMITS)
    assert (params.truncate_prompt_tokens, params.truncation_side) == (LIMITS.tokens + 1, "right")
    assert params.get_encode_kwargs()["add_special_tokens"] is False


def test_the_limits_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, found in (({}, (16 * 64, 64)), ({"TOKENS": "10", "CHARS": "11"}, (11, 10))):
        for name, value in variables.items():
            monkeypatch.setenv(f"GPU_ALIGN_MAX_PREDICTION_{name}", value)
        allowed = Limits.of(config(max_model_len=64))
        assert (allowed.characters, allowed.tokens) == found


class Serving:
    """As much of `OpenAIServingChat` as the wrapper touches."""

    def __init__(self, method: str = "custom_class", limit: int = 64) -> None:
        vllm_config = config(max_model_len=limit)
        vllm_config.speculative_config.method = method
        self.engine_client = SimpleNamespace(vllm_config=vllm_config)
        self.renderer = self
        self.tokenizer: Any = "a tokenizer"
        self.tokenised: list[str] = []

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: int) -> dict[str, list[int]]:
        self.tokenised.append(prompt["prompt"])
        return {"prompt_token_ids": [ord(c) for c in prompt["prompt"]][:params]}

    @staticmethod
    def create_error_response(message: str, param: str | None = None) -> Any:
        return ("error", message, param)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        return ("served", request.vllm_xargs, raw_request)


def call(serving: Serving, prediction: Any, *, plain_text: bool = False, **fields: Any) -> Any:
    request = SimpleNamespace(
        model_extra={"prediction": prediction}, vllm_xargs=None, use_beam_search=False, request_id="r"
    )
    for name, value in fields.items():
        setattr(request, name, value)
    serve = api.serve_completion if plain_text else api.serve
    return asyncio.run(serve(Serving.create_chat_completion, serving, request, "raw"))


def travelling(*token_ids: int, **chosen: Any) -> dict[str, Any]:
    """What `vllm_xargs` holds for these ids: the HTTP request id is fixed below."""
    (prediction,) = PredictedOutputParams(token_ids=token_ids).to_extra_args().values()
    return {wire.KEY: replace(prediction, http_request_id="http", **chosen)}


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "tokenize_params", lambda allowed: allowed.tokens + 1)
    for name in os.environ:
        if name.startswith("GPU_ALIGN_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(api.uuid, "uuid4", lambda: SimpleNamespace(hex="http"))


KEY = wire.KEY
TOOLS = {"tools": [{"type": "function"}]}
#: A server, the field, what else the request has; and what vLLM then gets in `vllm_xargs`.
SERVED: list[tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any] | None]] = [
    ({}, content("ab"), {"vllm_xargs": {"mine": 1}}, {"mine": 1, **travelling(97, 98)}),
    ({}, None, {}, None),
    ({}, content(""), {}, None),
    ({}, content([]), {}, None),
    ({}, None, {"model_extra": None}, None),
    ({}, content(""), {"use_beam_search": True}, None),
    ({}, None, {"vllm_xargs": {"memory": False}, "use_beam_search": True}, {}),
    ({}, "ab", {"plain_text": True}, travelling(97, 98)),
    ({}, content("a"), {"vllm_xargs": {"memory": 0, "mine": 1}}, {"mine": 1, **travelling(97, memory=False)}),
    ({}, content("a"), {"vllm_xargs": {"recipes": []}}, travelling(97, recipes=())),
    ({}, None, {"vllm_xargs": {KEY: [0, 99], "mine": 1}}, {**travelling(0, 99), "mine": 1}),
    ({}, None, {"vllm_xargs": {KEY: "a\rb", "mine": 1}}, {**travelling(97, 10, 98), "mine": 1}),
    ({}, None, {"vllm_xargs": {KEY: []}}, {}),
    ({}, None, {"vllm_xargs": {KEY: ""}}, {}),
    ({"limit": 4}, None, {"vllm_xargs": {KEY: [1, 2, 3, 4, 500]}}, travelling(1, 2, 3, 4)),
    ({"limit": 4, "strict": "1"}, content("abcd"), {}, travelling(97, 98, 99, 100)),
    ({"limit": 4}, content("abcdefgh"), {}, travelling(97, 98, 99, 100)),
    ({"tokenizer": None}, None, {"vllm_xargs": {KEY: [1]}}, travelling(1)),
    *[
        (server, {**content('a"'), **given}, fields, travelling(97, 34, *view))
        for server, given, fields, view in (
            ({}, {"views": ["json"]}, {}, (97, 92, 34)),
            ({}, {"views": ["diff", "json", "json"]}, {}, (32, 97, 34, 97, 92, 34)),
            ({}, {"views": ["unnumbered"]}, {}, ()),
            ({}, {"views": []}, TOOLS, ()),
            ({}, {"views": None}, TOOLS, (97, 92, 34)),
            ({}, {}, TOOLS, (97, 92, 34)),
            ({}, {}, {**TOOLS, "tool_choice": "none"}, ()),
            ({}, {}, {"tools": []}, ()),
            ({}, {}, {"response_format": SimpleNamespace(type="json_schema")}, (97, 92, 34)),
            ({}, {}, {"response_format": SimpleNamespace(type="text")}, ()),
            ({}, {}, {"text": SimpleNamespace(format=SimpleNamespace(type="json_object"))}, (97, 92, 34)),
            ({"limit": 4}, {"views": ["json"]}, {}, (97, 92)),
            ({"limit": 2}, {"views": ["json"]}, {}, ()),
        )
    ],
    ({}, content('{"'), {"response_format": SimpleNamespace(type="json_object")}, travelling(123, 34)),
    ({"method": "ngram"}, content(5), {}, None),  # an engine that drafts otherwise
    ({"off": "a seam is missing"}, content(5), {}, None),
]


@pytest.mark.parametrize(("server", "prediction", "fields", "xargs"), SERVED)
def test_what_is_served(
    server: dict[str, Any],
    prediction: Any,
    fields: dict[str, Any],
    xargs: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
) -> None:
    serving = set_up(server, monkeypatch)
    assert call(serving, prediction, **copy.deepcopy(fields)) == ("served", xargs, "raw")
    assert xargs or not serving.tokenised
    cut = ["A prediction is cut: prediction: expected at most 4 tokens, got more"]
    plugin_log = [line for line in plugin_log if "does not draft" not in line]
    assert plugin_log == cut * (prediction == content("abcdefgh")) or KEY in (fields.get("vllm_xargs") or {})


def set_up(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Serving:
    rest = dict(server)
    monkeypatch.setenv("GPU_ALIGN_STRICT_LIMITS", rest.pop("strict", "0"))
    monkeypatch.setattr(compat, "_off_reason", rest.pop("off", None))
    tokenizer = rest.pop("tokenizer", "a tokenizer")
    serving = Serving(**rest)
    serving.tokenizer = tokenizer
    return serving


XARGS = f"vllm_xargs.{KEY}"


@pytest.mark.parametrize(
    ("server", "prediction", "fields", "found"),
    [
        ({}, content(5), {}, "got number"),
        ({}, "ab", {}, "got string"),
        ({}, content("ab"), {"use_beam_search": True}, "cannot be combined with use_beam_search"),
        ({}, content("ab"), {"vllm_xargs": {KEY: [1]}}, "got both"),
        ({"limit": 4, "strict": "1"}, content("abcde"), {}, "at most 4 tokens, got more"),
        ({"tokenizer": None}, content("ab"), {}, "expected token ids in vllm_xargs"),
        (
            {},
            {**content("ab"), "views": ["json", "31337"]},
            {},
            ".views[1]: expected one of json, json_ascii,",
        ),
        ({}, {**content("ab"), "views": [31337]}, {}, ".views[0]: expected one of json, json_ascii,"),
        ({}, {**content("ab"), "views": "json"}, {}, ".views: expected an array of names, got string"),
        ({}, {**content("ab"), "views": ["json"] * 99}, {}, ".views: expected at most 10 names, got 99"),
        ({}, {**content(""), "views": ["json"]}, {}, ".views: expected no names with an empty prediction"),
        *[
            (server, None, {"vllm_xargs": {KEY: given}}, found)
            for server, given, found in (
                ({"limit": 4, "strict": "1"}, [1, 2, 3, 4, 500], "at most 4 tokens, got more"),
                ({}, [31337], "expected 0 ≤ token id < 100"),
                ({}, [100], "expected 0 ≤ token id < 100"),
                ({}, [5, -31337], "expected 0 ≤ id"),
                ({}, [31337 * 2**60], "expected 0 ≤ id"),
                ({}, [5, "31337"], "[1]: expected a token id, got str"),
                ({}, [5.0], "[0]: expected a token id, got float"),
                ({}, 31337, "got number"),
                ({}, None, "got null"),
                ({}, {"31337": 1}, "got object"),
                ({}, "\ud800", "lone surrogate"),
            )
        ],
    ],
)
def test_what_is_refused_is_named_and_not_repeated(
    server: dict[str, Any],
    prediction: Any,
    fields: dict[str, Any],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, message, param = call(set_up(server, monkeypatch), prediction, **fields)
    assert (status, param) == ("error", "prediction")
    assert message.startswith("prediction" if prediction is not None else XARGS)
    assert found in message
    assert "31337" not in message


@pytest.mark.parametrize(
    "xargs",
    [{"recipes": [1]}, {"recipes": ["nope"]}, {"memory": 7}, {"gpu_align": "nope"}, {"gpu_align": [0]}],
)
def test_a_bad_choice_names_its_key(xargs: dict[str, Any]) -> None:
    status, message, parameter = call(Serving(), None, vllm_xargs=dict(xargs))
    assert (status, [parameter]) == ("error", [*xargs])
    assert "nope" not in message


def test_a_view_that_is_cut_or_fails_is_counted(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    field = {**content('a"'), "views": ["json"]}
    counts = [refused("view", action) for action in ("truncated", "dropped")]
    call(Serving(limit=4), field)
    call(Serving(limit=2), field)
    monkeypatch.setattr(conversation.views, "make", broken)
    assert call(Serving(), field) == ("served", travelling(97, 34), "raw")
    assert [refused("view", action) for action in ("truncated", "dropped")] == [counts[0] + 1, counts[1] + 2]
    assert plugin_log == ["A prediction is used without its views: RuntimeError"]


def test_the_text_is_taken_out_and_the_usage_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"prediction": content("ab"), "other": 1}
    monkeypatch.setattr(response_usage, "with_usage", lambda result, http_id: (http_id, result))
    assert call(Serving(), None, model_extra=extra) == ("http", ("served", travelling(97, 98), "raw"))
    assert extra == {"other": 1}
    assert call(Serving(), content(""))[0] == "served"
    before = [refused(reason) for reason in ("malformed", "unsupported")]
    call(Serving(), content(5))
    call(Serving(), content("ab"), use_beam_search=True)
    assert [refused(reason) - 1 for reason in ("malformed", "unsupported")] == before


def test_misspelt_fields_and_an_engine_that_does_not_draft_are_told_once(plugin_log: list[str]) -> None:
    api._tell_once.cache_clear()
    for _ in range(2):
        call(Serving(), None, model_extra={"predictions": "secret", "metadata": {}})
        call(Serving(), content("ab"), vllm_xargs={"gpu_align_predictions": [1], "mine": 1, 3: 4})
        call(Serving("ngram"), content("ab"))
        call(Serving("ngram"), None)
    unknown = "A request has an unknown field that resembles {!r}, and vLLM ignores it: a misspelling?"
    assert plugin_log == [
        unknown.format("prediction"),
        unknown.format(KEY),
        "Requests bring predictions; this server does not draft from them (--speculative-config)",
    ]


def test_each_conversation_of_a_batch_gets_the_prediction() -> None:
    class Batch(SimpleNamespace):
        def to_chat_completion_request(self, messages: Any) -> Any:
            return SimpleNamespace(messages=messages, vllm_xargs=None)

    async def serve(self: Any, request: Any, raw_request: Any = None) -> Any:
        return [request.to_chat_completion_request(m).vllm_xargs for m in request.messages]

    async def both() -> Any:
        """Two requests at once: one task must not see the other's prediction."""
        batch = {"messages": ["m", "n"], "request_id": "r"}
        wrapped = wrapped_by(api.serve_batch)(serve)
        with_one = wrapped(Serving(), Batch(model_extra={"prediction": content("ab")}, **batch))
        without = wrapped(Serving(), Batch(model_extra={}, **batch))
        return await asyncio.gather(with_one, without)

    split = wrapped_by(api.to_chat_completion_request)(Batch.to_chat_completion_request)
    Batch.to_chat_completion_request = split  # type: ignore[method-assign]
    assert asyncio.run(both()) == [[travelling(97, 98)] * 2, [None, None]]


def test_an_unforeseen_error_serves_the_request_without(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    async def broken(self: Any, prompt: Any, params: Any) -> Any:
        raise RuntimeError("secret text")

    monkeypatch.setattr(Serving, "tokenize_prompt_async", broken)
    assert call(Serving(), content("ab")) == ("served", None, "raw")
    assert plugin_log == ["Request r is served without its prediction: RuntimeError"]
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(RuntimeError):
        call(Serving(), content("ab"))


@pytest.mark.parametrize(
    ("method", "model", "ours"),
    [
        ("custom_class", "vllm_integration.PredictedOutputs", True),
        ("custom_class", "vllm_integration.worker.proposer_v1.PredictedOutputs", True),
        ("custom_class", "another.Drafter", False),
        ("ngram", "ngram", False),
    ],
)
def test_whose_engine_it_is(method: str, model: str, ours: bool) -> None:
    vllm_config = config()
    vllm_config.speculative_config.method = method
    vllm_config.speculative_config.model = model
    assert drafts_predictions(vllm_config) is ours
    vllm_config.speculative_config = None
    assert drafts_predictions(vllm_config) is False

"""The `prediction` field and the front end's wrappers, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm_integration.fakes import Engine, Renderer, config, refused, taken
from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.frontend import conversation, middleware
from vllm_integration.frontend import prediction as limits
from vllm_integration.frontend.prediction import Limits
from vllm_integration.seams import guard
from vllm_integration.seams import install as compat
from vllm_integration.wire import request as wire
from vllm_integration.wire.request import Prediction

PART = {"type": "text", "text": "a"}


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


def test_the_limits_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, found in (({}, (16 * 64, 64)), ({"TOKENS": "10", "CHARS": "11"}, (11, 10))):
        for name, value in variables.items():
            monkeypatch.setenv(f"GPU_ALIGN_MAX_PREDICTION_{name}", value)
        allowed = Limits.of(config(max_model_len=64))
        assert (allowed.characters, allowed.tokens) == found


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def call(
    engine: Engine, prediction: Any, *, path: str = CHAT, switch: str | None = None, **fields: Any
) -> Any:
    document = {"messages": [], "user": "kept", **fields}
    if prediction is not None:
        document["prediction"] = prediction
    rest, request = taken(engine, document, path, switch)
    if "user" not in rest:
        return "error", rest["message"], rest["param"]
    assert request is None or not request.usages
    passed = request is None and rest.get("prediction") is not None
    assert rest == {**document, **rest} if passed else rest.keys() == document.keys() - {"prediction"}
    return "served", rest.get("vllm_xargs"), request and request.prediction


def ids(*token_ids: int, **chosen: Any) -> Prediction:
    return Prediction(wire.encode_token_ids("", token_ids), **chosen)


KEY = wire.KEY
TOOLS = {"tools": [{"type": "function"}]}
OFF = Prediction(memory=False, drafts=False)
#: A server, the field, what else the request has; what vLLM then gets in `vllm_xargs`, and what its tasks know.
SERVED: list[tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any] | None, Prediction | None]] = [
    ({}, content("ab"), {"vllm_xargs": {"mine": 1}}, {"mine": 1}, ids(97, 98)),
    ({}, content("a\r\nb\rc\r\r\n"), {}, None, ids(*b"a\nb\nc\n\n")),
    (
        {},
        content([{"type": "text", "text": "a\r"}, {"type": "text", "text": "\nb", "cache": 1}]),
        {},
        None,
        ids(*b"a\nb"),
    ),
    ({}, {**content("\0\ufeffé"), "extra": 1}, {}, None, ids(0, 0xFEFF, 0xE9)),
    ({"characters": "3", "strict": "1"}, content("abc"), {}, None, ids(*b"abc")),
    ({"characters": "3", "strict": "1"}, content([PART] * 3), {}, None, ids(*b"aaa")),
    ({"characters": "3", "cut": "characters"}, content("abcd"), {}, None, ids(*b"abc")),
    ({"characters": "3", "cut": "characters"}, content([PART] * 4), {}, None, ids(*b"aaa")),
    (
        {"characters": "3", "cut": "characters"},
        content("abc\ud800"),
        {},
        None,
        ids(*b"abc"),
    ),  # what lies beyond is not looked at
    ({}, None, {}, None, None),
    ({}, content(""), {}, None, None),
    ({}, None, {"vllm_xargs": {"memory": False}, "use_beam_search": True}, {}, None),
    ({}, None, {"vllm_xargs": {"memory": False}}, {}, Prediction(memory=False)),
    ({}, None, {"vllm_xargs": [{"memory": False}]}, [{"memory": False}], None),
    ({}, "ab", {"path": COMPLETIONS}, None, ids(97, 98)),
    ({}, "ab", {"path": "/invocations", "prompt": "x"}, None, ids(97, 98)),
    ({}, content("ab"), {"path": "/proxy/v1/responses"}, None, ids(97, 98)),
    ({}, content("ab"), {"path": "/v1/messages"}, None, ids(97, 98)),
    ({}, content("ab"), {"path": "/v1/embeddings"}, None, None),
    ({}, content("a"), {"vllm_xargs": {"memory": 0, "mine": 1}}, {"mine": 1}, ids(97, memory=False)),
    ({}, content("a"), {"vllm_xargs": {"recipes": []}}, {}, ids(97, recipes=())),
    ({}, None, {"vllm_xargs": {KEY: [0, 99], "mine": 1}}, {"mine": 1}, ids(0, 99)),
    ({}, None, {"vllm_xargs": {KEY: "a\rb", "mine": 1}}, {"mine": 1}, ids(97, 10, 98)),
    ({}, None, {"vllm_xargs": {KEY: ""}}, {}, None),
    ({"limit": 4, "cut": "tokens"}, None, {"vllm_xargs": {KEY: [1, 2, 3, 4, 500]}}, {}, ids(1, 2, 3, 4)),
    ({"limit": 4, "strict": "1"}, content("abcd"), {}, None, ids(97, 98, 99, 100)),
    ({"limit": 4, "cut": "tokens"}, content("abcdefgh"), {}, None, ids(97, 98, 99, 100)),
    *[
        (server, {**content('a"'), **given}, fields, None, ids(97, 34, *view))
        for server, given, fields, view in (
            ({}, {"views": ["json"]}, {}, (97, 92, 34)),
            ({}, {"views": ["diff", "json", "json"]}, {}, (32, 97, 34, 97, 92, 34)),
            ({}, {"views": []}, TOOLS, ()),
            ({}, {"views": None}, TOOLS, (97, 92, 34)),
            ({}, {}, TOOLS, (97, 92, 34)),
            ({}, {}, {**TOOLS, "tool_choice": "none"}, ()),
            ({}, {}, {**TOOLS, "tool_choice": {"type": "none"}}, ()),
            ({}, {}, {"response_format": {"type": "json_schema"}}, (97, 92, 34)),
            ({}, {}, {"text": {"format": {"type": "json_object"}}}, (97, 92, 34)),
            ({"limit": 4}, {"views": ["json"]}, {}, (97, 92)),
            ({"limit": 2}, {"views": ["json"]}, {}, ()),
        )
    ],
    # Several texts: a gap between two, empty ones not; views are of all of them.
    *[
        ({}, {**content(first), "alternatives": others}, {}, None, ids(*found))
        for first, others, found in (
            ("ab", ["c\r"], (97, 98, 2**31 - 1, 99, 10)),
            ("ab", ["c", "", "d"], (97, 98, 2**31 - 1, 99, 2**31 - 2, 100)),
            ("a", ["b", "a"], (97, 2**31 - 1, 98, 2**31 - 2, 97)),
            ("", ["c"], (99,)),
            ("ab", [], (97, 98)),
            ("ab", None, (97, 98)),
        )
    ],
    (
        {},
        {**content("a"), "alternatives": ['"'], "views": ["json"]},
        {},
        None,
        ids(97, 2**31 - 1, 34, 92, 34),
    ),
    (
        {"limit": 4, "cut": "tokens"},
        {**content("ab"), "alternatives": ["cd"]},
        {},
        None,
        ids(97, 98, 2**31 - 1, 99),
    ),
    (
        {"characters": "3", "cut": "characters"},
        {**content("ab"), "alternatives": ["cd", "e"]},
        {},
        None,
        ids(97, 98, 2**31 - 1, 99),
    ),
    ({}, None, {"vllm_xargs": {KEY: ["a", "b"]}}, {}, ids(97, 2**31 - 1, 98)),
    ({}, None, {"vllm_xargs": {KEY: [[1, 2], [], [3]]}}, {}, ids(1, 2, 2**31 - 1, 3)),
    ({}, None, {"vllm_xargs": {KEY: [[]]}}, {}, None),
    ({}, content('{"'), {"response_format": {"type": "json_object"}}, None, ids(123, 34)),
    # One reader for the header and the body, which comes first.
    *[
        ({}, content("a"), {"vllm_xargs": {"gpu_align": off}}, {}, OFF)
        for off in ("off", " OFF", 0, 0.0, False)
    ],
    *[({}, content("a"), {"switch": off}, None, OFF) for off in ("off", "OFF ", "0", "0.0", "false")],
    *[
        ({}, None, {"vllm_xargs": {"gpu_align": on}}, {}, Prediction(drafts=True))
        for on in ("on", "On", "true", 1, 1.0, True)
    ],
    *[({}, None, {"switch": on}, None, Prediction(drafts=True)) for on in ("on", "ON", "1", "1.0", "true")],
    ({}, None, {"switch": "off", "vllm_xargs": {"gpu_align": "on"}}, {}, Prediction(drafts=True)),
    # An engine that drafts otherwise, and with the plugin off: all goes to vLLM.
    ({"method": "ngram"}, content(5), {}, None, None),
    ({"off": "a seam is missing"}, content(5), {}, None, None),
]


@pytest.mark.parametrize(("server", "prediction", "fields", "xargs", "known"), SERVED)
def test_a_request_reaches_vllm_without_the_plugins_fields(
    server: dict[str, Any],
    prediction: Any,
    fields: dict[str, Any],
    xargs: dict[str, Any] | None,
    known: Prediction | None,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
) -> None:
    engine, cut = set_up(server, monkeypatch), server.get("cut", "tokens")
    before = refused(cut, "truncated")
    assert call(engine, prediction, **fields) == ("served", xargs, known)
    assert known or not engine.renderer.read
    told = [line for line in plugin_log if "does not draft" not in line]
    assert [f"{cut}, got more" in line for line in told] == [True] * ("cut" in server)
    assert refused(cut, "truncated") == before + ("cut" in server)


def set_up(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Engine:
    rest = {"limit": 64, "strict": "0", "characters": "", "off": None, "tokenizer": True, **server}
    monkeypatch.setenv("GPU_ALIGN_STRICT_LIMITS", rest["strict"])
    monkeypatch.setenv("GPU_ALIGN_MAX_PREDICTION_CHARS", rest["characters"])
    monkeypatch.setattr(compat, "_off_reason", rest["off"])
    engine = Engine(rest.get("method", "custom_class"), rest["limit"])
    if not rest["tokenizer"]:
        engine.renderer.tokenizer = None
    return engine


XARGS = f"vllm_xargs.{KEY}"


@pytest.mark.parametrize(
    ("server", "prediction", "fields", "found"),
    [
        ({}, content(5), {}, "got number"),
        ({}, "ab", {}, "got string"),
        ({}, content("ab"), {"use_beam_search": True}, "cannot be combined with use_beam_search"),
        ({}, content("ab"), {"vllm_xargs": {KEY: [1]}}, "got both"),
        ({"limit": 4, "strict": "1"}, content("abcde"), {}, "at most 4 tokens, got more"),
        ({"characters": "3", "strict": "1"}, content("abc\ud800"), {}, "at most 3 characters, got more"),
        ({"characters": "3", "strict": "1"}, content([PART] * 4), {}, "at most 3 characters, got more"),
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
            ({}, {**content("ab"), "alternatives": given}, {}, found)
            for given, found in (
                ("31337", ".alternatives: expected an array of strings, got string"),
                (["c", 31337], ".alternatives[1]: expected a string, got number"),
                ([["c"]], ".alternatives[0]: expected a string, got array"),
                (["c", "\ud800"], ".alternatives[1]: expected valid Unicode, got a lone surrogate"),
                (["c"] * 256, "expected at most 256 texts, got 257"),
            )
        ],
        *[
            (server, None, {"vllm_xargs": {KEY: given}}, found)
            for server, given, found in (
                ({}, [[1], [31337]], "expected 0 ≤ token id < 100"),
                ({}, [[1], 5], "[1]: expected a sequence of token ids, got int"),
                ({}, [[1], "31337"], "[1]: expected a sequence of token ids, got str"),
                ({}, [[1], [2, True]], "[1][1]: expected a token id, got bool"),
                ({}, [[1], [2**31 - 1]], "expected token ids below"),
                ({}, ["a", 31337], "[1]: expected a string, got number"),
                ({}, ["a", "\ud800"], "[1]: expected valid Unicode, got a lone surrogate"),
                ({}, [[n, m] for n in range(17) for m in range(16)], "expected at most 256 texts, found 272"),
                ({"limit": 4, "strict": "1"}, [1, 2, 3, 4, 500], "at most 4 tokens, got more"),
                ({}, [31337], "expected 0 ≤ token id < 100"),
                ({}, [31337 * 2**60], "expected 0 ≤ id"),
                ({}, [5, "31337"], "[1]: expected a token id, got str"),
                ({}, [5.0], "[0]: expected a token id, got float"),
                ({}, None, "got null"),
                ({}, "\ud800", "lone surrogate"),
            )
        ],
    ],
)
def test_a_refusal_names_the_field_and_repeats_no_value(
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


def test_a_view_that_is_cut_or_fails_is_counted(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    field = {**content('a"'), "views": ["json"]}
    counts = [refused("view", action) for action in ("truncated", "dropped")]
    call(Engine(limit=4), field)
    call(Engine(limit=2), field)
    monkeypatch.setattr(conversation.views, "make", broken)
    assert call(Engine(), field) == ("served", None, ids(97, 34))
    assert [refused("view", action) for action in ("truncated", "dropped")] == [counts[0] + 1, counts[1] + 2]
    assert plugin_log == ["A prediction is used without its views: RuntimeError"]


def test_misspelt_fields_and_an_engine_that_does_not_draft_are_told_once(plugin_log: list[str]) -> None:
    guard.warn_once.cache_clear()
    for _ in range(2):
        call(Engine(), None, predictions="secret", metadata={})
        call(Engine(), content("ab"), vllm_xargs={"gpu_align_predictions": [1], "mine": 1, "3": 4})
        call(Engine("ngram"), content("ab"))
        call(Engine("ngram"), None)
    unknown = "Unknown field of a request ignored; did you mean {!r}?"
    assert plugin_log == [
        unknown.format("prediction"),
        unknown.format(KEY),
        "Requests bring predictions; this server does not draft from them (--speculative-config)",
    ]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Renderer, "encode"),
        (limits, "choices_of"),
        (limits, "_prediction"),
        (middleware, "drafts_predictions"),
        (middleware, "take"),
        (middleware.Settings, "of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unforeseen_error_serves_the_request_without(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret\ntext")

    monkeypatch.setattr(owner, name, broken)
    document = {"prediction": content("ab"), "vllm_xargs": {"memory": 0, "other": 1}}
    assert taken(Engine(), document) == (document, None)
    (line,) = [line for line in plugin_log if "does not draft" not in line]  # said once a process
    assert "RuntimeError" in line
    assert "secret" not in line
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(RuntimeError):
        taken(Engine(), document)


@pytest.mark.parametrize(
    ("method", "model", "ours"),
    [
        ("custom_class", "vllm_integration.PredictedOutputs", True),
        ("custom_class", "vllm_integration.worker.proposer_v1.PredictedOutputs", True),
        ("custom_class", "another.Drafter", False),
        ("ngram", "ngram", False),
    ],
)
def test_the_drafter_is_known_by_its_class(method: str, model: str, ours: bool) -> None:
    vllm_config = config()
    vllm_config.speculative_config.method = method
    vllm_config.speculative_config.model = model
    assert drafts_predictions(vllm_config) is ours
    vllm_config.speculative_config = None
    assert drafts_predictions(vllm_config) is False

"""The `prediction` field and the front end's wrappers, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import config

from vllm_integration import PredictedOutputParams, api, compat, inputs, wire

pytestmark = pytest.mark.usefixtures("plugin_on")


PART = {"type": "text", "text": "a"}


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


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
    ],
)
def test_the_text_of_a_prediction(value: Any, text: str) -> None:
    assert api.parse_prediction(value) == text


@pytest.mark.parametrize(
    ("value", "place", "found"),
    [
        ("secret", "prediction: ", "got string"),
        (["secret"], "prediction: ", "got array"),
        (True, "prediction: ", "got boolean"),
        (1.5, "prediction: ", "got number"),
        ({}, "prediction.type: ", "missing"),
        ({"type": "content"}, "prediction.content: ", "missing"),
        ({"type": "secret", "content": "a"}, "prediction.type: ", "got string"),
        ({"type": None, "content": "a"}, "prediction.type: ", "got null"),
        (content(None), "prediction.content: ", "got null"),
        (content({"text": "secret"}), "prediction.content: ", "got object"),
        (content(["secret"]), "prediction.content[0]: ", "got string"),
        (content([{"type": "text"}]), "prediction.content[0].text: ", "missing"),
        (
            content([{"type": "text", "text": "a"}, {"type": "image"}]),
            "prediction.content[1].type: ",
            "got string",
        ),
        (content([{"type": "text", "text": ["secret"]}]), "prediction.content[0].text: ", "got array"),
        (content([[[[[]]]]]), "prediction.content[0]: ", "got array"),
        (content("secret\ud800"), "prediction.content: ", "surrogate at character 6"),
        (content([PART] * 10_001), "prediction.content: ", "10001"),
    ],
)
def test_a_malformed_prediction_is_named_and_not_repeated(value: Any, place: str, found: str) -> None:
    with pytest.raises(api.PredictionError) as caught:
        api.parse_prediction(value)
    message = str(caught.value)
    assert message.startswith(place)
    assert found in message
    assert "secret" not in message


def test_a_million_bad_parts_are_one_error() -> None:
    with pytest.raises(api.PredictionError) as caught:
        api.parse_prediction(content([0] * 1_000_000))
    assert len(str(caught.value)) < 200


class Serving:
    """As much of `OpenAIServingChat` as the wrapper touches."""

    def __init__(self, method: str = "custom_class", limit: int = 64) -> None:
        vllm_config = config(max_model_len=limit)
        vllm_config.speculative_config.method = method
        self.engine_client = SimpleNamespace(vllm_config=vllm_config)
        self.renderer = self
        self.tokenised: list[str] = []

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: int) -> dict[str, list[int]]:
        self.tokenised.append(prompt["prompt"])
        return {"prompt_token_ids": [ord(c) for c in prompt["prompt"]][:params]}

    @staticmethod
    def create_error_response(message: str, param: str | None = None) -> Any:
        return ("error", message, param)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        return ("served", request.vllm_xargs, raw_request)


def call(serving: Serving, prediction: Any, **fields: Any) -> Any:
    request = SimpleNamespace(
        model_extra={"prediction": prediction}, vllm_xargs=None, use_beam_search=False, request_id="r"
    )
    for name, value in fields.items():
        setattr(request, name, value)
    wrapped = api.wrap_create_chat_completion(Serving.create_chat_completion)
    return asyncio.run(wrapped(serving, request, "raw"))


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "tokenize_params", lambda limit: limit + 1)
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    monkeypatch.delenv("GPU_ALIGN_MAX_PREDICTION_TOKENS", raising=False)


def test_a_prediction_travels_in_vllm_xargs() -> None:
    status, xargs, raw = call(Serving(), content("ab"), vllm_xargs={"mine": 1})
    assert (status, raw) == ("served", "raw")
    assert xargs == {"mine": 1, **PredictedOutputParams(token_ids=[97, 98]).to_extra_args()}


@pytest.mark.parametrize("nothing", [None, content(""), content([])])
def test_nothing_predicted_is_nothing_changed(nothing: Any) -> None:
    serving = Serving()
    assert call(serving, nothing) == ("served", None, "raw")
    assert serving.tokenised == []


def test_requests_without_extra_fields_pass() -> None:
    assert call(Serving(), None, model_extra=None) == ("served", None, "raw")


def test_a_malformed_prediction_is_an_error_response() -> None:
    status, message, param = call(Serving(), content(5))
    assert (status, param) == ("error", "prediction")
    assert "got number" in message


def test_beam_search_is_refused() -> None:
    assert call(Serving(), content("ab"), use_beam_search=True)[0] == "error"


def test_an_engine_that_drafts_otherwise_ignores_the_field() -> None:
    serving = Serving(method="ngram")
    assert call(serving, content(5)) == ("served", None, "raw")


def test_the_plugin_off_ignores_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    assert call(Serving(), content(5)) == ("served", None, "raw")


def test_a_long_prediction_is_cut_with_a_warning(plugin_log: list[str]) -> None:
    _, xargs, _ = call(Serving(limit=4), content("abcdefgh"))
    assert xargs == PredictedOutputParams(token_ids=[97, 98, 99, 100]).to_extra_args()
    assert plugin_log == ["The prediction of request r was cut to 4 tokens"]


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
        ("custom_class", "vllm_integration.proposer.PredictedOutputs", True),
        ("custom_class", "another.Drafter", False),
        ("ngram", "ngram", False),
    ],
)
def test_whose_engine_it_is(method: str, model: str, ours: bool) -> None:
    vllm_config = config()
    vllm_config.speculative_config.method = method
    vllm_config.speculative_config.model = model
    assert inputs.drafts_predictions(vllm_config) is ours
    vllm_config.speculative_config = None
    assert inputs.drafts_predictions(vllm_config) is False


def test_params_of_other_requests_are_passed_on_as_they_are() -> None:
    seen: list[Any] = []

    class Processor:
        vllm_config = config()

        def process_inputs(self, request_id: str, prompt: Any, params: Any, *more: Any, **named: Any) -> None:
            seen.append((params, more, named))

    wrapped = inputs.wrap_process_inputs(Processor.process_inputs)
    for extra_args in (None, {}, {"other": 1}):
        params = SimpleNamespace(extra_args=extra_args)
        wrapped(Processor(), "r", "p", params, 1, priority=2)
        assert seen.pop() == (params, (1,), {"priority": 2})
        assert wire.KEY not in (extra_args or {})

"""Faults that one in an engine (`tests/vllm/test_extras.py`) does not reach: each costs drafts or counts and one
log line, and vLLM goes on. (The schedulers: `test_vllm_scheduling`.)"""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_align import Drafter
from tests.vllm_integration.fakes import FakeEngine, Step, config, message, sampling, v1_alone
from tests.vllm_integration.test_vllm_speculator import K, params_of, propose, speculators, write
from vllm_integration.frontend import inputs, middleware, prediction, usage
from vllm_integration.seams import guard
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DRAFTING
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker.proposer_v1 import PredictedOutputs

pytestmark = pytest.mark.usefixtures("plugin_on")


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRICT", "DEBUG_DIR", "DRAFT_WITHOUT_PREDICTION", "MAX_PREDICTION_TOKENS"):
        monkeypatch.delenv(f"GPU_ALIGN_{name}", raising=False)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected\nfault")


def break_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.setattr(owner, name, broken)


def test_drafting_goes_on_after_a_minute(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    """And at once after two faults. What the drafter knew of requests is given to it again."""
    clock = [0.0]
    monkeypatch.setattr(guard.time, "monotonic", lambda: clock[0])
    v1_alone(monkeypatch)
    engine = FakeEngine(PredictedOutputs(config()))
    text = list(range(10, 60))
    engine.submit("a", [1, 2], text, sampling(PredictedOutputParams(token_ids=text).to_extra_args()))
    for faults, seconds, drafts_in_between in ((2, 0.0, True), (3, 59.0, False), (0, 2.0, True)):
        with monkeypatch.context() as patch:
            break_at(patch, Drafter, "propose")
            for _ in range(faults):
                engine.step()
                assert not engine.drafts["a"]
        clock[0] += seconds
        engine.step()
        engine.step()
        assert bool(engine.drafts["a"]) == drafts_in_between, (faults, seconds)
        assert (DRAFTING in engine.report.faults) is not drafts_in_between
    assert engine.written["a"] == text[: len(engine.written["a"])]
    assert "works again" in plugin_log[-1]


def test_v2_drafts_again_from_what_it_held(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    """On ranks that draft alike the minute is counted in steps."""
    from vllm_integration.worker import speculator as module

    monkeypatch.setattr(module, "PAUSE_STEPS", 5)
    speculator = speculators(monkeypatch)(0, 2)
    text = list(range(100, 130))
    speculator.add_request("r0", 0, 2, params_of(text))
    found = []
    for length in range(1, 12):
        write(speculator, 0, [7, 8, *text[:length]])
        with monkeypatch.context() as patch:
            if length <= 3:
                patch.setattr(speculator.drafter, "propose", lambda *_: [].index(1))  # the same on all ranks
            found.append(propose(speculator, [0]).tolist()[0][0] == text[length])
        if length == 5:  # in the pause one comes and one goes
            write(speculator, 1, [7, 8, 300])
            speculator.add_request("r1", 1, 2, params_of([300, 301, 302]))
            speculator.add_request("r2", 2, 2, params_of([300, 301, 302]))
            speculator.remove_slot(2)
    assert found == [False] * 7 + [True] * 4
    assert propose(speculator, [1]).tolist()[0][0] == 301
    assert guard.faults() == {}


@pytest.mark.parametrize("name", ["add", "propose"])
def test_v2_no_rank_goes_on_alone(name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    """Where ranks verify their own drafts, one without drafts beside others with them would write another text."""
    speculator = speculators(monkeypatch)(0, 2)
    write(speculator, 0, [7, 8, 100])
    if name == "propose":
        speculator.add_request("r0", 0, 2, params_of([100, 101]))
    break_at(monkeypatch, speculator.drafter, name)
    step = {
        "add": lambda: speculator.add_request("r0", 0, 2, params_of([100, 101])),
        "propose": lambda: propose(speculator, [0]),
    }[name]
    with pytest.raises(RuntimeError, match="injected"):
        step()
    # What comes from the arguments is the same on all ranks.
    monkeypatch.setattr(speculator.drafter, name, lambda *_, **__: [].index(1))
    speculator.add_request("r0", 0, 2, params_of([100, 101]))
    assert propose(speculator, [0]).shape == (1, K)


# The front end. An "original" is vLLM's function.
def test_usage_goes_on(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    collector = usage.collector
    for owner, name in (
        (collector, "follow"),
        (collector, "count"),
        (collector, "end"),
        (usage, "_take_messages"),
    ):
        plugin_log.clear()
        with monkeypatch.context() as patch:
            patch.setattr(prediction.counting, "_told", set())
            patch.setattr(usage, "engine_here", lambda: "an engine")
            break_at(patch, owner, name)
            for _ in range(3):
                request = SimpleNamespace(
                    request_id="r", sampling_params=SimpleNamespace(extra_args={wire.KEY: None})
                )
                output = SimpleNamespace(
                    request_id="r",
                    trace_headers={usage.HEADER: message([Step(1, 8, 8, 5)])},
                    new_token_ids=[1],
                )
                processor = SimpleNamespace(request_states={"r": None})
                assert usage.add_request(lambda self, request: 1, processor, request) == 1
                assert usage.process_outputs(lambda self, outputs: 2, processor, [output]) == 2
                assert usage.abort_requests(lambda self, ids: ["r"], processor, ["r"]) == ["r"]
        assert 1 <= len(plugin_log) <= 2, name
        assert all(re.match(r"gpu_align does not count .*: RuntimeError at ", line) for line in plugin_log)
        prediction.counting.succeeded()


@pytest.mark.parametrize("name", ["_completed", "_completed_events"])
def test_responses_go_on(name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    break_at(monkeypatch, middleware, name)
    body = b'{"choices":[],"usage":{"completion_tokens":1}}'
    for content_type in (b"application/json", b"text/event-stream"):
        got: list[Any] = []

        async def send(message: Any) -> None:
            got.append(message)  # noqa: B023

        async def respond() -> None:
            complete = middleware._completing(send, usage.HttpRequest(wire.Prediction()))
            headers = [(b"content-type", content_type)]  # noqa: B023
            await complete({"type": "http.response.start", "headers": headers})
            await complete({"type": "http.response.body", "body": b"data: " + body})

        asyncio.run(respond())
        assert [message.get("body") for message in got] == [None, b"data: " + body]
    assert 1 <= len(plugin_log) <= 2
    assert all(line.startswith("gpu_align does not count in this step: ") for line in plugin_log)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (prediction, "choices_of"),
        (middleware, "drafts_predictions"),
        (prediction, "_prediction"),
        (middleware, "take"),
        (middleware.Settings, "here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_endpoints_go_on(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    from tests.vllm_integration.fakes import Engine, taken

    break_at(monkeypatch, owner, name)
    document = {"vllm_xargs": {wire.KEY: [1], "memory": 0, "other": 1}}
    assert taken(Engine(), document) == (document, None)
    (line,) = plugin_log
    assert "RuntimeError" in line
    assert line.isprintable()


def test_the_offline_api_goes_on(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    sampling_params = pytest.importorskip("vllm.sampling_params")
    monkeypatch.setattr(inputs, "drafts_predictions", lambda _: True)
    processor = SimpleNamespace(vllm_config=None, renderer=SimpleNamespace(tokenizer=object()))
    extra_args = {**PredictedOutputParams(prediction="SECRET").to_extra_args(), "other": 1}
    params = sampling_params.SamplingParams(extra_args=extra_args)
    monkeypatch.setattr(inputs.Limits, "of", broken)
    given = inputs.process_inputs(lambda self, name, prompt, params: params, processor, "r", "p", params)
    assert given.extra_args == {"other": 1}
    assert params.extra_args == extra_args
    assert plugin_log == ["Request r is served without its prediction: RuntimeError"]

"""A fault is injected into each place of ours that vLLM calls: it costs drafts, counts or the log, one log line is
written, and the engine goes on. (The schedulers: `test_vllm_scheduling`.)"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_align import Drafter
from tests.vllm_integration.fakes import FakeEngine, Step, config, message, sampling, v1_alone
from tests.vllm_integration.test_vllm_speculator import K, params_of, propose, speculators, write
from vllm_integration.frontend import inputs, middleware, prediction, usage
from vllm_integration.seams import guard
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import reports
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DRAFTING
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker import proposer_v1, request_drafter
from vllm_integration.worker import requests as request_state
from vllm_integration.worker import step_log as debug_log
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


def named(value: Any) -> str | None:
    """The name of a place in a test's id."""
    if not isinstance(value, tuple):
        return None
    return f"{getattr(value[0], '__name__', value[0])}.{value[1]}"


LOG = [
    (debug_log.LoggedRequest, "record"),
    (request_drafter.RequestDrafter, "explainer_of"),
    (debug_log.DebugLog, "_log_of"),
    (debug_log.step_log, "dump"),
]

# What is broken, and what that costs: all drafts for good ("start") or for a minute ("pause"), those of a request,
# or none.
V1 = [
    ((request_drafter, "Drafter"), "start"),
    ((request_drafter, "load_recipes"), ""),
    ((request_drafter, "open_request"), "request"),
    ((proposer_v1, "_Request"), "request"),
    ((Drafter, "remove"), ""),
    ((Drafter, "propose"), "pause"),
    ((Drafter, "add"), "request"),
    ((request_state.StopRule, "room"), "request"),
    ((PredictedOutputs, "_draft"), "pause"),
    ((proposer_v1, "StepDrafts"), "pause"),
    ((request_drafter, "open_log"), ""),
    *[(place, "") for place in LOG],
]


@pytest.mark.parametrize(("place", "costs"), V1, ids=named)
def test_v1_goes_on(
    place: tuple[Any, str],
    costs: str,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
    tmp_path: Path,
) -> None:
    v1_alone(monkeypatch)
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path / "logs"))
    break_at(monkeypatch, *place)
    ours = PredictedOutputs(config())
    ours.load_model()
    engine = FakeEngine(ours)
    texts = {"a": list(range(10, 30)), "b": list(range(40, 60))}
    for name, text in texts.items():
        params = sampling(PredictedOutputParams(token_ids=text).to_extra_args())
        engine.submit(name, [1, 2], text, params)
    done: tuple[str, ...] = ()
    for _ in range(40):
        engine.step(finished=done)
        assert place[1] != "add" or not ours.slots, "what the drafter refused has none"
        done = tuple(name for name in engine.rows if engine.written[name] == texts[name])
        if not engine.rows:
            break
    assert {name: engine.written[name] for name in texts} == texts
    check_log(plugin_log, place, costs)
    assert (DRAFTING in engine.report.faults) == (costs in ("start", "pause")), "so that there are no slots"
    assert (
        sum(usage.accepted for usage in engine.usage.values()) == 0
        if costs
        else sum(usage.accepted for usage in engine.usage.values()) > 20
    )


def check_log(lines: list[str], place: tuple[Any, str], costs: str) -> None:
    """Where the fault was and of which type, and nothing of its message."""
    assert not any("injected" in line for line in lines)
    told = [line for line in lines if "RuntimeError at " in line]
    expected = {"pause": [" in this step: ", " for 60 s: "], "start": ["drafts nothing any more: "]}
    if place in LOG or place[1] in ("open_log", "stop_rule", "Proposal"):
        expected = {"": ["writes no step logs any more: "]}
    if place[1] == "load_recipes":
        expected = {"": ["drafts without recipes any more: "]}
    words = expected.get(costs, [""] * (2 if place[1] == "add" else 1))
    assert [word in line for word, line in zip(words, told, strict=True)] == [True] * len(words), told
    assert all(re.search(r"RuntimeError at tests/\S+py:\d+ broken, \S+\.py:\d+ \S+", line) for line in told)


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


@pytest.mark.parametrize("place", [(PredictedOutputs, "report"), (proposer_v1, "attach")])
def test_v1_an_output_leaves_without_its_report(
    place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    v1_alone(monkeypatch)
    runner = SimpleNamespace(drafter=PredictedOutputs(config()))
    break_at(monkeypatch, *place)
    for number in range(4):
        runner.drafter.requests["r"] = object()  # somebody is drafted for
        sample_tokens = wrapped_by(request_drafter.sample_tokens)(lambda self, sampled: sampled)
        output = SimpleNamespace()
        assert sample_tokens(runner, output) is output
        report = reports.take(output)
        assert (report is not None and "draft reports" in report.faults) == (number >= 2)
    assert [" in this step: " in line for line in plugin_log] == [True, False]
    assert " reports no drafts for 60 s: RuntimeError at " in plugin_log[1]


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


def test_a_count_that_fails_leaves_the_400(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    break_at(monkeypatch, prediction.metrics, "count_refused")
    prediction.count_refused("bytes")
    prediction.count_refused("bytes")
    assert ["RuntimeError at " in line for line in plugin_log] == [True]


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


def test_a_server_starts_that_cannot_say_what_it_is(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    break_at(monkeypatch, middleware.status, "announce")
    app = SimpleNamespace(user_middleware=[])
    assert middleware.init_entrypoints_middleware(lambda *args: "done", None, app) == "done"
    assert (len(plugin_log), len(app.user_middleware)) == (1, 1)

"""What vLLM prints of its engine core holds no token of a prediction: none of its ids, and no draft from it."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest
from vllm.logging_utils import dump_input
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.vllm_integration.fakes import config
from vllm_integration.config.settings import Settings
from vllm_integration.scheduler import schedulers
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.worker.requests import Refusals, open_request

IDS = [3141, 5926, 5358, 9793]
FOUND = re.compile("|".join([*map(str, IDS), re.escape(repr(wire.encode_token_ids("", IDS))[2:10])]))
SCHEDULERS = ["PredictedOutputsV1Scheduler", "PredictedOutputsScheduler", "PredictedOutputsAsyncScheduler"]


def arrived(prediction: Any, cache_salt: str | None = None, extra: dict[str, Any] | None = None) -> Request:
    """A request as the engine core gets it: by vLLM's MessagePack, which knows no `wire.Prediction`."""
    extra_args = {**(extra or {}), **({} if prediction is None else {wire.KEY: prediction})}
    params = SamplingParams(max_tokens=7, extra_args=extra_args or None)
    sent = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, cache_salt, None)
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
    return Request.from_engine_core_request(received, None)


def added(monkeypatch: pytest.MonkeyPatch, scheduler: str, request: Request) -> Request:
    """What vLLM's scheduler is given by one of ours."""
    given: list[Request] = []
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: given.append(request))
    ours = object.__new__(getattr(schedulers, scheduler))
    ours.vllm_config = config()
    ours._begin(Settings())
    ours.add_request(request)
    assert given == [request]
    return request


def plan_of(request: Request, drafts: list[int]) -> SchedulerOutput:
    new = NewRequestData.from_request(request, ([0],), [1, 2])
    cached = CachedRequestData.make_empty()
    return SchedulerOutput([new], cached, {"r": 5}, 5, {"r": drafts} if drafts else {}, {}, [0], set(), [])


def prediction() -> wire.Prediction:
    return wire.Prediction(token_ids=wire.encode_token_ids("", IDS))


def dump(plan: SchedulerOutput, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What vLLM logs when a step of this plan fails."""
    lines: list[str] = []
    theirs = inspect.unwrap(dump_input._dump_engine_exception)  # a test before may have installed ours
    wrapped = wrapped_by(schedulers.dump_engine_exception)(theirs)
    with monkeypatch.context() as patch:
        patch.setattr(dump_input.logger, "error", lambda text, *args: lines.append(text % args))
        patch.setattr(dump_input, "_dump_engine_exception", wrapped)
        dump_input.dump_engine_exception(vllm_config, plan, None)
    return "".join(lines[1:])


def test_the_search_would_find_it() -> None:
    dumped = dump_input.prepare_object_to_dump(plan_of(arrived(prediction()), []))
    assert FOUND.search(dumped)
    assert FOUND.search(dump_input.prepare_object_to_dump(plan_of(arrived(None), IDS)))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_request_of_our_schedulers_prints_a_size(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own dump; new requests, and on V2 those that resume, which are sent again as new ones."""
    request = added(monkeypatch, scheduler, arrived(prediction(), extra={"other": 5}))
    plan = plan_of(request, [])
    dumped = dump_input.prepare_object_to_dump(plan)
    assert not FOUND.search(dumped)
    assert f"'{wire.KEY}': Prediction(4 tokens)" in dumped
    assert "'other': 5" in dumped
    for printed in (repr(request.sampling_params), repr(plan), str(vars(request))):
        assert not FOUND.search(printed)
    # It reaches the workers whole.
    there = pickle.loads(pickle.dumps(plan)).scheduled_new_reqs[0].sampling_params
    content = open_request("r", there, Refusals(), vocab_size=10_000, capacity=9)
    assert content is not None
    assert content.token_ids.tolist() == IDS
    assert there.max_tokens == 7


def test_draft_tokens_print_as_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    request = arrived(prediction())
    plan = plan_of(request, IDS)
    dumped = dump(plan, config(), monkeypatch)
    assert not FOUND.search(dumped)
    assert "scheduled_spec_decode_tokens={r: '4 tokens'}" in dumped
    assert "Prediction(4 tokens)" in dumped, "also where another scheduler is used than ours"
    assert plan == plan_of(request, IDS), "a copy is printed"


@pytest.mark.parametrize("value", [IDS, {"token_ids": [*IDS, "a"]}, {"x": IDS}, [*IDS, -1], str(IDS)])
def test_whatever_arrives_is_not_printed(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = added(monkeypatch, SCHEDULERS[0], arrived(value))
    assert not FOUND.search(repr(request.sampling_params))


def test_a_failure_costs_the_prediction(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    monkeypatch.setattr(wire, "read", lambda *_: 1 / 0)
    request = added(monkeypatch, SCHEDULERS[0], arrived(prediction(), extra={"other": 5}))
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {"other": 5}
    (line,) = plugin_log
    assert line.startswith("gpu_align cannot pass a prediction on: ZeroDivisionError at ")


def test_predictions_are_shared_within_one_cache_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    def key_of(cache_salt: str | None, sent: Any = None) -> Any:
        request = added(monkeypatch, SCHEDULERS[0], arrived(sent or prediction(), cache_salt))
        there = pickle.loads(pickle.dumps(request.sampling_params))
        content = open_request("req-1", there, Refusals(), vocab_size=10_000, capacity=9)
        return content and content.sharing_key

    assert key_of("one") == key_of("one") != key_of("two")
    assert key_of(None) == key_of(None) != key_of("one")
    assert key_of("") != key_of(None)
    # Nobody but the scheduler says who may share.
    forged = wire.Prediction(prediction().token_ids, sharing_key=key_of("one"))
    assert key_of("two", forged) == key_of("two")
    # Under another scheduler nobody says who: a request shares with itself alone.
    forging = {**vars(forged), "kind": 0}
    for sent in (prediction(), forging):
        content = open_request(
            "r", arrived(sent, "one").sampling_params, Refusals(), vocab_size=10_000, capacity=9
        )
        assert content is not None
        assert content.sharing_key is None
    assert b"one" not in pickle.dumps(key_of("one"))

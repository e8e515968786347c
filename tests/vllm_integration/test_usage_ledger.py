"""The ledger and the collector: how the parts of a step meet, and every way in which a request can end.

What responses of each endpoint then show is recounted by the campaign's `counts`.
"""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from usage_harness import Step, message

from vllm_integration.config import in_use
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import usage as collector
from vllm_integration.frontend import usage as response_usage
from vllm_integration.scheduler.draft_budget import DraftedRequests
from vllm_integration.scheduler.verification_ledger import VerificationLedger
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import REFUSALS, DraftReport, StepDrafts
from vllm_integration.wire.steps import HEADER, decode, encode

PREDICTION, CONTEXT = 1, 2


class Message(NamedTuple):
    """What travels with one output, decoded."""

    steps: list[Step]
    own: bool
    refused: str = ""
    off: bool = False


def read(text: str) -> Message:
    found = decode([text])
    steps = [Step(*numbers) for numbers in zip(*(column.tolist() for column in found.steps), strict=True)]
    assert found.counts.tolist() == [len(steps)]
    return Message(steps, bool(found.own[0]), REFUSALS[int(found.refused[0])], bool(found.off[0]))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("steps", [[], [Step(1, 16, 12, 3)], [Step(0, 0, 0, 0), Step(2, 1000, 1, 1)]])
def test_a_message_survives_the_way(steps: list[Step], own: bool, refused: str, off: bool) -> None:
    expected = Message(steps, own and bool(steps), refused, off)
    assert read(message(steps, own=expected.own, refused=REFUSALS.index(refused), off=off)) == expected


def test_messages_of_a_batch_are_read_together() -> None:
    steps = [Step(1, 8, 8, 5), Step(0, 0, 0, 0), Step(3, 4, 2, 1)]
    texts = [message(steps[:2]), message([], own=False), message(steps[2:], refused=2)]
    found = decode(texts)
    assert np.stack(found.steps, axis=1).tolist() == [list(step) for step in steps]
    assert (found.counts.tolist(), found.own.tolist(), found.refused.tolist()) == (
        [2, 0, 1],
        [1, 0, 1],
        [0, 0, 2],
    )
    assert encode(found.steps, np.array([0, 0, 2]), found.own, found.refused) == texts


@pytest.mark.parametrize("text", ["", "1", "123", "12345678", "1,2,3,4,5", "12345678" + chr(0xD800) * 2])
def test_another_text_is_no_message(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode([message([Step(1, 2, 2, 2)]), text])


class Engine:
    """A scheduler around the ledger: requests with their tokens, steps with their slots and samples."""

    def __init__(self, *, everybody: bool = False) -> None:
        self.drafted = DraftedRequests(everybody)
        self.ledger = VerificationLedger(self.drafted)
        self.requests: dict[str, Any] = {}

    def add(self, req_id: str, num_tokens: int = 10, *, predicted: bool = True) -> None:
        params = SimpleNamespace(extra_args={wire.KEY: [1]} if predicted else None)
        self.requests[req_id] = SimpleNamespace(num_tokens=num_tokens, sampling_params=params)

    def step(
        self,
        slots: int = 0,
        sampled: int = 1,
        *,
        kept: int | None = None,
        report: DraftReport | None = None,
        invalid: int = 0,
        req_id: str = "r",
    ) -> Message | None:
        """What travels with the output of one step of one request."""
        report = DraftReport() if report is None else report
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens={req_id: [-1] * slots} if slots else {},
            num_invalid_spec_tokens={req_id: invalid} if invalid else None,
        )
        output = SimpleNamespace(
            req_ids=[req_id], sampled_token_ids=[[5] * sampled], req_id_to_index={req_id: 0}
        )
        begun = self.ledger.begin(self.requests, scheduled, output, report.trimmed)
        self.drafted.take(report)
        kept = sampled if kept is None else kept
        if req_id in self.requests:
            self.requests[req_id].num_tokens += kept
        sent = SimpleNamespace(
            request_id=req_id, new_token_ids=[5] * kept, trace_headers={"traceparent": "t"}
        )
        self.ledger.settle(begun, [sent] if sampled else [])
        assert sent.trace_headers["traceparent"] == "t"
        return read(sent.trace_headers[HEADER]) if HEADER in sent.trace_headers else None

    def forget_the_gone(self) -> None:
        self.ledger.forget(self.drafted.keep_only(self.requests))


def drafts(position: int, length: int, source: int = PREDICTION, req_id: str = "r") -> StepDrafts:
    columns = ([position], [length], [source if length else 0])
    return StepDrafts([req_id], 0, *map(np.array, columns), np.zeros((1, 0), dtype=np.uint8))


def drafted(position: int, length: int, source: int = PREDICTION, req_id: str = "r") -> DraftReport:
    return DraftReport([drafts(position, length, source, req_id)])


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.add("r")
    return engine


CLEAR = Step(0, 0, 0, 0)
#: A request's steps: slots, sampled, what its worker reports with them; and what travels then, None where the
#: step waits for its report. `(slots, sampled, kept)` where not all of them are output.
SCENARIOS: dict[str, list[tuple[tuple[int, ...], list[StepDrafts], list[Step] | None]]] = {
    **{
        name: [
            ((0, 1), [drafts(11, length)], [CLEAR]),
            (given, [], [Step(PREDICTION if length else 0, length, *counted)]),
        ]
        for name, length, given, counted in (
            ("all accepted", 8, (8, 9), (8, 8)),
            ("none", 8, (8, 1), (8, 0)),
            ("padding beyond the draft was right by chance: nobody proposed it", 3, (8, 9), (3, 3)),
            ("fewer slots than drafts", 8, (3, 4), (3, 3)),
            ("no slots at all", 8, (0, 1), (0, 0)),
            ("slots for a draft that was empty", 0, (8, 5), (0, 0)),
            ("the output ended inside the drafts", 8, (8, 9, 4), (8, 4)),
            ("the output ended with the last of the drafts", 8, (8, 9, 8), (8, 8)),
        )
    },
    "a report that comes late is waited for": [
        ((0, 1), [], [CLEAR]),
        ((4, 3), [], None),
        ((4, 1), [], None),
        (
            (4, 5),
            [drafts(11, 4), drafts(14, 2, CONTEXT), drafts(15, 4)],
            [Step(1, 4, 4, 2), Step(2, 2, 2, 0), Step(1, 4, 4, 4)],
        ),
    ],
    # vLLM pads the first step of a cached prompt to K slots.
    "a draft that was never made is not waited for for ever": [
        ((4, 2), [], None),
        ((4, 1), [drafts(12, 4)], [CLEAR, Step(1, 4, 4, 0)]),
    ],
    # It comes back, its drafts lost: a plain step. What it was proposed then is another draft at another place.
    "a preempted request is counted by what was made at its tokens": [
        ((0, 1), [drafts(11, 8)], [CLEAR]),
        ((0, 1), [drafts(12, 5, CONTEXT)], [Step(1, 8, 0, 0)]),
        ((5, 6), [], [Step(2, 5, 5, 5)]),
    ],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_travels_with_the_steps_of_a_request(engine: Engine, name: str) -> None:
    for (slots, sampled, *kept), reported, steps in SCENARIOS[name]:
        told = engine.step(slots, sampled, kept=kept[0] if kept else None, report=DraftReport(reported))
        assert told == Message(steps or [], own=steps is not None)
    assert len(engine.ledger) == 0


def test_what_a_grammar_or_the_device_took_away_was_not_verified(engine: Engine) -> None:
    engine.step(report=drafted(11, 8))
    assert engine.step(8, 3, invalid=3) == Message([Step(1, 8, 5, 2)], own=True)
    engine.drafted.take(drafted(14, 8))
    trimmed = DraftReport(trimmed={"r": 2})
    assert engine.step(8, 3, report=trimmed) == Message([Step(1, 8, 2, 2)], own=True)


def test_a_step_waits_for_an_output_of_its_own_request(engine: Engine) -> None:
    """It may be preempted when its draft is reported."""
    assert engine.step(4, 3) == Message([], own=False)
    engine.add("other")
    assert engine.step(req_id="other", report=drafted(10, 4)) == Message([CLEAR], own=True)
    assert engine.step() == Message([Step(1, 4, 4, 2), CLEAR], own=True)


def test_requests_that_nobody_drafts_for_and_those_that_are_gone_are_not_counted(engine: Engine) -> None:
    engine.add("plain", predicted=False)
    assert engine.step(req_id="plain") is None
    assert engine.step(8, 4, req_id="aborted") is None  # not in `requests` any more
    engine.add("chunk")
    assert engine.step(0, 0, req_id="chunk") is None  # still prefilling
    everybody = Engine(everybody=True)
    everybody.add("plain", predicted=False)
    assert everybody.step(req_id="plain") is not None
    engine.step(report=drafted(11, 8))
    # An output of one that a connector has failed, in a step without any other.
    nothing = SimpleNamespace(scheduled_spec_decode_tokens={}, num_invalid_spec_tokens=None)
    output = SimpleNamespace(req_ids=[], sampled_token_ids=[], req_id_to_index={})
    sent = SimpleNamespace(request_id="r", new_token_ids=[], trace_headers=None)
    engine.ledger.settle(engine.ledger.begin(engine.requests, nothing, output, {}), [sent])
    assert sent.trace_headers is None
    engine.requests.clear()  # aborted while its step runs
    assert engine.step(8, 4) is None


def test_nothing_is_kept_of_requests_that_are_gone(engine: Engine) -> None:
    for index in range(10_000):
        req_id = f"r{index}"
        engine.add(req_id)
        engine.step(4, 1, req_id=req_id, report=drafted(99, 3, req_id=req_id))
        del engine.requests[req_id]
        engine.forget_the_gone()
        assert len(engine.drafted) + len(engine.ledger) == 0
    assert len(engine.drafted.table) == 64


def test_a_refusal_travels_once(engine: Engine) -> None:
    told = engine.step(report=DraftReport(refused={"r": "dropped"}))
    assert told is not None
    assert told.refused == "dropped"
    assert engine.step() == Message([Step(0, 0, 0, 0)], own=True)


def test_a_step_of_many_requests_is_settled_as_each_of_them_alone() -> None:
    """Whatever their number and order: each output gets its own request's step, and a table that has grown keeps
    what it held."""
    draw = random.Random(0)
    together, alone = Engine(), Engine()
    req_ids = [f"r{i}" for i in range(200)]
    for i, req_id in enumerate(req_ids):
        for each in (together, alone):
            each.add(req_id, predicted=i % 7 > 0)
    found, expected = [], []
    pending: dict[str, DraftReport] = {}
    for _ in range(6):
        batch = draw.sample(req_ids, draw.randrange(1, 200))
        steps = {}
        for req_id in batch:
            slots, sampled = draw.randrange(5), draw.randrange(4)
            kept = draw.randrange(sampled + 1) if draw.random() < 0.1 else sampled
            steps[req_id] = slots, sampled, kept, pending.pop(req_id, DraftReport())
        for req_id, (slots, sampled, kept, report) in steps.items():
            expected.append((req_id, alone.step(slots, sampled, kept=kept, req_id=req_id, report=report)))
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens={
                req_id: [-1] * step[0] for req_id, step in steps.items() if step[0]
            },
            num_invalid_spec_tokens=None,
        )
        output = SimpleNamespace(
            req_ids=batch,
            req_id_to_index={req_id: i for i, req_id in enumerate(batch)},
            sampled_token_ids=[[5] * steps[req_id][1] for req_id in batch],
        )
        begun = together.ledger.begin(together.requests, scheduled, output, {})
        together.drafted.take(DraftReport([drafts for step in steps.values() for drafts in step[3].drafts]))
        outputs = []
        for req_id in draw.sample(batch, len(batch)):
            kept = steps[req_id][2]
            together.requests[req_id].num_tokens += kept
            outputs.append(SimpleNamespace(request_id=req_id, new_token_ids=[5] * kept, trace_headers=None))
        together.ledger.settle(begun, outputs)
        for each in outputs:
            told = each.trace_headers and read(each.trace_headers[HEADER])
            found.append((each.request_id, told))
            if draw.random() < 0.8:
                position = together.requests[each.request_id].num_tokens
                made = drafted(position, draw.randrange(6), draw.randrange(1, 4), each.request_id)
                pending[each.request_id] = made
    assert sorted(found, key=lambda told: told[0]) == sorted(expected, key=lambda told: told[0])
    assert len(together.drafted.table) > 64
    assert len(together.ledger) == len(alone.ledger) > 0
    assert {told.own for _, told in found if told} == {True, False}


def test_what_waits_of_a_request_that_is_gone_goes_with_it(engine: Engine) -> None:
    engine.step(4, 1)
    assert len(engine.ledger) == 1
    engine.requests.clear()
    engine.forget_the_gone()
    assert len(engine.ledger) == 0
    engine.add("another")  # in the same row
    told = drafted(10, 4, req_id="another")
    assert engine.step(req_id="another", report=told) == Message([Step(1, 4, 0, 0)], own=True)


def test_where_tokens_were_taken_back_the_newest_draft_counts(engine: Engine) -> None:
    engine.step(report=drafted(11, 8))
    engine.step(8, 4, report=drafted(15, 8))
    engine.requests["r"].num_tokens = 11  # a failed transfer
    engine.drafted.take(drafted(11, 3, CONTEXT))
    assert engine.step(8, 4) == Message([Step(2, 3, 3, 3)], own=True)


def test_nothing_waits_for_a_worker_that_drafts_no_more(engine: Engine) -> None:
    assert engine.step(4, 1) == Message([], own=False)
    off = engine.step(4, 2, report=DraftReport(off=True))
    assert off == Message([Step(0, 0, 0, 0)] * 2, own=True, off=True)
    assert engine.step() == Message([Step(0, 0, 0, 0)], own=True, off=True), "whichever front end hears it"
    assert len(engine.ledger) == 0


# --- the front end ---------------------------------------------------------------------------------------


class FrontEnd:
    """vLLM's `OutputProcessor` as far as it matters, with our wrappers on it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.headers_seen: list[Any] = []

    @wrapped_by(collector.add_request)
    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = request

    @wrapped_by(collector.process_outputs)
    def process_outputs(self, outputs: Any) -> None:
        for output in outputs:
            self.headers_seen.append(output.trace_headers)
            if output.request_id not in self.request_states:
                continue
            if output.finished:
                del self.request_states[output.request_id]

    @wrapped_by(collector.abort_requests)
    def abort_requests(self, request_ids: Any) -> list[str]:
        return [req_id for req_id in request_ids if self.request_states.pop(req_id, None)]

    def start(self, req_id: str, http_request_id: str | None) -> None:
        prediction = wire.Prediction(token_ids=b"\1\0\0\0" * 7, http_request_id=http_request_id)
        params = SimpleNamespace(extra_args={wire.KEY: prediction})
        self.add_request(SimpleNamespace(request_id=req_id, sampling_params=params))

    def output(self, req_id: str, *steps: Step, tokens: int = 1, finished: bool = False) -> None:
        headers = {"traceparent": "t", HEADER: message(steps)}
        self.process_outputs(
            [
                SimpleNamespace(
                    request_id=req_id,
                    new_token_ids=[5] * tokens,
                    trace_headers=headers,
                    finished=finished,
                )
            ]
        )


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    monkeypatch.setattr(collector, "collector", collector.Collector())
    monkeypatch.setattr(response_usage, "collector", collector.collector)
    monkeypatch.setattr(in_use, "_facts", in_use.EngineFacts(8, "V2"))
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    monkeypatch.setattr(response_usage, "_settings", Settings)
    return FrontEnd()


def test_choices_of_one_request_are_added_up(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int | None] = []
    monkeypatch.setattr(collector.metrics, "count_request", counted.append)
    for req_id in ("0_a", "1_a"):
        front.start(req_id, "http")
        assert len(counted) == 1
    front.output("0_a", Step(1, 8, 8, 5), tokens=6)
    front.output("1_a", Step(2, 4, 4, 4), tokens=5, finished=True)
    front.output("0_a", Step(1, 3, 3, 0), finished=True)
    usage = collector.collector.take("http")
    assert usage is not None
    assert usage.of_prediction == (5, 6)
    assert (usage.steps, usage.output_tokens, usage.accepted_by[CONTEXT]) == (3, 12, 4)
    assert collector.collector.take("http") is None
    assert not collector.collector.requests
    front.start("2_a", "late")
    front.output("2_a", Step(0, 0, 0, 0), finished=True)
    assert list(collector.collector._ended) == ["late"]
    front.start("3_a", "late")  # one more choice, when the others have ended
    assert not collector.collector._ended


def test_tracing_sees_the_headers_of_the_client(front: FrontEnd) -> None:
    front.start("a", "http")
    front.output("a", Step(0, 0, 0, 0))
    assert front.headers_seen == [{"traceparent": "t"}]
    output = SimpleNamespace(
        request_id="a", new_token_ids=[5], trace_headers={HEADER: message([Step(0, 0, 0, 0)])}, finished=True
    )
    front.process_outputs([output])
    assert front.headers_seen[1] is None


def test_ten_thousand_requests_leave_nothing(front: FrontEnd) -> None:
    """Finished and answered, finished and never asked for, aborted before and after the first token."""
    draw = random.Random(0)
    for index in range(10_000):
        req_id, name = f"r{index}", f"t{index}" if index % 5 else None
        front.start(req_id, name)
        kind = draw.randrange(4)
        if kind:
            front.output(req_id, Step(0, 0, 0, 0), finished=kind > 1)
        if kind < 2:
            front.abort_requests([req_id])
        elif kind == 2 and name is not None:
            assert collector.collector.take(name) is not None
    assert not collector.collector.requests
    assert len(collector.collector.http_requests) == len(collector.collector._ended) <= 1000


def test_a_stream_whose_client_goes_away_leaves_nothing(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    async def events() -> Any:
        try:
            while True:
                yield 'data: {"choices":[{}]}\n\n'
        finally:
            closed.append(True)

    async def client() -> None:
        stream = response_usage.with_usage(events(), "http")
        await anext(stream)
        await stream.aclose()

    front.start("a", "http")
    front.output("a", Step(0, 0, 0, 0))
    asyncio.run(client())
    front.abort_requests(["a"])
    monkeypatch.setattr(collector.metrics, "count_steps", None)
    front.output("a", Step(1, 8, 8, 8))  # nobody will read what it did since then
    assert closed == [True]
    assert not collector.collector.http_requests
    assert not collector.collector.requests


# --- responses -------------------------------------------------------------------------------------------


def streamed(*events: Any) -> list[Any]:
    """What becomes of the events of a stream."""

    async def emit() -> Any:
        for event in events:
            yield event

    async def collect() -> list[Any]:
        return [event async for event in response_usage.with_usage(emit(), "http")]

    return asyncio.run(collect())


def test_only_the_last_usage_of_a_stream_is_completed(front: FrontEnd) -> None:
    front.start("a", "http")
    for step in (Step(0, 0, 0, 0), Step(1, 8, 8, 5), Step(2, 2, 2, 1)):
        front.output("a", step, tokens=step.accepted + 1)
    usage = '"usage":{"prompt_tokens":10,"total_tokens":19,"completion_tokens":9}'
    text = r'{"content":"\"usage\":{ \"choices\":[] é \ud83d\ude00"}'
    chunks = [
        f'data: {{"id":"x","choices":[{{"delta":{text}}}],{usage}}}\n\n',
        f'data: {{"id":"x","object":"chunk","choices":[],{usage},"model":"é"}}\n\n',
        "data: [DONE]\n\n",
    ]
    events = streamed(*chunks)
    assert [events[0], events[2]] == [chunks[0], chunks[2]]
    last = json.loads(events[1].removeprefix("data: "))
    assert last["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 3,
    }
    del last["usage"]["completion_tokens_details"]
    assert last == json.loads(chunks[1].removeprefix("data: "))
    assert events[1].endswith("}\n\n")
    assert not collector.collector.http_requests


@pytest.mark.parametrize("reported", [True, False])
def test_an_error_and_what_the_engine_did_not_report_stay_as_they_are(
    front: FrontEnd, reported: bool
) -> None:
    front.start("a", "http")
    if reported:
        front.output("a", Step(1, 8, 8, 5), finished=True)
    models = pytest.importorskip("vllm.entrypoints.serve.engine.protocol")
    error = models.ErrorResponse(error={"message": "no", "type": "BadRequestError", "code": 400})
    assert response_usage.with_usage(error, "http") is error
    shown = models.UsageInfo(completion_tokens=9, total_tokens=19)
    before = shown.model_dump()
    response_usage.with_usage(SimpleNamespace(usage=shown), "http")
    assert shown.model_dump() == before

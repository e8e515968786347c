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
from vllm_integration.frontend import usage as frontend
from vllm_integration.scheduler.draft_budget import DraftedRequests
from vllm_integration.scheduler.verification_ledger import VerificationLedger
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DRAFT_MODEL, GRAPHS, REFUSALS, DraftReport, StepDrafts
from vllm_integration.wire.steps import HEADER, decode, encode

PREDICTION, CONTEXT = 1, 2


class Message(NamedTuple):
    """What travels with one output, decoded."""

    steps: list[Step]
    own: bool
    refused: str = ""
    off: bool = False
    graphs: int = 0


def read(text: str) -> Message:
    found = decode([text])
    steps = [Step(*numbers) for numbers in zip(*(column.tolist() for column in found.steps), strict=True)]
    assert found.counts.tolist() == [len(steps)]
    return Message(
        steps, bool(found.own[0]), REFUSALS[int(found.refused[0])], bool(found.off[0]), int(found.graphs[0])
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("graphs", [0, len(GRAPHS) - 1])
@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("steps", [[], [Step(1, 16, 12, 3)], [Step(0, 0, 0, 0), Step(2, 1000, 1, 1)]])
def test_a_message_survives_the_way(
    steps: list[Step], own: bool, refused: str, off: bool, graphs: int
) -> None:
    expected = Message(steps, own and bool(steps), refused, off, graphs)
    more = {"own": expected.own, "refused": REFUSALS.index(refused), "off": off, "graphs": graphs}
    assert read(message(steps, **more)) == expected


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


class Oracle:
    """One request, as `VerificationLedger` tells of it. drafts: (position, length, source), the newest first.
    is_theirs: the model's own drafter drafts for it, as much as was scheduled."""

    def __init__(self, is_theirs: bool) -> None:
        self.num_tokens, self.refused, self.is_theirs = 10, "", is_theirs
        self.drafts: list[tuple[int, int, int]] = []
        self.waiting: list[tuple[int, int, int, int]] = []

    def settle(self, slots: int, sampled: int, kept: int, off: bool) -> Message:
        """What travels with the output of a step."""
        steps: list[Step] = []
        own = False
        self.waiting.append((self.num_tokens, slots, sampled, kept))
        for step in list(self.waiting):
            position, slots, sampled, kept = step
            made = next((draft for draft in self.drafts if draft[0] == position), None)
            if self.is_theirs:
                made = position, max(0, slots), DRAFT_MODEL
            if made is None and slots > 0 and not off and all(draft[0] <= position for draft in self.drafts):
                continue
            _, length, source = made or (position, 0, 0)
            verified = max(0, min(slots, length))
            steps.append(Step(source, length, verified, min(sampled - 1, verified, kept)))
            self.waiting.remove(step)
            own = step[0] == self.num_tokens
        refused, self.refused = self.refused, ""
        return Message(steps, own, refused, off)


def drafts_of(made: dict[str, tuple[int, int, int]]) -> StepDrafts:
    columns = np.array(list(made.values())).reshape(-1, 3).T
    return StepDrafts(list(made), 0, *columns, np.zeros((len(made), 0), dtype=np.uint8))


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_settled_as_each_of_its_requests_alone(seed: int) -> None:
    """Reports are late, or never come; steps are of any size and order, and end inside their drafts; a grammar or
    the device takes slots away; tokens are taken back; requests come, are aborted while they run, and are gone;
    nobody, or the model's own drafter, drafts for some of them; the worker is turned off."""
    draw = random.Random(seed)
    size, everybody = draw.choice([3, 12, 200]), draw.random() < 0.2
    beside_model = seed % 4 == 1
    drafted = DraftedRequests(everybody, beside_model=beside_model)
    ledger = VerificationLedger(drafted)
    requests: dict[str, Any] = {}
    known: dict[str, Oracle] = {}
    late: list[dict[str, tuple[int, int, int]]] = [{}]
    off, graphs_told = False, 0
    for number in range(20):
        while len(requests) < size:
            name = f"{number}-{len(requests)}"
            predicted = draw.random() < 0.8
            params = SimpleNamespace(extra_args={wire.KEY: [1]} if predicted else None)
            requests[name] = SimpleNamespace(request_id=name, num_tokens=10, sampling_params=params)
            drafted.add(requests[name])
            if predicted or everybody or beside_model:
                known[name] = Oracle(is_theirs=not (predicted or everybody))
        batch = draw.sample(sorted(requests), draw.randrange(1, size + 1))
        slots = {name: draw.choice([0, 0, 1, 4]) for name in batch}
        sampled = {name: draw.randrange(slots[name] + 2) for name in batch}
        invalid = {name: draw.randrange(n + 1) for name, n in slots.items() if draw.random() < 0.2}
        trimmed = {name: draw.randrange(n + 1) for name, n in slots.items() if draw.random() < 0.2}
        if gone := [name for name in batch if draw.random() < 0.05]:
            for name in gone:  # aborted while the step runs
                del requests[name]
        plan = SimpleNamespace(
            scheduled_spec_decode_tokens={name: [-1] * n for name, n in slots.items() if n},
            num_invalid_spec_tokens=invalid or None,
        )
        index = {name: i for i, name in enumerate(batch)}
        tokens = [[5] * sampled[name] for name in batch]
        output = SimpleNamespace(req_ids=batch, req_id_to_index=index, sampled_token_ids=tokens)
        begun = ledger.begin(requests, plan, output, trimmed)
        now = late.pop(0) if draw.random() < 0.8 else {}
        now_off = number == 15 and seed % 3 == 0
        off |= now_off
        refused = {name: "cut" for name in batch if draw.random() < 0.1}
        graphs = 5 if now and number >= 3 else 0
        graphs_told = graphs or graphs_told
        drafted.off |= now_off
        drafted.take(DraftReport([drafts_of(now)] if now else [], {}, refused, graphs=graphs))
        for name, oracle in known.items():
            oracle.drafts = ([now[name]] if name in now else []) + oracle.drafts
            oracle.refused = refused.get(name, oracle.refused)
        outputs, expected = [], {}
        for name in draw.sample(batch, len(batch)):
            if name not in requests:
                continue
            kept = draw.randrange(sampled[name] + 1) if draw.random() < 0.1 else sampled[name]
            outputs.append(
                SimpleNamespace(request_id=name, new_token_ids=[5] * kept, trace_headers={"t": "p"})
            )
            if name in known and sampled[name]:
                left = min(slots[name] - invalid.get(name, 0), trimmed.get(name, slots[name]))
                settled = known[name].settle(left, sampled[name], kept, off)
                expected[name] = settled._replace(graphs=graphs_told)
            requests[name].num_tokens += kept
        # And one of a request that a connector has failed, which is not in the step.
        outputs.append(SimpleNamespace(request_id="failed", new_token_ids=[], trace_headers={"t": "p"}))
        ledger.settle(begun, outputs)
        found = {each.request_id: each.trace_headers for each in outputs if each.trace_headers.pop("t")}
        assert {name: read(headers[HEADER]) for name, headers in found.items() if headers} == expected
        if draw.random() < 0.1 and expected:  # a failed transfer
            requests[next(iter(expected))].num_tokens -= 1
        made = {}
        for name in batch:
            if name in requests and name in known and draw.random() < 0.7:
                position, length = requests[name].num_tokens, draw.randrange(6)
                made[name] = position, length, draw.randrange(1, 4) if length else 0
        late.append(made)
        for name in draw.sample(sorted(requests), size // 8):
            del requests[name]
        ledger.forget(drafted.keep_only(requests))
        known = {name: oracle for name, oracle in known.items() if name in requests}
        for name, oracle in known.items():
            oracle.num_tokens = requests[name].num_tokens
        assert len(ledger) == sum(len(oracle.waiting) for oracle in known.values())
        assert len(drafted) <= len(requests)
    assert len(drafted.table) <= max(64, 4 * size)
    requests.clear()
    ledger.forget(drafted.keep_only(requests))
    assert len(drafted) + len(ledger) == 0


# --- the front end ---------------------------------------------------------------------------------------


class FrontEnd:
    """vLLM's `OutputProcessor` as far as it matters, with our wrappers on it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.headers_seen: list[Any] = []

    @wrapped_by(frontend.add_request)
    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = request

    @wrapped_by(frontend.process_outputs)
    def process_outputs(self, outputs: Any) -> None:
        for output in outputs:
            self.headers_seen.append(output.trace_headers)
            if output.request_id not in self.request_states:
                continue
            if output.finished:
                del self.request_states[output.request_id]

    @wrapped_by(frontend.abort_requests)
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
    monkeypatch.setattr(frontend, "collector", frontend.Collector())
    monkeypatch.setattr(in_use, "_facts", in_use.EngineFacts(8, "V2", 4))
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    monkeypatch.setattr(frontend, "_settings", Settings)
    return FrontEnd()


def test_choices_of_one_request_are_added_up(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int | None] = []
    monkeypatch.setattr(frontend.metrics, "count_request", counted.append)
    for req_id in ("0_a", "1_a"):
        front.start(req_id, "http")
        assert len(counted) == 1
    front.output("0_a", Step(1, 8, 8, 5), tokens=6)
    front.output("1_a", Step(2, 4, 4, 4), tokens=5, finished=True)
    front.output("0_a", Step(1, 3, 3, 0), finished=True)
    usage = frontend.collector.take("http")
    assert usage is not None
    assert usage.of_prediction == (5, 6)
    assert (usage.steps, usage.output_tokens, usage.accepted_by[CONTEXT]) == (3, 12, 4)
    assert frontend.collector.take("http") is None
    assert not frontend.collector.requests
    front.start("2_a", "late")
    front.output("2_a", Step(0, 0, 0, 0), finished=True)
    assert list(frontend.collector._ended) == ["late"]
    front.start("3_a", "late")  # one more choice, when the others have ended
    assert not frontend.collector._ended


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
            assert frontend.collector.take(name) is not None
    assert not frontend.collector.requests
    assert len(frontend.collector.http_requests) == len(frontend.collector._ended) <= 1000


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
        stream = frontend.with_usage(events(), "http")
        await anext(stream)
        await stream.aclose()

    front.start("a", "http")
    front.output("a", Step(0, 0, 0, 0))
    asyncio.run(client())
    front.abort_requests(["a"])
    monkeypatch.setattr(frontend.metrics, "count_steps", None)
    front.output("a", Step(1, 8, 8, 8))  # nobody will read what it did since then
    assert closed == [True]
    assert not frontend.collector.http_requests
    assert not frontend.collector.requests


# --- responses -------------------------------------------------------------------------------------------


def streamed(*events: Any) -> list[Any]:
    """What becomes of the events of a stream."""

    async def emit() -> Any:
        for event in events:
            yield event

    async def collect() -> list[Any]:
        return [event async for event in frontend.with_usage(emit(), "http")]

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
    assert not frontend.collector.http_requests


@pytest.mark.parametrize("reported", [True, False])
def test_an_error_and_what_the_engine_did_not_report_stay_as_they_are(
    front: FrontEnd, reported: bool
) -> None:
    front.start("a", "http")
    if reported:
        front.output("a", Step(1, 8, 8, 5), finished=True)
    models = pytest.importorskip("vllm.entrypoints.serve.engine.protocol")
    error = models.ErrorResponse(error={"message": "no", "type": "BadRequestError", "code": 400})
    assert frontend.with_usage(error, "http") is error
    shown = models.UsageInfo(completion_tokens=9, total_tokens=19)
    before = shown.model_dump()
    frontend.with_usage(SimpleNamespace(usage=shown), "http")
    assert shown.model_dump() == before

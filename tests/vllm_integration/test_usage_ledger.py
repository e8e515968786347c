"""The ledger and the collector: how the parts of a step meet, and every way in which a request can end.

What responses of each endpoint then show is recounted by `tests/campaign/test_counts.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.vllm_integration.fakes import Step, config, message
from vllm_integration.config import in_use
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import middleware
from vllm_integration.frontend import usage as frontend
from vllm_integration.scheduler.draft_budget import EVERY, TOGETHER, DraftedRequests
from vllm_integration.scheduler.verification_ledger import VerificationLedger
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DRAFT_MODEL, REFUSALS, DraftReport, StepDrafts
from vllm_integration.wire.steps import HEADER, decode


class Message(NamedTuple):
    """What travels with one output, decoded."""

    steps: list[Step]
    own: bool
    refused: str = ""
    before: int = 0


def read(text: str) -> Message:
    found = decode([text])
    steps = [Step(*numbers) for numbers in zip(*(column.tolist() for column in found.steps), strict=True)]
    assert found.counts.tolist() == [len(steps)]
    return Message(steps, bool(found.own[0]), REFUSALS[int(found.refused[0])], int(found.before[0]))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("steps", [[], [Step(1, 16, 12, 3)], [Step(0, 0, 0, 0), Step(2, 1000, 1, 1)]])
def test_a_message_survives_the_way(steps: list[Step], own: bool, refused: str) -> None:
    expected = Message(steps, own and bool(steps), refused, 300)
    assert read(message(steps, before=300, own=expected.own, refused=REFUSALS.index(refused))) == expected


@pytest.mark.parametrize("text", ["", "12", "123", "12345678", "1,2,3,4,5", "12345678" + chr(0xD800) * 4])
def test_another_text_is_no_message(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode([message([Step(1, 2, 2, 2)]), text])


class Oracle:
    """One request, as `VerificationLedger` tells of it. drafts: (position, length, source), the newest first.
    is_theirs: the model's own drafter drafts for it, as much as was scheduled. every: so many
    steps are told together."""

    def __init__(self, is_theirs: bool, every: int) -> None:
        self.num_tokens, self.refused, self.is_theirs, self.every = 10, "", is_theirs, every
        self.steps: list[Step] = []
        self.tokens = 0
        self.drafts: list[tuple[int, int, int]] = []
        self.waiting: list[tuple[int, int, int, int]] = []

    def resolve(self, off: bool) -> None:
        """Its steps that need not wait any more are known."""
        for step in list(self.waiting):
            position, slots, sampled, kept = step
            made = next((draft for draft in self.drafts if draft[0] == position), None)
            if self.is_theirs:
                made = position, max(0, slots), DRAFT_MODEL
            if made is None and slots > 0 and not off and all(draft[0] <= position for draft in self.drafts):
                continue
            _, length, source = made or (position, 0, 0)
            verified = max(0, min(slots, length))
            self.steps.append(Step(source, length, verified, min(sampled - 1, verified, kept)))
            self.waiting.remove(step)

    def settle(self, slots: int, sampled: int, kept: int, off: bool, is_last: bool) -> Message | None:
        """The message of a step's output, if it has one."""
        own = self.num_tokens, slots, sampled, kept
        self.waiting.append(own)
        self.resolve(off)
        before, self.tokens = self.tokens, self.tokens + kept
        if not (is_last or len(self.steps) >= self.every):
            return None
        refused, self.refused, steps, self.steps, self.tokens = self.refused, "", self.steps, [], 0
        return Message(steps, own not in self.waiting, refused, before)


def output_of(req_id: str, tokens: int, is_last: bool) -> Any:
    reason = "stop" if is_last else None
    return SimpleNamespace(
        request_id=req_id, new_token_ids=[5] * tokens, finish_reason=reason, trace_headers={"t": "p"}
    )


def drafts_of(made: dict[str, tuple[int, int, int]]) -> StepDrafts:
    columns = np.array(list(made.values())).reshape(-1, 3).T
    return StepDrafts(list(made), 0, *columns, np.zeros((len(made), 0), dtype=np.uint8))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_settled_as_each_of_its_requests_alone(seed: int) -> None:
    """Reports are late, or never come; steps are of any size and order, and end inside their drafts; a grammar or
    the device takes slots away; the next turn of a request takes tokens back; some have stop strings; requests
    come, are aborted while they run, and are gone;
    nobody, or the model's own drafter, drafts for some of them; the worker is turned off."""
    draw = random.Random(seed)
    size, everybody = draw.choice([3, 12, 200]), draw.random() < 0.2
    beside_model = seed % 4 == 1
    drafted = DraftedRequests(everybody, beside_model=beside_model)
    ledger = VerificationLedger(drafted)
    requests: dict[str, Any] = {}
    known: dict[str, Oracle] = {}
    late: list[dict[str, tuple[int, int, int]]] = [{}]
    off = False
    for number in range(20):
        while len(requests) < size:
            name = f"{number}-{len(requests)}"
            predicted = draw.random() < 0.8
            stop = draw.choice([None, [], ["a"]])
            params = SimpleNamespace(extra_args={wire.KEY: [1]} if predicted else None, stop=stop)
            requests[name] = SimpleNamespace(request_id=name, num_tokens=10, sampling_params=params)
            drafted.add(requests[name])
            if predicted or everybody or beside_model:
                every = int(drafted.table[drafted.rows_of([name])[0], EVERY])
                assert every == 1 if stop else 1 < every <= TOGETHER
                known[name] = Oracle(not (predicted or everybody), every)
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
        refused = {name: "tokens" for name in batch if draw.random() < 0.1}
        drafted.off |= now_off
        drafted.take(DraftReport([drafts_of(now)] if now else [], {}, refused))
        for name, oracle in known.items():
            oracle.drafts = ([now[name]] if name in now else []) + oracle.drafts
            oracle.refused = refused.get(name, oracle.refused)
        outputs, expected, ended, settled = [], {}, [], set()
        for name in draw.sample(batch, len(batch)):
            if name not in requests:
                continue
            kept = draw.randrange(sampled[name] + 1) if draw.random() < 0.1 else sampled[name]
            is_last = kept < sampled[name] or draw.random() < 0.05
            outputs.append(output_of(name, kept, is_last))
            if name in known and sampled[name]:
                left = min(slots[name] - invalid.get(name, 0), trimmed.get(name, slots[name]))
                told = known[name].settle(left, sampled[name], kept, off, is_last)
                expected.update({} if told is None else {name: told})
                settled.add(name)
                ended += [name] * is_last
            requests[name].num_tokens += kept
        for name in known.keys() - settled:
            known[name].resolve(off)
        # And one of a request that a connector has failed, which is not in the step.
        outputs.append(output_of("failed", 0, True))
        ledger.settle(begun, outputs)
        found = {each.request_id: each.trace_headers for each in outputs if each.trace_headers.pop("t")}
        assert {name: read(headers[HEADER]) for name, headers in found.items() if headers} == expected
        for name in ended:
            requests[name].num_tokens -= draw.randrange(3)
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


# --- the front end ---


class FrontEnd:
    """vLLM's `OutputProcessor` as far as it matters, with our wrappers on it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    @wrapped_by(frontend.add_request)
    def add_request(self, request: Any) -> str:
        self.request_states[request.request_id] = request
        return "added"

    @wrapped_by(frontend.process_outputs)
    def process_outputs(self, outputs: Any) -> str:
        return "processed"

    @wrapped_by(frontend.abort_requests)
    def abort_requests(self, request_ids: Any) -> list[str]:
        return [req_id for req_id in request_ids if self.request_states.pop(req_id, None)]

    def start(self, req_id: str, http: frontend.HttpRequest | None = None) -> None:
        params = SimpleNamespace(extra_args={wire.KEY: wire.Prediction(b"\1\0\0\0" * 7)})
        token = frontend.http_request.set(http)
        assert self.add_request(SimpleNamespace(request_id=req_id, sampling_params=params)) == "added"
        frontend.http_request.reset(token)

    def output(self, req_id: str, step: Step) -> None:
        headers = {"traceparent": "t", HEADER: message([step])}
        tokens = [5] * (step.accepted + 1)
        output = SimpleNamespace(request_id=req_id, new_token_ids=tokens, trace_headers=headers)
        assert self.process_outputs([output]) == "processed"


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    monkeypatch.setattr(in_use, "_engine", config())
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    return FrontEnd()


@pytest.fixture
def http(front: FrontEnd) -> frontend.HttpRequest:
    """A request of two choices, which have accepted 5 tokens of its prediction, and rejected 3."""
    made = frontend.HttpRequest(wire.Prediction())
    front.start("0_a", made)
    front.start("1_a", made)
    for step in (Step(0, 0, 0, 0), Step(1, 8, 7, 4), Step(2, 2, 2, 1)):
        front.output("0_a", step)
    front.output("1_a", Step(1, 1, 1, 1))
    return made


DETAILS = {"reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}


MORE = {
    "steps": 4,
    "drafted": 10,
    "by_source": {"prediction": {"drafted": 8, "accepted": 5}, "context": {"drafted": 2, "accepted": 1}},
}


# --- responses ---


def sent(http: frontend.HttpRequest, content_type: bytes, *chunks: str) -> tuple[list[str], bytes | None]:
    """What a client gets of a response whose body comes in these chunks, and its Content-Length. Without a type it
    has no headers, and an empty chunk is left out: both are optional."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        complete = middleware._completing(send, http)
        headers = [(b"content-type", content_type), (b"content-length", b"7")]
        given = {"headers": headers} if content_type else {}
        await complete({"type": "http.response.start", "status": 200, **given})
        for place, chunk in enumerate(chunks, 1):
            more = place < len(chunks)
            body = {"body": chunk.encode()} if chunk else {}
            await complete({"type": "http.response.body", **body, "more_body": more})

    asyncio.run(run())
    bodies = [message.get("body", b"").decode() for message in messages[1:]]
    return bodies, dict(messages[0].get("headers", ())).get(b"content-length")


EVENTS, JSON = b"text/event-stream; charset=utf-8", b"application/json"
USAGE = '"usage":{"prompt_tokens":10,"total_tokens":19,"completion_tokens":9}'
COUNTS = (
    '"input_tokens":10,"output_tokens":9,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":19'
)
TOOLS = '"tools":[{"parameters":{"properties":{"usage":{"type":"string"}}}}]'
LOOKS_LIKE_IT = r'{"content":"\"usage\":{ \"choices\":[] é \ud83d\ude00"}'
ANSWER = f'{{"id":"é",{USAGE}}}'
#: A response: its type, its chunks, and the one that is completed, if any.
RESPONSES: dict[str, tuple[bytes, list[str], int | None]] = {
    "a stream": (
        EVENTS,
        [
            f'data: {{"id":"x","choices":[{{"delta":{LOOKS_LIKE_IT}}}],{USAGE}}}\n\n',
            ": keep-alive\n\n",
            f'data: {{"id":"x","object":"chunk","choices":[],{USAGE},"model":"é"}}\n\n',
            "data: [DONE]\n\n",
            "",
        ],
        2,
    ),
    "a stream of responses": (
        EVENTS,
        [
            f'event: response.created\ndata: {{"response":{{{TOOLS},"usage":null}}}}\n\n',
            f'event: response.completed\ndata: {{"response":{{{TOOLS},"usage":{{{COUNTS}}}}}}}\n\n',
        ],
        1,
    ),
    "JSON": (JSON, [ANSWER], 0),
    "JSON in parts": (JSON, [ANSWER[:-8], ANSWER[-8:]], None),
    "JSON in parts, the last empty": (JSON, [ANSWER, ""], None),
    "another type": (b"text/plain", [ANSWER], None),
    "no headers": (b"", [ANSWER], None),
    "an error": (JSON, ['{"error":{"message":"no","type":"BadRequestError","code":400}}'], None),
}


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", RESPONSES)
def test_the_last_usage_of_a_response_is_completed(name: str, more: bool, http: frontend.HttpRequest) -> None:
    """Nothing else of it is changed; a stream's headers go at once, as they are. more: what can be asked for."""
    http.settings = Settings(usage_details=more, bill_rejected=more)
    content_type, chunks, place = copy.deepcopy(RESPONSES[name])
    got, length = sent(http, content_type, *chunks)
    whole = str(len(got[0].encode())).encode() if len(got) == 1 else None
    assert length == (whole if content_type is JSON else b"7" if content_type else None)
    if place is not None:
        body, given = got.pop(place), chunks.pop(place)
        start = given.index("{")
        expected = json.loads(given[start:])
        usage = expected.get("response", expected)["usage"]
        tokens = "output_tokens" if "output_tokens" in usage else "completion_tokens"
        usage[f"{tokens}_details"] = {**DETAILS, **usage.get(f"{tokens}_details", {})}
        if more:
            usage[f"{tokens}_details"]["gpu_align"] = MORE
            usage |= {tokens: 12, "total_tokens": 22}
        assert json.loads(body[start:]) == expected
        assert body[:start] == given[:start]
        assert body.endswith("\n\n") is (content_type is EVENTS)
    assert got == chunks


def test_a_usage_of_which_the_engine_has_reported_nothing_stays_as_it_is(front: FrontEnd) -> None:
    front.start("a", http := frontend.HttpRequest(wire.Prediction()))
    assert sent(http, JSON, ANSWER)[0] == [ANSWER]
    front.output("a", Step(1, 8, 8, 5))
    assert sent(http, JSON, ANSWER)[0] != [ANSWER]


# --- what fails costs counts, and no answer ---


@pytest.mark.parametrize("name", ["Collector.follow", "Collector.count", "Collector.end", "_take_messages"])
def test_usage_that_fails_costs_counts_alone(
    name: str, front: FrontEnd, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT")
    monkeypatch.setattr(f"{frontend.__name__}.{name}", lambda *_, **__: 1 / 0)
    for req_id in "abc":
        front.start(req_id)
        front.output(req_id, Step(1, 8, 8, 5))
        assert front.abort_requests([req_id]) == [req_id]
    assert 1 <= len(plugin_log) <= 2
    assert all(re.match("gpu_align does not count .*: ZeroDivisionError at ", line) for line in plugin_log)


@pytest.mark.parametrize(("name", "content_type"), [("_completed", JSON), ("_completed_events", EVENTS)])
def test_a_response_that_cannot_be_completed_stays_as_it_is(
    name: str,
    content_type: bytes,
    http: frontend.HttpRequest,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT")
    monkeypatch.setattr(middleware, name, lambda *_: 1 / 0)
    assert sent(http, content_type, ANSWER)[0] == [ANSWER]
    (line,) = plugin_log
    assert line.startswith("gpu_align does not count in this step: ZeroDivisionError at ")

"""Usage: what was verified of a request, counted where its outputs arrive, and shown in responses.

With `GPU_ALIGN_VERBOSE` INFO lines about requests that are drafted for tell ids and counts, never content. They
are written here: neither the engine nor the device does more.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from gpu_align.step_log import SOURCES

from ..config.in_use import engine_here
from ..config.settings import Settings
from ..seams.install import seam, shown_id
from ..wire import request as wire
from ..wire.reports import REFUSALS
from ..wire.steps import HEADER, Messages, decode
from . import metrics
from .metrics import PREDICTION
from .prediction import guard

logger = logging.getLogger("vllm.gpu_align")

#: HTTP requests whose engine requests have all ended and which no response has asked for: clients that went away.
_MAX_ENDED = 1000
#: Why a worker did not use a prediction as it came, as `metrics.REFUSED` says it.
_BY_THE_WORKER = {
    "cut": ("tokens", "truncated"),
    "dropped": ("malformed", "dropped"),
    "no_room": ("room", "dropped"),
}


@functools.cache
def _settings() -> Settings:
    return Settings.from_env()


@dataclass
class RequestUsage:
    """Counted from what the engine verified, not from what was proposed.

    steps: model passes that produced at least one token of the output (the first is the prefill's).
    output_tokens: tokens of the output.
    drafted_by, accepted_by: by source, a value of `gpu_align.Source`, the draft tokens that the engine verified,
    and those of them that are in the output. rejected = drafted − accepted.
    predicted: whether it brought a prediction.
    """

    steps: int = 0
    output_tokens: int = 0
    drafted_by: Counter[int] = field(default_factory=Counter)
    accepted_by: Counter[int] = field(default_factory=Counter)
    predicted: bool = True

    @property
    def drafted(self) -> int:
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        return self.accepted_by.total()

    @property
    def of_prediction(self) -> tuple[int, int]:
        """Tokens of the prediction that were accepted, and that were rejected."""
        accepted = self.accepted_by[PREDICTION]
        return accepted, self.drafted_by[PREDICTION] - accepted

    def add_step(self, source: int, verified: int, accepted: int) -> None:
        self.steps += 1
        self.drafted_by[source] += verified
        self.accepted_by[source] += accepted

    def add(self, other: RequestUsage) -> None:
        """Count what another choice of the same HTTP request counted."""
        self.steps += other.steps
        self.output_tokens += other.output_tokens
        self.drafted_by.update(other.drafted_by)
        self.accepted_by.update(other.accepted_by)

    def by_source(self) -> dict[str, dict[str, int]]:
        """The sources that drafted."""
        return {
            name: {"drafted": self.drafted_by[source], "accepted": self.accepted_by[source]}
            for source, name in enumerate(SOURCES)
            if self.drafted_by[source]
        }

    def as_dict(self) -> dict[str, Any]:
        """As a step log has it."""
        counts = {name: getattr(self, name) for name in ("steps", "output_tokens", "drafted", "accepted")}
        return {**counts, "rejected": self.drafted - self.accepted, "by_source": self.by_source()}


@dataclass
class _FollowedUsage:
    """One engine request. prediction_tokens: the length of its prediction, 0 where that is not known.
    diverged: the last drafts from its prediction were not all accepted."""

    req_id: str = ""
    http_request_id: str | None = None
    prediction_tokens: int = 0
    usage: RequestUsage = field(default_factory=RequestUsage)
    diverged: bool = False

    def count(self, source: int, verified: int, accepted: int) -> bool:
        """Count a step; whether the output is back in the prediction: its drafts are accepted again after some
        were rejected."""
        self.usage.add_step(source, verified, accepted)
        if source != PREDICTION or not verified:
            return False
        realigned = self.diverged and accepted > 0
        self.diverged = accepted < verified
        return realigned

    def tell_steps(self, steps: Iterable[tuple[int, int, int, int]]) -> None:
        """Its next steps. Each: source, proposed, verified, accepted."""
        for number, (source, proposed, verified, accepted) in enumerate(steps, self.usage.steps):
            told = "no draft"
            if proposed:
                told = f"{proposed} proposed from {SOURCES[source]}, {verified} verified, {accepted} accepted"
            logger.info("gpu_align: request %s step %d: %s", shown_id(self.req_id), number, told)

    def tell_end(self, aborted: bool) -> None:
        usage = self.usage
        drafted = [f"{name} {n['accepted']} of {n['drafted']}" for name, n in usage.by_source().items()]
        logger.info(
            "gpu_align: request %s %s: %d tokens in %d steps, %.1f a step; prediction of %d tokens; "
            "draft tokens accepted of verified: %s",
            shown_id(self.req_id),
            "aborted" if aborted else "ended",
            usage.output_tokens,
            usage.steps,
            usage.output_tokens / usage.steps if usage.steps else 0.0,
            self.prediction_tokens,
            ", ".join(drafted) or "none verified",
        )


class Collector:
    """Usage of requests on their way, and of those that have ended, until `take` is asked for it."""

    def __init__(self) -> None:
        self.requests: dict[str, _FollowedUsage] = {}
        self.http_requests: dict[str, list[_FollowedUsage]] = {}
        self._ended: dict[str, None] = {}

    def follow(self, req_id: str, prediction: Any) -> None:
        """`prediction`: what the request has in `extra_args`. Following a request again changes nothing."""
        if req_id in self.requests:
            return
        name = getattr(prediction, "http_request_id", None)
        encoded = getattr(prediction, "token_ids", None)
        predicted = encoded != b""  # empty: drafted for without a prediction
        length = len(encoded or b"") // 4
        # Its choices bring one prediction together.
        if predicted and name not in self.http_requests:
            metrics.count_request(None if encoded is None else length)
        followed = _FollowedUsage(req_id, name, length, RequestUsage(predicted=predicted))
        self.requests[req_id] = followed
        if name is not None:
            self.http_requests.setdefault(name, []).append(followed)
            self._ended.pop(name, None)

    def count(self, messages: Messages, followed: Sequence[_FollowedUsage], kept: Sequence[int]) -> None:
        """Count what came with M outputs. followed: their requests. kept: their tokens that are output after the
        front end's own cuts."""
        accepted, last = messages.steps.accepted, np.cumsum(messages.counts) - 1
        own = np.flatnonzero(messages.own)
        accepted[last[own]] = np.minimum(accepted[last[own]], np.asarray(kept)[own])
        realignments = firsts = 0
        steps = zip(*(column.tolist() for column in messages.steps), strict=True)
        tells_steps = _settings().verbose > 1
        for request, tokens, count in zip(followed, kept, messages.counts.tolist(), strict=True):
            request.usage.output_tokens += tokens
            firsts += count > 0 and not request.usage.steps
            taken = list(islice(steps, count))
            if tells_steps:
                request.tell_steps(taken)
            realignments += sum(
                request.count(source, verified, right) for source, _, verified, right in taken
            )
        metrics.count_steps(messages.steps, firsts=firsts, realignments=realignments)
        if messages.off.any():
            metrics.set_enabled(False)
        for number in messages.refused[messages.refused > 0].tolist():
            metrics.count_refused(*_BY_THE_WORKER[REFUSALS[number]])

    def end(self, req_id: str, aborted: bool = False) -> None:
        """The request has finished or was aborted. Harmless for one that is not followed."""
        followed = self.requests.pop(req_id, None)
        if followed is None:
            return
        if _settings().verbose:
            followed.tell_end(aborted)
        metrics.count_finished(*followed.usage.of_prediction)
        name = followed.http_request_id or ""
        choices = self.http_requests.get(name)
        if choices and not any(each.req_id in self.requests for each in choices):
            self._ended[name] = None
            if len(self._ended) > _MAX_ENDED:
                oldest = next(iter(self._ended))
                del self._ended[oldest], self.http_requests[oldest]

    def take(self, http_request_id: str) -> RequestUsage | None:
        """The usage of an HTTP request, which is forgotten; None when the engine has reported nothing of it."""
        self._ended.pop(http_request_id, None)
        choices = self.http_requests.pop(http_request_id, None)
        if not choices:
            return None
        total = RequestUsage(predicted=choices[0].usage.predicted)
        for followed in choices:
            total.add(followed.usage)
        return total if total.output_tokens or total.steps else None


#: The collector of this process.
collector = Collector()


@seam("usage.__init__")
def start(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`OutputProcessor.__init__`: metrics are there from the start, at 0."""
    original(self, *args, **kwargs)
    guard.run("could not create metrics", metrics.create_if_expected)


@seam("usage.add_request")
def add_request(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """`OutputProcessor.add_request`, after which a request that is drafted for is followed."""
    result = original(self, request, *args, **kwargs)
    guard.run("could not follow a request", _follow, request)
    return result


def _follow(request: Any) -> None:
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if extra_args and wire.KEY in extra_args and engine_here() is not None:
        collector.follow(request.request_id, extra_args[wire.KEY])


@seam("usage.process_outputs")
def process_outputs(
    original: Callable[..., Any], self: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.process_outputs`, around which the steps that came with the outputs are counted.

    The messages are taken out first, so that tracing sees its headers as the client sent them, and counted
    when vLLM has looked for stop strings. Nobody reads an output before both are done: the readers are other
    tasks of the same event loop.
    """
    messages = guard.run("could not read what was verified", _take_messages, engine_core_outputs) or []
    result = original(self, engine_core_outputs, *args, **kwargs)
    if messages:
        guard.run("could not count what was verified", _count_messages, messages, self.request_states)
    return result


@seam("usage.abort_requests")
def abort_requests(
    original: Callable[..., Any], self: Any, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.abort_requests`, after which what it aborted is no longer followed."""
    aborted = original(self, request_ids, *args, **kwargs)
    for req_id in aborted:
        guard.run("could not forget an aborted request", collector.end, req_id, True)
    return aborted


def _take_messages(outputs: Sequence[Any]) -> list[tuple[Any, str]]:
    messages = []
    for output in outputs:
        headers = output.trace_headers
        if headers and HEADER in headers:
            messages.append((output, headers[HEADER]))
            output.trace_headers = {name: headers[name] for name in headers if name != HEADER} or None
    return messages


def _count_messages(messages: list[tuple[Any, str]], open_requests: Any) -> None:
    texts: list[str] = []
    followed: list[_FollowedUsage] = []
    kept: list[int] = []
    for output, text in messages:
        request = collector.requests.get(output.request_id)
        if request is None:
            if output.request_id not in open_requests:  # aborted: nobody will read what it did since then
                continue
            # Drafted for without a prediction.
            request = collector.requests[output.request_id] = _FollowedUsage(req_id=output.request_id)
        texts.append(text)
        followed.append(request)
        kept.append(len(output.new_token_ids))
    if texts:
        collector.count(decode(texts), followed, kept)
    for output, _ in messages:
        if output.request_id not in open_requests:
            collector.end(output.request_id)


#: Key of the further fields of `GPU_ALIGN_USAGE_DETAILS`, beside `accepted_prediction_tokens`.
DETAILS = "gpu_align"


def with_usage(result: Any, http_request_id: str) -> Any:
    """`result` of a serving method, with the accepted and rejected prediction tokens of its HTTP request, summed
    over all choices.

    result: a response object, which is completed in place; an error, which is left alone; or an async generator of
        a stream, for which another one is returned: of server-sent events (strings), or of the event objects of
        /v1/responses. Only the last usage of a stream is completed: the chunk without choices, the response of the
        final event.

    A request without a prediction has neither, and of `GPU_ALIGN_USAGE_DETAILS` what was drafted for it all the
    same. Nothing is added where the engine reported nothing.
    """
    if hasattr(result, "__aiter__"):
        return _stream(result, http_request_id)
    shown = getattr(result, "usage", None)
    guard.run("could not complete the usage of a response", _complete_object, shown, http_request_id)
    return result


async def _stream(events: Any, http_request_id: str) -> AsyncIterator[Any]:
    try:
        async for event in events:
            completed = guard.run(
                "could not complete the usage of a stream", _complete_event, event, http_request_id
            )
            yield event if completed is None else completed
    finally:
        guard.run("could not forget a request", collector.take, http_request_id)
        close = getattr(events, "aclose", None)
        if close is not None:  # the client may have gone away in the middle
            await close()


def _complete_event(event: Any, http_request_id: str) -> Any:
    if isinstance(event, str):
        # What a user writes cannot look like this: quotes inside of JSON strings are escaped.
        if event.startswith("data: {") and '"usage":{' in event and '"choices":[]' in event:
            return _complete_chunk(event, http_request_id)
        return event
    response = getattr(event, "response", None)
    if response is not None and getattr(response, "usage", None) is not None:
        _complete_object(response.usage, http_request_id)
    return event


def _complete_chunk(event: str, http_request_id: str) -> str:
    chunk = json.loads(event.removeprefix("data: "))
    if chunk.get("choices") != [] or not isinstance(chunk.get("usage"), dict):
        return event
    fields, billed = _fields(http_request_id)
    if not fields:
        return event
    shown = chunk["usage"]
    details = {"reasoning_tokens": 0, **(shown.get("completion_tokens_details") or {}), **fields}
    shown["completion_tokens_details"] = details
    if billed:
        shown["completion_tokens"] = (shown.get("completion_tokens") or 0) + billed
        shown["total_tokens"] = shown.get("total_tokens", 0) + billed
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _complete_object(shown: Any, http_request_id: str) -> None:
    """Complete a `UsageInfo` or a `ResponseUsage`; their models take further fields."""
    fields, billed = _fields(http_request_id)
    if shown is None or not fields:
        return
    output_tokens = "completion_tokens"
    if hasattr(shown, "output_tokens_details"):
        output_tokens, details = "output_tokens", shown.output_tokens_details
    else:
        if shown.completion_tokens_details is None:
            from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

            shown.completion_tokens_details = CompletionTokenUsageInfo()
        details = shown.completion_tokens_details
    for name, value in fields.items():
        setattr(details, name, value)
    if billed:
        setattr(shown, output_tokens, (getattr(shown, output_tokens) or 0) + billed)
        shown.total_tokens += billed


def _fields(http_request_id: str) -> tuple[dict[str, Any], int]:
    """What an HTTP request's usage shows beside vLLM's, and the tokens that are billed though they are not
    output."""
    usage = collector.take(http_request_id)
    fields: dict[str, Any] = {}
    if usage is None:
        return fields, 0
    accepted, rejected = usage.of_prediction
    if usage.predicted:
        fields = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if _settings().usage_details:
        counts = usage.as_dict()
        fields[DETAILS] = {name: counts[name] for name in ("steps", "drafted", "by_source")}
    return fields, rejected if _settings().bill_rejected else 0

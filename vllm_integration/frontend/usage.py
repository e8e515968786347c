"""Usage: what was verified of a request, counted where its outputs arrive, and shown in responses.

With `GPU_ALIGN_VERBOSE` an INFO line about each request that is drafted for has its id and counts, never content.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpu_align.drafter.step_log import SOURCES

from ..config.in_use import engine_here
from ..config.settings import Settings
from ..seams.guard import logger, shown_id
from ..seams.install import Original, seam
from ..wire import request as wire
from ..wire.reports import REFUSALS
from ..wire.steps import FAULTS, HEADER, decode
from . import metrics
from .metrics import PREDICTION
from .prediction import counting


@dataclass
class RequestUsage:
    """Of one engine request, or of those of an HTTP request: what the engine verified, not what was proposed.

    prediction_tokens: the length of its prediction, 0 where that is not known. predicted: whether it brought one.
    steps: model passes that wrote tokens of the output (the first is the prefill's).
    drafted_by, accepted_by: by value of `gpu_align.Source`, draft tokens that the engine verified, and those of
    them that are in the output. diverged: the last drafts from its prediction were not all accepted.
    """

    req_id: str = ""
    prediction_tokens: int = 0
    predicted: bool = True
    steps: int = 0
    output_tokens: int = 0
    drafted_by: Counter[int] = field(default_factory=Counter)
    accepted_by: Counter[int] = field(default_factory=Counter)
    diverged: bool = False

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

    def add_step(self, source: int, verified: int, accepted: int) -> bool:
        """Count a step; whether drafts from the prediction are accepted again after some were rejected."""
        self.steps += 1
        self.drafted_by[source] += verified
        self.accepted_by[source] += accepted
        if source != PREDICTION or not verified:
            return False
        realigned = self.diverged and accepted > 0
        self.diverged = accepted < verified
        return realigned

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("steps", "output_tokens", "drafted", "accepted")}
        by_source = {
            name: {"drafted": self.drafted_by[source], "accepted": self.accepted_by[source]}
            for source, name in enumerate(SOURCES)
            if self.drafted_by[source]
        }
        return {**counts, "rejected": self.drafted - self.accepted, "by_source": by_source}

    def tell_end(self, aborted: bool) -> None:
        by_source = self.as_dict()["by_source"].items()
        drafted = ", ".join(f"{name} {n['accepted']} of {n['drafted']}" for name, n in by_source)
        rate = self.output_tokens / self.steps if self.steps else 0.0
        told = f"{self.output_tokens} tokens in {self.steps} steps, {rate:.1f} a step"
        told += f"; prediction of {self.prediction_tokens} tokens"
        told += f"; draft tokens accepted of verified: {drafted or 'none verified'}"
        end = "aborted" if aborted else "ended"
        logger.info("gpu_align: request %s %s: %s", shown_id(self.req_id), end, told)


#: Key of the further fields of `GPU_ALIGN_USAGE_DETAILS`, beside `accepted_prediction_tokens`.
DETAILS = "gpu_align"


@dataclass(eq=False)
class HttpRequest:
    """Data that the tasks of an HTTP request share. answered: is given the document of its response. usages: of
    each of its engine requests that is drafted for."""

    prediction: wire.Prediction
    settings: Settings = field(default_factory=Settings)
    answered: Callable[[Any], object] = lambda document: None
    usages: list[RequestUsage] = field(default_factory=list)

    def complete(self, document: Any) -> bool:
        """Add the counts of all engine requests to the `usage` of a response, or of a stream's last event; whether
        there is anything to add. Without a prediction these are those of `GPU_ALIGN_USAGE_DETAILS` alone."""
        shown, settings = (document.get("response") or document).get("usage"), self.settings
        predicted = any(each.predicted for each in self.usages)
        reported = any(each.output_tokens or each.steps for each in self.usages)
        if not (isinstance(shown, dict) and reported and (predicted or settings.usage_details)):
            return False
        whole = RequestUsage(steps=sum(each.steps for each in self.usages))
        for each in self.usages:
            whole.drafted_by.update(each.drafted_by)
            whole.accepted_by.update(each.accepted_by)
        tokens = "output_tokens" if "output_tokens" in shown else "completion_tokens"
        details = shown[f"{tokens}_details"] = shown.get(f"{tokens}_details") or {"reasoning_tokens": 0}
        accepted, rejected = whole.of_prediction
        if predicted:
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if settings.usage_details:
            counts = whole.as_dict()
            details[DETAILS] = {name: counts[name] for name in ("steps", "drafted", "by_source")}
        if settings.bill_rejected:
            shown[tokens] = (shown.get(tokens) or 0) + rejected
            shown["total_tokens"] += rejected
        return True


#: Of the request that a task serves; None where it brings nothing.
http_request: ContextVar[HttpRequest | None] = ContextVar("gpu_align_http_request", default=None)


class Collector:
    """Usage of the requests of one engine that have not ended. verbose: of its settings."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.requests: dict[str, RequestUsage] = {}

    def follow(self, req_id: str, prediction: Any) -> None:
        """`prediction`: what the request has in `extra_args`. Following a request again changes nothing."""
        if req_id in self.requests or getattr(prediction, "drafts", None) is False:
            return
        encoded = getattr(prediction, "token_ids", None)
        # Empty, or another text: drafted for without a prediction.
        predicted = encoded != b"" and not getattr(prediction, "kind", 0)
        length, http = len(encoded or b"") // 4, http_request.get()
        # Its choices bring one prediction together.
        if predicted and not (http and http.usages):
            metrics.count_request(None if encoded is None else length)
        request = self.requests[req_id] = RequestUsage(req_id, length, predicted)
        if http is not None:
            http.usages.append(request)

    def count(self, sent: Sequence[tuple[Any, str]], open_requests: Collection[str]) -> None:
        """Count what came with outputs, which the front end has cut. sent: each with its message. open_requests:
        those that have not ended. The counts of one that was aborted are dropped."""
        sent = [
            (output, text)
            for output, text in sent
            if output.request_id in self.requests or output.request_id in open_requests
        ]
        if not sent:
            return
        messages = decode([text for _, text in sent])
        kept = np.array([len(output.new_token_ids) for output, _ in sent])
        accepted, last = messages.steps.accepted, np.cumsum(messages.counts) - 1
        own = np.flatnonzero(messages.own)
        accepted[last[own]] = np.minimum(accepted[last[own]], kept[own])
        realignments = firsts = 0
        columns = (messages.steps.source, messages.steps.verified, accepted)
        steps = zip(*(column.tolist() for column in columns), strict=True)
        counts, written = messages.counts.tolist(), (messages.before + kept).tolist()
        for (output, _), tokens, count in zip(sent, written, counts, strict=True):
            # One that is not followed is drafted for without a prediction.
            request = self.requests.setdefault(output.request_id, RequestUsage(output.request_id))
            request.output_tokens += tokens
            firsts += count > 0 and not request.steps
            realignments += sum(request.add_step(*step) for step in islice(steps, count))
        metrics.count_steps(messages.steps, firsts=firsts, realignments=realignments)
        for number in messages.refused[messages.refused > 0].tolist():
            reason = REFUSALS[number]
            metrics.count_refused(reason, "truncated" if reason == "tokens" else "dropped")
        for output, _ in sent:
            if output.request_id not in open_requests:
                self.end(output.request_id)

    def end(self, req_id: str, aborted: bool = False) -> None:
        """The request has finished or was aborted. Harmless for one that is not followed."""
        request = self.requests.pop(req_id, None)
        if request is None:
            return
        if self.verbose:
            request.tell_end(aborted)
        metrics.count_finished(*request.of_prediction)


#: By the `OutputProcessor` of their engine: two engines in a process may have requests of one id.
collectors: WeakKeyDictionary[Any, Collector] = WeakKeyDictionary()


@seam("usage.add_request")
def add_request(original: Original, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """`OutputProcessor.add_request`, after which a request that is drafted for is followed."""
    result = original(self, request, *args, **kwargs)
    counting.run(_follow, self, request)
    return result


def _follow(processor: Any, request: Any) -> None:
    extra_args, engine = getattr(request.sampling_params, "extra_args", None), engine_here()
    if engine is None:
        return
    if processor not in collectors:
        collectors[processor] = Collector(Settings.of(engine).verbose)
    if extra_args and wire.KEY in extra_args:
        collectors[processor].follow(request.request_id, extra_args[wire.KEY])


@seam("usage.process_outputs")
def process_outputs(
    original: Original, self: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.process_outputs`. Our messages are taken out first, so that tracing sees its headers as the
    client sent them, and counted when vLLM has looked for stop strings."""
    sent = counting.run(_take_messages, self, engine_core_outputs)
    result = original(self, engine_core_outputs, *args, **kwargs)
    if sent and self in collectors:
        counting.run(collectors[self].count, sent, self.request_states)
    return result


@seam("usage.abort_requests")
def abort_requests(
    original: Original, self: Any, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.abort_requests`, after which what it aborted is no longer followed."""
    aborted = original(self, request_ids, *args, **kwargs)
    for req_id in aborted if self in collectors else ():
        counting.run(collectors[self].end, req_id, True)
    return aborted


def _take_messages(processor: Any, outputs: Sequence[Any]) -> list[tuple[Any, str]]:
    messages = []
    for output in outputs:
        if not output.trace_headers:
            continue
        headers = dict(output.trace_headers)
        if (told := headers.pop(FAULTS, None)) is not None:
            metrics.show_faults(processor, json.loads(told))
        if (steps := headers.pop(HEADER, None)) is not None:
            messages.append((output, steps))
        output.trace_headers = headers or None
    return messages

"""The usage of requests, added up in the front end from what comes with the engine's outputs.

One collector a front-end process, used from its event loop only. A request is followed from the moment it is
handed to the engine until it finishes or is aborted; the usage of its HTTP request stays until the response asks
for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from vllm_integration.config.in_use import configured_here
from vllm_integration.frontend import metrics, verbose
from vllm_integration.frontend.faults import unless_it_fails
from vllm_integration.seams.install import seam
from vllm_integration.wire import prediction as wire
from vllm_integration.wire.reports import REFUSALS
from vllm_integration.wire.steps import HEADER, Messages, decode
from vllm_integration.wire.usage import PREDICTION, RequestUsage

#: HTTP requests whose engine requests have all ended and which no response has asked for: clients that went away.
_MAX_ENDED = 1000
#: Why a worker did not use a prediction as it came, as `limits` says it: a worker serves the request in any case.
_BY_THE_WORKER = {
    "cut": ("tokens", "truncated"),
    "dropped": ("malformed", "dropped"),
    "no_room": ("room", "dropped"),
}


@dataclass
class _HttpRequest:
    """usage: of its engine requests that have ended. open: those that have not."""

    usage: RequestUsage = field(default_factory=RequestUsage)
    open: dict[str, _Followed] = field(default_factory=dict)


@dataclass
class _Followed:
    """One engine request. diverged: the last drafts from its prediction were not all accepted. req_id: its id.
    prediction_tokens: the length of its prediction, 0 where that is not known."""

    http_request_id: str | None = None
    usage: RequestUsage = field(default_factory=RequestUsage)
    diverged: bool = False
    req_id: str = ""
    prediction_tokens: int = 0

    def count(self, source: int, verified: int, accepted: int) -> bool:
        """Count a step; whether the output is back in the prediction: its drafts are accepted again after some
        were rejected."""
        self.usage.add_step(source, verified, accepted)
        if source != PREDICTION or not verified:
            return False
        realigned = self.diverged and accepted > 0
        self.diverged = accepted < verified
        return realigned


class Collector:
    """Usage of requests on their way, and of those that have ended, until somebody takes it.

    collector.follow(req_id, prediction)       # a request is handed to the engine
    collector.count(messages, followed, kept)  # outputs arrived
    collector.end(req_id)                      # it has finished, or was aborted
    usage = collector.take(http_request_id)    # its response is being written
    """

    def __init__(self) -> None:
        self.requests: dict[str, _Followed] = {}
        self.http_requests: dict[str, _HttpRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def follow(self, req_id: str, prediction: Any) -> None:
        """`prediction`: what the request has in `extra_args`. Following a request again changes nothing."""
        if req_id in self.requests:
            return
        name = getattr(prediction, "http_request_id", None)
        encoded = getattr(prediction, "token_ids", None)
        predicted = encoded != b""  # empty: drafted for without a prediction
        # Its choices bring one prediction together.
        if predicted and (name is None or name not in self.http_requests):
            metrics.count_request(None if encoded is None else len(encoded) // 4)
        followed = self.requests[req_id] = _Followed(
            name, RequestUsage(predicted=predicted), req_id=req_id, prediction_tokens=len(encoded or b"") // 4
        )
        if name is not None:
            http_request = self.http_requests.setdefault(
                name, _HttpRequest(RequestUsage(predicted=predicted))
            )
            http_request.open[req_id] = followed
            self._ended.pop(name, None)

    def count(self, messages: Messages, followed: Sequence[_Followed], kept: Sequence[int]) -> None:
        """Count what came with M outputs. followed: their requests. kept: their tokens that are output after the
        front end's own cuts."""
        accepted, last = messages.steps.accepted, np.cumsum(messages.counts) - 1
        own = np.flatnonzero(messages.own)
        accepted[last[own]] = np.minimum(accepted[last[own]], np.asarray(kept)[own])
        realignments = firsts = 0
        steps = zip(*(column.tolist() for column in messages.steps), strict=True)
        tells_steps = verbose.level() > 1
        for request, tokens, count in zip(followed, kept, messages.counts.tolist(), strict=True):
            request.usage.output_tokens += tokens
            firsts += count > 0 and not request.usage.steps
            taken = list(islice(steps, count))
            if tells_steps:
                verbose.tell_steps(request.req_id, request.usage.steps, taken)
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
        if verbose.level():
            verbose.tell_request(req_id, followed.prediction_tokens, followed.usage, aborted=aborted)
        metrics.count_finished(*followed.usage.of_prediction)
        name = followed.http_request_id
        http_request = None if name is None else self.http_requests.get(name)
        if name is None or http_request is None or http_request.open.pop(req_id, None) is None:
            return
        http_request.usage.add(followed.usage)
        if not http_request.open:
            self._ended[name] = None
            if len(self._ended) > _MAX_ENDED:
                oldest, _ = self._ended.popitem(last=False)
                del self.http_requests[oldest]

    def take(self, http_request_id: str) -> RequestUsage | None:
        """The usage of an HTTP request, which is forgotten; None when the engine has reported nothing of it."""
        self._ended.pop(http_request_id, None)
        found = self.http_requests.pop(http_request_id, None)
        if found is None:
            return None
        for followed in found.open.values():
            found.usage.add(followed.usage)
        return found.usage if found.usage.output_tokens or found.usage.steps else None


#: The collector of this process.
collector = Collector()


@seam("usage.__init__")
def start(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`OutputProcessor.__init__`: metrics are there from the start, at 0."""
    original(self, *args, **kwargs)
    unless_it_fails("create metrics", metrics.create_if_expected)


@seam("usage.add_request")
def add_request(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """`OutputProcessor.add_request`, after which a request that is drafted for is followed."""
    result = original(self, request, *args, **kwargs)
    unless_it_fails("follow a request", _follow, request)
    return result


def _follow(request: Any) -> None:
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if extra_args and wire.KEY in extra_args and configured_here():
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
    messages = unless_it_fails("read what was verified", _take_messages, engine_core_outputs) or []
    result = original(self, engine_core_outputs, *args, **kwargs)
    if messages:
        unless_it_fails("count what was verified", _count_messages, messages, self.request_states)
    return result


@seam("usage.abort_requests")
def abort_requests(
    original: Callable[..., Any], self: Any, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.abort_requests`, after which what it aborted is no longer followed."""
    aborted = original(self, request_ids, *args, **kwargs)
    for req_id in aborted:
        unless_it_fails("forget an aborted request", collector.end, req_id, True)
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
    followed: list[_Followed] = []
    kept: list[int] = []
    for output, text in messages:
        request = collector.requests.get(output.request_id)
        if request is None:
            if output.request_id not in open_requests:  # aborted: nobody will read what it did since then
                continue
            # Drafted for without a prediction.
            request = collector.requests[output.request_id] = _Followed(req_id=output.request_id)
        texts.append(text)
        followed.append(request)
        kept.append(len(output.new_token_ids))
    if texts:
        collector.count(decode(texts), followed, kept)
    for output, _ in messages:
        if output.request_id not in open_requests:
            collector.end(output.request_id)

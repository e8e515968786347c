"""The front end's half of the accounts: what the engine verified, request by request and tag by tag.

One per front-end process, used from its event loop only. Requests are followed from the moment they are handed
to the engine until they finish or are aborted; what belongs to a tag stays until the response asks for it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_integration.config.in_use import configured_here
from vllm_integration.frontend import metrics
from vllm_integration.scheduler import verification_ledger as accounts
from vllm_integration.scheduler.verification_ledger import Verified
from vllm_integration.seams.install import seam, strict
from vllm_integration.wire import prediction as wire
from vllm_integration.wire.usage import SOURCES, RequestUsage

logger = logging.getLogger("vllm.gpu_align")

#: Tags whose requests have all ended and which no response has asked for: clients that went away.
_MAX_ENDED = 1000
#: What `predictions` does in a worker, as `limits` would say it: a worker serves the request in any case.
_BY_THE_WORKER = {
    "cut": ("tokens", "truncated"),
    "dropped": ("malformed", "dropped"),
    "no_room": ("room", "dropped"),
}


@dataclass
class _Tag:
    """One HTTP request. open: engine requests of it that have not ended. counted: the engine has reported."""

    usage: RequestUsage = field(default_factory=RequestUsage)
    open: int = 0
    counted: bool = False


@dataclass
class _Followed:
    """One engine request. away: the last drafts from its prediction were not all accepted."""

    tag_name: str | None = None
    tag: _Tag | None = None
    usage: RequestUsage = field(default_factory=RequestUsage)
    away: bool = False


class Collector:
    """Usage of requests on their way, and of those that have ended, until somebody takes it.

    collector.follow(request)                 # a request is handed to the engine
    collector.count(req_id, message, kept)    # an output of it arrived
    collector.end(req_id)                     # it has finished, or was aborted
    usage = collector.take(tag)               # its response is being written
    """

    def __init__(self) -> None:
        self.requests: dict[str, _Followed] = {}
        self.tags: dict[str, _Tag] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def follow(self, req_id: str, prediction: Any) -> None:
        """`prediction`: what the request has in `extra_args`. Following a request again changes nothing."""
        if req_id in self.requests:
            return
        name = getattr(prediction, "tag", None)
        tag = None if name is None else self.tags.get(name)
        if tag is None:
            encoded = getattr(prediction, "token_ids", None)
            metrics.count_request(None if encoded is None else len(encoded) // 4)
            if name is not None:
                tag = self.tags[name] = _Tag()
        if tag is not None and name is not None:
            tag.open += 1
            self._ended.pop(name, None)
        self.requests[req_id] = _Followed(name, tag)

    def count(self, message: accounts.Message, followed: _Followed, kept: int) -> None:
        """Count an output's steps. kept: its tokens that are output after the front end's own cuts."""
        steps = list(message.steps)
        if message.own and steps:
            steps[-1] = steps[-1]._replace(accepted=min(steps[-1].accepted, kept))
        first = followed.usage.steps == 0
        realignments = sum(_came_back(followed, step) for step in steps)
        for usage in (followed.usage, None if followed.tag is None else followed.tag.usage):
            if usage is not None:
                usage.output_tokens += kept
                for step in steps:
                    usage.add_step(
                        new_tokens=0,
                        verified=step.verified,
                        accepted=step.accepted,
                        source=SOURCES[step.source],
                    )
        if followed.tag is not None:
            followed.tag.counted = True
        metrics.count_steps(steps, firsts=int(first and bool(steps)), realignments=realignments)
        if message.refused is not None:
            metrics.count_refused(*_BY_THE_WORKER[message.refused])

    def end(self, req_id: str) -> None:
        """The request has finished or was aborted. Harmless for one that is not followed."""
        followed = self.requests.pop(req_id, None)
        if followed is None:
            return
        prediction = followed.usage.by_source.get("prediction")
        if prediction is not None:
            metrics.count_finished(prediction.drafted, prediction.accepted)
        if followed.tag is None or followed.tag_name not in self.tags:
            return
        followed.tag.open -= 1
        if not followed.tag.open:
            self._ended[followed.tag_name] = None
            if len(self._ended) > _MAX_ENDED:
                oldest, _ = self._ended.popitem(last=False)
                del self.tags[oldest]

    def take(self, tag: str) -> RequestUsage | None:
        """The usage of a tag, which is forgotten; None when the engine has reported nothing about it."""
        self._ended.pop(tag, None)
        found = self.tags.pop(tag, None)
        return found.usage if found is not None and found.counted else None


def _came_back(followed: _Followed, step: Verified) -> bool:
    """Whether drafts from the prediction are accepted again after some were rejected."""
    if SOURCES[step.source] != "prediction" or not step.verified:
        return False
    back = followed.away and step.accepted > 0
    followed.away = step.accepted < step.verified
    return back


#: The collector of this process.
collector = Collector()


@seam("usage.__init__")
def start(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`OutputProcessor.__init__`: metrics are there from the start, at 0."""
    original(self, *args, **kwargs)
    _guarded(metrics.create_if_expected)


@seam("usage.add_request")
def add_request(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """`OutputProcessor.add_request`, after which a request with a prediction is followed."""
    result = original(self, request, *args, **kwargs)
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if extra_args and wire.KEY in extra_args and configured_here():
        _guarded(collector.follow, request.request_id, extra_args[wire.KEY])
    return result


@seam("usage.process_outputs")
def process_outputs(
    original: Callable[..., Any], self: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.process_outputs`, around which the steps that came with the outputs are counted.

    The messages are taken out first, so that tracing sees its headers as the client sent them, and counted
    when vLLM has looked for stop strings. Nobody reads an output before both are done: the readers are other
    tasks of the same event loop.
    """
    messages = _guarded(_take_messages, engine_core_outputs) or []
    result = original(self, engine_core_outputs, *args, **kwargs)
    if messages:
        _guarded(_count_messages, messages, self.request_states)
    return result


@seam("usage.abort_requests")
def abort_requests(
    original: Callable[..., Any], self: Any, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> Any:
    """`OutputProcessor.abort_requests`, after which what it aborted is no longer followed."""
    aborted = original(self, request_ids, *args, **kwargs)
    for req_id in aborted:
        _guarded(collector.end, req_id)
    return aborted


def _take_messages(outputs: Sequence[Any]) -> list[tuple[Any, str]]:
    messages = []
    for output in outputs:
        headers = output.trace_headers
        if headers and accounts.HEADER in headers:
            left = {name: value for name, value in headers.items() if name != accounts.HEADER}
            output.trace_headers = left or None
            messages.append((output, headers[accounts.HEADER]))
    return messages


def _count_messages(messages: list[tuple[Any, str]], open_requests: Any) -> None:
    for output, text in messages:
        req_id = output.request_id
        followed = collector.requests.get(req_id)
        if followed is None:
            if req_id not in open_requests:  # aborted, and what it did since then nobody will read
                continue
            followed = collector.requests[req_id] = _Followed()  # drafted for without a prediction
        collector.count(accounts.decode(text), followed, len(output.new_token_ids))
        if req_id not in open_requests:
            collector.end(req_id)


def _guarded(step: Callable[..., Any], *args: Any) -> Any:
    """Counting must never cost anybody an answer."""
    try:
        return step(*args)
    except Exception as error:
        if strict():
            raise
        logger.warning("gpu_align did not count an output: %s: %s", type(error).__name__, error)
        return None

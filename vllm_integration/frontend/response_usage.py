"""What a prediction was worth, in the `usage` of the response that it came with."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from vllm_integration.config.settings import Settings
from vllm_integration.frontend.faults import unless_it_fails
from vllm_integration.frontend.usage_collector import collector
from vllm_integration.wire.usage import RequestUsage

#: Key of the further fields of `GPU_ALIGN_USAGE_DETAILS`, beside `accepted_prediction_tokens`.
DETAILS = "gpu_align"


def new_http_request_id() -> str:
    """A name for one HTTP request, unique among all front ends: goes into `wire.Prediction.http_request_id`."""
    return uuid.uuid4().hex


def with_usage(result: Any, http_request_id: str) -> Any:
    """`result` of a serving method, with the accepted and rejected prediction tokens of its HTTP request.

    result: a response object (chat completion, completion, response), which is completed in place; an error,
        which is left alone; or an async generator of a stream, for which another one is returned: of
        server-sent events (strings), or of the event objects of /v1/responses. Only the last usage of a stream
        is completed: the chunk without choices, the response of the final event.

    Added are, to `usage.completion_tokens_details` (of a response: `usage.output_tokens_details`)

        accepted_prediction_tokens    tokens of the prediction that the engine verified and the output has
        rejected_prediction_tokens    ... and the output does not have

    summed over all choices. A request without a prediction has neither, and of `GPU_ALIGN_USAGE_DETAILS` what was
    drafted for it all the same. Nothing is added where the engine reported nothing.
    """
    if hasattr(result, "__aiter__"):
        return _stream(result, http_request_id)
    unless_it_fails("complete the usage of a response", _complete_result, result, http_request_id)
    return result


def _complete_result(result: Any, http_request_id: str) -> None:
    usage = collector.take(http_request_id)
    if usage is not None:
        _complete_object(getattr(result, "usage", None), usage)


async def _stream(events: Any, http_request_id: str) -> AsyncIterator[Any]:
    try:
        async for event in events:
            completed = unless_it_fails(
                "complete the usage of a stream", _complete_event, event, http_request_id
            )
            yield event if completed is None else completed
    finally:
        unless_it_fails("forget a request", collector.take, http_request_id)
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
        usage = collector.take(http_request_id)
        if usage is not None:
            _complete_object(response.usage, usage)
    return event


def _complete_chunk(event: str, http_request_id: str) -> str:
    chunk = json.loads(event.removeprefix("data: "))
    if chunk.get("choices") != [] or not isinstance(chunk.get("usage"), dict):
        return event
    usage = collector.take(http_request_id)
    fields = {} if usage is None else _fields(usage)
    if usage is None or not fields:
        return event
    shown = chunk["usage"]
    details = {"reasoning_tokens": 0, **(shown.get("completion_tokens_details") or {}), **fields}
    shown["completion_tokens_details"] = details
    if extra := _billed(usage):
        shown["completion_tokens"] = (shown.get("completion_tokens") or 0) + extra
        shown["total_tokens"] = shown.get("total_tokens", 0) + extra
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _complete_object(shown: Any, usage: RequestUsage) -> None:
    """Complete a `UsageInfo` or a `ResponseUsage`; their models take further fields."""
    fields = _fields(usage)
    if shown is None or not fields:
        return
    output_tokens = "completion_tokens"
    if hasattr(shown, "output_tokens_details"):
        output_tokens, details = "output_tokens", shown.output_tokens_details
    else:
        if shown.completion_tokens_details is None:
            shown.completion_tokens_details = _empty_details()
        details = shown.completion_tokens_details
    for name, value in fields.items():
        setattr(details, name, value)
    if extra := _billed(usage):
        setattr(shown, output_tokens, (getattr(shown, output_tokens) or 0) + extra)
        shown.total_tokens += extra


def _empty_details() -> Any:
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    return CompletionTokenUsageInfo()


def _fields(usage: RequestUsage) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if usage.predicted:
        accepted, rejected = usage.of_prediction
        fields = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if _settings().usage_details:
        by_source = usage.by_source()
        fields[DETAILS] = {"steps": usage.steps, "drafted": usage.drafted, "by_source": by_source}
    return fields


def _billed(usage: RequestUsage) -> int:
    """Tokens that are billed though they are not output."""
    return usage.of_prediction[1] if _settings().bill_rejected else 0


@functools.cache
def _settings() -> Settings:
    return Settings.from_env()

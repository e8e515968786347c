"""What a prediction was worth, in the `usage` of the response that it came with."""

from __future__ import annotations

from typing import Any


def new_tag() -> str:
    """A name for one HTTP request, unique among all front ends: goes into `wire.Prediction.tag`."""
    import uuid

    return uuid.uuid4().hex


def with_usage(result: Any, tag: str) -> Any:
    """`result` of a serving method (a response object, an error, or an async generator of server-sent
    events) with the accepted and rejected prediction tokens of the request `tag` in its usage."""
    return result

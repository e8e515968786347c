"""The text of the `prediction` field.

    {"type": "content", "content": "text" | [{"type": "text", "text": "text"}, …]}

Text parts are joined as they are; CR LF and lone CR become LF; empty content is no prediction; keys that
are not known are ignored. Whatever else differs from this shape is a `PredictionError`. The functions
here take time in proportion to the text, which may have megabytes: call them from a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, StrictStr, TypeAdapter, ValidationError

from vllm_integration.frontend.limits import Limits, PredictionError
from vllm_integration.wire import prediction as wire


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(_Lenient):
    """One part of a prediction given as an array."""

    type: Literal["text"]
    text: StrictStr


class PredictionContent(_Lenient):
    """The `prediction` field: `{"type": "content", "content": str | [TextPart, …]}`."""

    type: Literal["content"]
    content: Any


# Stops at the first bad part: a client must not make the server write a million error messages.
_PARTS = TypeAdapter(Annotated[list[TextPart], FailFast()])


def parse_prediction(value: object, limits: Limits, *, plain_text: bool = False) -> str:
    """The text of a `prediction` field; empty when there is nothing to predict from.

    plain_text: whether the field may also be the text itself, as on /v1/completions.

    Over a limit only what fits is looked at, or `PredictionError` where `limits.strict`.
    """
    if plain_text and isinstance(value, str):
        return checked_text("prediction", [value], limits)
    if not isinstance(value, dict):
        shape = 'a string or {"type": "content", …}' if plain_text else '{"type": "content", …}'
        raise PredictionError(f"prediction: expected {shape}, got {type_name(value)}")
    content = value.get("content")
    if isinstance(content, list) and len(content) > limits.parts:
        limits.exceeded("prediction.content", "parts", limits.parts)
        content = content[: limits.parts]
        value = {**value, "content": content}
    if _deeper_than(value, limits.depth):
        limits.exceeded("prediction", "nesting", limits.depth)
    try:
        PredictionContent.model_validate(value)
    except ValidationError as error:
        raise PredictionError(_explain(error, "prediction")) from None
    if isinstance(content, str):
        return checked_text("prediction.content", [content], limits)
    if not isinstance(content, list):
        raise PredictionError(
            f"prediction.content: expected a string or an array of text parts, got {type_name(content)}"
        )
    try:
        parts = _PARTS.validate_python(content)
    except ValidationError as error:
        raise PredictionError(_explain(error, "prediction.content")) from None
    return checked_text("prediction.content", (part.text for part in parts), limits)


def checked_text(where: str, pieces: Iterable[str], limits: Limits) -> str:
    """`pieces` joined, cut to the limit, checked to be Unicode, with LF as the only end of a line."""
    kept, remaining = [], limits.characters
    for piece in pieces:
        kept.append(piece[:remaining])
        remaining -= len(piece)
        if remaining < 0:
            limits.exceeded(where, "characters", limits.characters)
            break
    text = "".join(kept)
    try:
        wire.check_text(where, text)
    except ValueError as error:
        raise PredictionError(str(error)) from None
    return wire.normalise_newlines(text)


def _deeper_than(value: object, limit: int) -> bool:
    """Whether arrays and objects nest more than `limit` deep. O(size), without recursion."""
    level = [value]
    for _ in range(limit):
        level = [child for container in level for child in _containers_in(container)]
        if not level:
            return False
    return True


def _containers_in(container: Any) -> Iterable[Any]:
    children = container.values() if isinstance(container, dict) else container
    return (child for child in children if isinstance(child, (dict, list)))


def _explain(error: ValidationError, where: str) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}"
    if first["type"] == "missing":
        return f"{where}: expected, but missing"
    message = first["msg"].removeprefix("Input should be ")
    return f"{where}: expected {message[0].lower()}{message[1:]}, got {type_name(first['input'])}"


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, (int, float)) else type(value).__name__)

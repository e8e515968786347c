"""What fails in the front end besides reading a prediction costs numbers, and never an answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, StrictStr, TypeAdapter, ValidationError

from ..config.settings import CHARS_PER_TOKEN, MAX_PACKS, Settings, known_names
from ..seams.install import Guard, strict
from ..wire import request as wire

logger = logging.getLogger("vllm.gpu_align")

#: Of this process. A fault that returns with each output must not fill the log.
guard = Guard("(told once)", retries=True)


def serve_without_prediction(what: str, error: Exception) -> None:
    """Whatever else fails about a prediction: it is a hint, which must not cost the client the answer. The message
    of the error is not shown, it might repeat the prediction."""
    if strict():
        raise error
    logger.warning("%s is served without its prediction: %s", what, type(error).__name__)


#: Which limit it was; or the field was "malformed", or of a request that cannot have one ("unsupported").
Reason = Literal["characters", "tokens", "parts", "nesting", "bytes", "items", "malformed", "unsupported"]
#: "truncated": served with what fits. "refused": an HTTP error, or an exception of the offline API.
Action = Literal["truncated", "refused"]

#: Predictions of this front end that were cut or refused, by (reason, action).
counts: Counter[tuple[Reason, Action]] = Counter()
#: Called with (reason, action) after each count. Any thread may call it.
on_count: list[Callable[[Reason, Action], None]] = []


def count_refused(reason: Reason, action: Action = "refused") -> None:
    """Count a prediction that was cut or refused."""
    counts[reason, action] += 1
    for callback in on_count:
        guard.run("could not count a refused prediction", callback, reason, action)


class PredictionError(ValueError):
    """A prediction that is refused; the message names the field, what was expected and what was found.

    The message never repeats what the client sent, only types, places and sizes.
    """

    def __init__(self, message: str, reason: Reason = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """The limits of one prediction. Over a limit it is cut; with `strict` it is refused.

    characters: of its text, before newlines are normalised. tokens: at most what the drafter and the
    model's context hold. parts: of its content, if that is an array. depth: levels of nesting of the field;
    the documented shape has 3, deeper is only what is ignored anyway.
    """

    characters: int
    tokens: int
    parts: int
    depth: int
    strict: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> Limits:
        """The limits of an engine, by its context length and the `GPU_ALIGN_*` variables."""
        settings = Settings.from_env()
        tokens = settings.prediction_capacity(vllm_config.model_config.max_model_len)
        return cls(
            characters=settings.max_prediction_chars or CHARS_PER_TOKEN * tokens,
            tokens=tokens,
            parts=settings.max_prediction_parts,
            depth=settings.max_prediction_depth,
            strict=settings.strict_limits,
        )

    def exceeded(self, where: str, reason: Reason, limit: int) -> None:
        """Count what the caller is about to cut. Raises `PredictionError` instead when strict."""
        message = f"{where}: expected at most {limit} {_UNITS[reason]}, got more"
        if self.strict:
            raise PredictionError(message, reason)
        count_refused(reason, "truncated")
        logger.warning("A prediction is cut: %s", message)


_UNITS: dict[Reason, str] = {
    "characters": "characters",
    "tokens": "tokens",
    "parts": "parts",
    "nesting": "levels of nesting",
    "bytes": "bytes",
}


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


KEYS = (wire.RECIPES_KEY, wire.MEMORY_KEY)


class ChoiceError(ValueError):
    """A choice that is refused; the message names the field, what was expected and what was found, and never
    repeats what the client sent.

    parameter: the field.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class Choices:
    """recipes: names of packs, each once; None: not chosen. memory: False: takes no part; None: not chosen."""

    recipes: tuple[str, ...] | None = None
    memory: bool | None = None

    def __bool__(self) -> bool:
        return self.recipes is not None or self.memory is not None

    def put_into(self, prediction: wire.Prediction) -> wire.Prediction:
        return replace(prediction, recipes=self.recipes, memory=self.memory) if self else prediction


def choices_of(extra_args: Mapping[str, Any]) -> Choices:
    """What `vllm_xargs` or `extra_args` choose. Raises `ChoiceError`."""
    recipes = extra_args.get(wire.RECIPES_KEY)
    memory = extra_args.get(wire.MEMORY_KEY)
    return Choices(None if recipes is None else _names(recipes), None if memory is None else _flag(memory))


def check_known(choices: Choices, settings: Settings) -> None:
    """Raise `ChoiceError` for a pack that the server does not have, where this process knows which it has.

    The first call for a request that names packs reads them: call it from a thread.
    """
    if not choices.recipes:
        return
    known = known_names(settings)
    if known is not None and not set(choices.recipes) <= set(known):
        has = f"names out of {', '.join(known)}" if known else "no names, the server has no recipes"
        raise ChoiceError(f"recipes: expected {has}, got another one", wire.RECIPES_KEY)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise ChoiceError(
            f"recipes: expected an array of names, got {type(value).__name__}", wire.RECIPES_KEY
        )
    if len(value) > MAX_PACKS:
        raise ChoiceError(f"recipes: expected at most {MAX_PACKS} names, got {len(value)}", wire.RECIPES_KEY)
    for index, name in enumerate(value):
        if not isinstance(name, str) or not name:
            found = "an empty one" if name == "" else type(name).__name__
            raise ChoiceError(f"recipes[{index}]: expected a name, got {found}", wire.RECIPES_KEY)
    return tuple(dict.fromkeys(value))


def _flag(value: object) -> bool | None:
    """vLLM makes 0 and 1 of JSON's booleans. `true` is the default."""
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ChoiceError("memory: expected a boolean, got something else", wire.MEMORY_KEY)
    return None if value else False

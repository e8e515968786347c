"""What a request says to us, read and checked: its prediction, within limits, and what it chooses beside it.

What fails in the front end besides that costs numbers, and never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..config.settings import CHARS_PER_TOKEN, MAX_PACKS, Settings, known_names
from ..seams.install import Guard, strict
from ..wire import request as wire
from . import metrics

logger = logging.getLogger("vllm.gpu_align")

#: Of this process. A fault that returns with each output must not fill the log.
guard = Guard("(told once)", retries=True)
FIELD = "prediction"
#: What a client chooses beside it.
KEYS = (wire.RECIPES_KEY, wire.MEMORY_KEY, wire.SWITCH_KEY)
#: HTTP header that says the last of these, where the body does not.
HEADER = "x-gpu-align"
_ON, _OFF = (1, "on"), (0, "off")
#: Key of `vllm_xargs`: whether a request without a prediction drafts from its own messages.
CONVERSATION = "conversation"


def serve_without_prediction(what: str, error: Exception) -> None:
    """Whatever else fails about a prediction costs no answer. The error's message might repeat the prediction."""
    if strict():
        raise error
    logger.warning("%s is served without its prediction: %s", what, type(error).__name__)


def count_refused(reason: str, action: str = "refused") -> None:
    """One of `metrics.REFUSED`."""
    guard.run("could not count a refused prediction", metrics.count_refused, reason, action)


class FieldError(ValueError):
    """A field of a request that is refused. The message never repeats what the client sent, only types, places and
    sizes. reason: as `metrics.REFUSED` has it, where the parameter is the prediction."""

    def __init__(self, message: str, reason: str = "malformed", parameter: str = FIELD) -> None:
        super().__init__(message)
        self.parameter, self.reason = parameter, reason

    def count(self) -> None:
        if self.parameter == FIELD:
            count_refused(self.reason)


@dataclass(frozen=True)
class Limits:
    """The limits of one prediction. Over a limit it is cut; with `GPU_ALIGN_STRICT_LIMITS` it is refused."""

    tokens: int
    settings: Settings

    @classmethod
    def of(cls, vllm_config: Any) -> Limits:
        settings = Settings.of(vllm_config)
        return cls(settings.prediction_capacity(vllm_config.model_config.max_model_len), settings)

    @property
    def characters(self) -> int:
        """Of its text, before newlines are normalised."""
        return self.settings.max_prediction_chars or CHARS_PER_TOKEN * self.tokens

    def exceeded(self, where: str, reason: str, limit: int) -> None:
        """Count what the caller is about to cut. Raises `FieldError` instead when strict."""
        unit = "levels of nesting" if reason == "nesting" else reason
        message = f"{where}: expected at most {limit} {unit}, got more"
        if self.settings.strict_limits:
            raise FieldError(message, reason)
        count_refused(reason, "truncated")
        logger.warning("A prediction is cut: %s", message)


def parse_prediction(value: object, limits: Limits, *, plain_text: bool = False) -> str:
    """The text of a `prediction` field; empty when there is nothing to predict from. Its shape, besides further
    keys, which are ignored: `{"type": "content", "content": str | [{"type": "text", "text": str}, …]}`.

    plain_text: whether the field may also be the text itself, as on /v1/completions.

    Over a limit only what fits is looked at, or `FieldError` where limits are strict.
    """
    if plain_text and isinstance(value, str):
        return checked_text(FIELD, [value], limits)
    if not isinstance(value, dict):
        shape = 'a string or {"type": "content", …}' if plain_text else '{"type": "content", …}'
        raise FieldError(f"prediction: expected {shape}, got {type_name(value)}")
    content, where = value.get("content"), "prediction.content"
    parts, depth = limits.settings.max_prediction_parts, limits.settings.max_prediction_depth
    if isinstance(content, list) and len(content) > parts:
        limits.exceeded(where, "parts", parts)
        value = {**value, "content": content[:parts]}
    if _deeper_than(value, depth):  # the documented shape has 3 levels, deeper is only what is ignored anyway
        limits.exceeded(FIELD, "nesting", depth)
    content = _member(FIELD, value, "content", "content")
    if isinstance(content, str):
        return checked_text(where, [content], limits)
    if not isinstance(content, list):
        raise FieldError(f"{where}: expected a string or an array of text parts, got {type_name(content)}")
    pieces = [_member(f"{where}[{index}]", part, "text", "text") for index, part in enumerate(content)]
    for index, piece in enumerate(pieces):
        if not isinstance(piece, str):
            raise FieldError(f"{where}[{index}].text: expected a valid string, got {type_name(piece)}")
    return checked_text(where, pieces, limits)


def _member(where: str, value: Any, kind: str, name: str) -> Any:
    """What an object of `"type": kind` has under `name`."""
    if not isinstance(value, dict):
        raise FieldError(f"{where}: expected an object, got {type_name(value)}")
    if "type" in value and value["type"] != kind:
        found = type_name(value["type"])
        raise FieldError(f"{where}.type: expected '{kind}', got {'another ' * (found == 'string')}{found}")
    for key in ("type", name):
        if key not in value:
            raise FieldError(f"{where}.{key}: expected, but missing")
    return value[name]


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
        raise FieldError(str(error)) from None
    return wire.normalise_newlines(text)


def _deeper_than(value: object, limit: int) -> bool:
    """Whether arrays and objects nest more than `limit` deep. O(size), without recursion."""
    level: list[Any] = [value]
    while level and limit > 0:
        children = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [child for child in children if isinstance(child, (dict, list))]
        limit -= 1
    return bool(level)


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, (int, float)) else type(value).__name__)


def tokenize_params(limits: Limits) -> Any:
    """No special tokens; one token more than the limit is kept, to tell "cut" from "just fits"."""
    from vllm.renderers import TokenizeParams

    most = limits.tokens + 1
    return TokenizeParams(
        max_total_tokens=most, truncate_prompt_tokens=most, truncation_side="right", add_special_tokens=False
    )


def as_prediction(token_ids: list[int], limits: Limits, where: str = FIELD) -> wire.Prediction:
    """Token ids, at most `limits.tokens` of them, ready to travel."""
    if len(token_ids) > limits.tokens:
        limits.exceeded(where, "tokens", limits.tokens)
        token_ids = token_ids[: limits.tokens]
    try:
        return wire.Prediction(token_ids=wire.encode_token_ids(where, token_ids, tell=False))
    except (TypeError, ValueError) as error:
        raise FieldError(str(error)) from None


def choices_of(extra_args: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """What `vllm_xargs` or `extra_args` choose, as fields of a `wire.Prediction`: `recipes`, names of packs, each
    once, `memory`, False where the request takes no part, and `drafts`, whether anything is drafted for it. Raises
    `FieldError`, also for a pack that the server does not have, where this process knows which it has.

    The first call for a request that names packs reads them: call it from a thread.
    """
    chosen: dict[str, Any] = {}
    recipes, memory, switch = map(extra_args.get, KEYS)
    if recipes is not None:
        chosen[wire.RECIPES_KEY] = _names(recipes)
        known = known_names(settings) if chosen[wire.RECIPES_KEY] else None
        if known is not None and not set(chosen[wire.RECIPES_KEY]) <= set(known):
            has = f"names out of {', '.join(known)}" if known else "no names, the server has no recipes"
            raise _bad_recipes(f"recipes: expected {has}, got another one")
    if memory is not None:
        # vLLM makes 0 and 1 of JSON's booleans. `true` is the default.
        if not isinstance(memory, (bool, int)) or memory not in (0, 1):
            raise FieldError("memory: expected a boolean, got something else", parameter=wire.MEMORY_KEY)
        if not memory:
            chosen[wire.MEMORY_KEY] = False
    if switch is not None:
        if switch not in (*_ON, *_OFF):
            raise FieldError(
                'gpu_align: expected "on" or "off", got something else', parameter=wire.SWITCH_KEY
            )
        chosen["drafts"] = switch in _ON
        if not chosen["drafts"]:
            chosen[wire.MEMORY_KEY] = False
    return chosen


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise _bad_recipes(f"recipes: expected an array of names, got {type(value).__name__}")
    if len(value) > MAX_PACKS:
        raise _bad_recipes(f"recipes: expected at most {MAX_PACKS} names, got {len(value)}")
    for index, name in enumerate(value):
        if not isinstance(name, str) or not name:
            found = "an empty one" if name == "" else type(name).__name__
            raise _bad_recipes(f"recipes[{index}]: expected a name, got {found}")
    return tuple(dict.fromkeys(value))


def _bad_recipes(message: str) -> FieldError:
    return FieldError(message, parameter=wire.RECIPES_KEY)

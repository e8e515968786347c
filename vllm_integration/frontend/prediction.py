"""The plugin's fields of a JSON request, taken out of it, read and checked: its prediction, within
limits, and what it chooses beside it. It takes time in proportion to the document.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpu_align.ops.layout import FIRST_GAP
from gpu_align.texts import views
from gpu_align.texts.several import MAX_TEXTS, joined

from ..config.settings import CHARS_PER_TOKEN, MAX_PACKS, Settings, packs_of
from ..seams.guard import Guard, logger, strict, warn_once
from ..wire import request as wire
from . import metrics

FIELD = "prediction"
#: What a client chooses beside it.
KEYS = (wire.RECIPES_KEY, wire.MEMORY_KEY, wire.SWITCH_KEY)
#: HTTP header that says the last of these, where the body does not.
HEADER = b"x-gpu-align"
_ON, _OFF = ("on", "true", "1", "1.0"), ("off", "false", "0", "0.0")
#: Where token ids are.
XARGS = f"vllm_xargs.{wire.KEY}"
_JSON_FORMATS = ("json_object", "json_schema", "structural_tag")
#: Key of `vllm_xargs`: whether a request without a prediction drafts from its own messages.
CONVERSATION = "conversation"
#: All keys of `vllm_xargs` and `extra_args` that are ours.
OURS = (wire.KEY, CONVERSATION, *KEYS)

#: Where a prediction is read; on the last are the same requests, as SageMaker sends them.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)
#: Endpoints that generate, or prepare what is generated, and have no place for a prediction.
UNSUPPORTED_ENDPOINTS = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/v1/systemone",
    "/generative_scoring",
)


#: What fails in them costs a look at a request, or counts, and never a response.
reading = Guard("requests", "does not look at a request", core=True, then=metrics.show_faults)
counting = Guard("counts", "does not count", core=True, then=metrics.show_faults)


def serve_without_prediction(what: str, error: Exception) -> None:
    """Other failures cost no answer. The error's message might repeat the prediction."""
    if strict():
        raise error
    logger.warning("%s is served without its prediction: %s", what, type(error).__name__)


def count_refused(reason: str, action: str = "refused") -> None:
    """One of `metrics.REFUSED`."""
    counting.run(metrics.count_refused, reason, action)


class Taken(NamedTuple):
    """prediction: what a request brings and chooses. body: its body without that. document: to be drafted from.
    forms: whether from its messages, too."""

    prediction: wire.Prediction | None = None
    body: bytes | None = None
    document: dict[str, Any] | None = None
    forms: bool = False


class FieldError(ValueError):
    """A field of a request that is refused. The message never repeats what the client sent, only types, places and
    sizes. reason: as `metrics.REFUSED` has it, where the parameter is the prediction. code: the HTTP status."""

    def __init__(
        self, message: str, reason: str = "malformed", parameter: str = FIELD, code: int = 400
    ) -> None:
        super().__init__(message)
        self.parameter, self.reason, self.code = parameter, reason, code

    def count(self) -> None:
        if self.parameter == FIELD:
            count_refused(self.reason)


def unsupported(endpoint: str) -> FieldError:
    return FieldError(f"{FIELD}: {endpoint} does not take a prediction", "unsupported")


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
        message = f"{where}: expected at most {limit} {reason}, got more"
        if self.settings.strict_limits:
            raise FieldError(message, reason)
        count_refused(reason, "truncated")
        logger.warning("A prediction is cut: %s", message)


def parse_prediction(value: object, limits: Limits, *, plain_text: bool = False) -> list[str]:
    """The texts of a `prediction` field. Its shape, besides further keys, which are ignored:
    `{"type": "content", "content": str | [{"type": "text", "text": str}, …]}`, and of ours
    `"alternatives": [str, …]`, other texts that the answer may be. plain_text: or the text itself, as on
    /v1/completions."""
    if plain_text and isinstance(value, str):
        return checked_texts({FIELD: value}, limits)
    if not isinstance(value, dict):
        shape = 'a string or {"type": "content", …}' if plain_text else '{"type": "content", …}'
        raise FieldError(f"prediction: expected {shape}, got {type_name(value)}")
    where = "prediction.content"
    content = _member(FIELD, value, "content", "content")
    if isinstance(content, list):
        pieces = [_member(f"{where}[{index}]", part, "text", "text") for index, part in enumerate(content)]
        for index, piece in enumerate(pieces):
            if not isinstance(piece, str):
                raise FieldError(f"{where}[{index}].text: expected a valid string, got {type_name(piece)}")
        content = "".join(pieces)
    if not isinstance(content, str):
        raise FieldError(f"{where}: expected a string or an array of text parts, got {type_name(content)}")
    others = value.get("alternatives") or []
    if not isinstance(others, list):
        raise FieldError(f"{FIELD}.alternatives: expected an array of strings, got {type_name(others)}")
    return checked_texts({where: content, **_by_place(f"{FIELD}.alternatives", others)}, limits)


def _member(where: str, value: Any, kind: str, name: str) -> Any:
    """The member `name` of an object of `"type": kind`."""
    if not isinstance(value, dict):
        raise FieldError(f"{where}: expected an object, got {type_name(value)}")
    if "type" in value and value["type"] != kind:
        found = type_name(value["type"])
        raise FieldError(f"{where}.type: expected '{kind}', got {'another ' * (found == 'string')}{found}")
    for key in ("type", name):
        if key not in value:
            raise FieldError(f"{where}.{key}: expected, but missing")
    return value[name]


def _by_place(where: str, texts: Sequence[object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise FieldError(f"{where}[{index}]: expected a string, got {type_name(text)}")
        found[f"{where}[{index}]"] = text
    return found


def given_texts(where: str, given: object) -> dict[str, str] | None:
    """A text, or several, by their places; None for others. The first one of a list says which it is."""
    if isinstance(given, str):
        return {where: given}
    is_texts = isinstance(given, (list, tuple)) and isinstance(next(iter(given), None), str)
    return _by_place(where, given) if is_texts else None  # type: ignore[arg-type]


def checked_texts(texts: Mapping[str, str], limits: Limits) -> list[str]:
    """Texts by their places: cut to the limit of all, checked to be Unicode, with LF as end of a line; no empty
    ones."""
    if len(texts) > MAX_TEXTS:
        where = next(iter(texts)).partition("[")[0]
        raise FieldError(f"{where}: expected at most {MAX_TEXTS} texts, got {len(texts)}")
    kept, remaining = [], limits.characters
    for where, text in texts.items():
        kept.append(text[:remaining])
        remaining -= len(text)
        try:
            wire.check_text(where, kept[-1])
        except ValueError as error:
            raise FieldError(str(error)) from None
        if remaining < 0:
            limits.exceeded(where, "characters", limits.characters)
            break
    return [wire.normalise_newlines(text) for text in kept if text]


def type_name(value: object) -> str:
    """JSON's name of the type of a value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, (int, float)) else type(value).__name__)


def ids_of(renderer: Any, limits: Limits, text: str) -> list[int]:
    """The token ids of a text without special tokens; one more than the limit, to tell "cut" from "just fits"."""
    return list(renderer.tokenizer.encode(text, add_special_tokens=False)[: limits.tokens + 1])


def as_prediction(token_ids: object, limits: Limits, where: str = FIELD) -> wire.Prediction:
    """Token ids, or those of several texts, at most `limits.tokens` of them, ready to travel."""
    try:
        encoded, most = wire.encode_token_ids(where, token_ids, tell=False), 4 * limits.tokens
    except (TypeError, ValueError) as error:
        raise FieldError(str(error)) from None
    if len(encoded) > most:
        limits.exceeded(where, "tokens", limits.tokens)
    return wire.Prediction(token_ids=encoded[:most])


def choices_of(extra_args: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The choices of `vllm_xargs` or `extra_args`, as fields of a `wire.Prediction`. Raises `FieldError`. The
    first call with names of packs reads them: call it from a thread."""
    chosen: dict[str, Any] = {}
    recipes, memory, switch = map(extra_args.get, KEYS)
    if recipes is not None:
        chosen[wire.RECIPES_KEY] = names = _names(recipes)
        known = dict(packs_of(settings)) if names else {}
        # A pack that cannot be read here has no hash: its name is not known.
        if None not in known.values() and not set(names) <= known.keys():
            has = f"names out of {', '.join(known)}" if known else "no names, the server has no recipes"
            raise _bad_recipes(f"recipes: expected {has}, got another one")
    if flag(wire.MEMORY_KEY, memory) is False:  # `true` is the default
        chosen[wire.MEMORY_KEY] = False
    if switch is not None:
        said = str(switch).strip().lower()
        if said not in (*_ON, *_OFF):
            raise FieldError(
                'gpu_align: expected "on" or "off", got something else', parameter=wire.SWITCH_KEY
            )
        chosen |= {"drafts": True} if said in _ON else {"drafts": False, wire.MEMORY_KEY: False}
    return chosen


def flag(name: str, value: object) -> bool | None:
    """A boolean, which vLLM may have made a number of; None if it is missing."""
    if value is not None and (not isinstance(value, (bool, int)) or value not in (0, 1)):
        raise FieldError(f"{name}: expected a boolean, got something else", parameter=name)
    return None if value is None else bool(value)


_bad_recipes = functools.partial(FieldError, parameter=wire.RECIPES_KEY)


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


def expects_json(document: dict[str, Any]) -> bool:
    """Whether the answer may be a tool call, or has to be JSON."""
    choice = document.get("tool_choice")
    if document.get("tools") and choice != "none" and _of(choice, "type") != "none":
        return True
    formats = (_of(document.get(name), "format") for name in ("text", "output_config"))
    asked = (document.get("response_format"), *formats)
    return any(_of(each, "type") in _JSON_FORMATS for each in asked)


def _of(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else None


def views_for(value: object, text: str, document: dict[str, Any]) -> tuple[str, ...]:
    """Names of the views (`gpu_align.texts.views`) to draft from beside the text of a `prediction` field: those of
    its `views`, else JSON's where the answer may hold the text as a string of JSON."""
    where, names = f"{FIELD}.views", value.get("views") if isinstance(value, dict) else None
    if names is None:
        # Where the answer is JSON and no call of a tool, a text that is JSON is the answer itself.
        is_answer = text.lstrip().startswith(("{", "[")) and not document.get("tools")
        return ("json",) if text and expects_json(document) and not is_answer else ()
    if not isinstance(names, list):
        raise FieldError(f"{where}: expected an array of names, got {type_name(names)}")
    known, most = ", ".join(views.NAMES), len(views.NAMES)
    if len(names) > most:
        raise FieldError(f"{where}: expected at most {most} names, got {len(names)}; they are {known}")
    try:
        views.check_names(where, names)
    except ValueError as error:
        raise FieldError(str(error)) from None
    if names and not text:
        raise FieldError(f"{where}: expected no names with an empty prediction, got some of {known}")
    return tuple(names)


def ids_with_views(renderer: Any, limits: Limits, texts: Sequence[str], names: Sequence[str]) -> list[int]:
    """The ids of `texts`, then those of their views, as far as they are within the limit."""
    token_ids = joined((ids_of(renderer, limits, text) for text in texts), once=False)
    try:
        for view in (view for text in texts for view in views.make(text, names)):
            remaining = max(limits.tokens - len(token_ids), 0)
            ids = ids_of(renderer, limits, view[: limits.characters]) if remaining else []
            token_ids = [*token_ids, *ids[:remaining]]
            if not remaining or len(ids) > remaining or len(view) > limits.characters:
                count_refused("view", "truncated" if remaining else "dropped")
    except Exception as error:  # its message might repeat the text
        if strict():
            raise
        count_refused("view", "dropped")
        logger.warning("A prediction is used without its views: %s", type(error).__name__)
    return token_ids


def tokenised(
    renderer: Any, limits: Limits, texts: Sequence[str], names: Sequence[str] = ()
) -> wire.Prediction:
    """The prediction of checked texts and their views."""
    if not texts:
        return wire.Prediction()
    if renderer.tokenizer is None:
        given = f"expected token ids in {XARGS} or extra_args, there is no tokenizer for text"
        raise FieldError(f"{FIELD}: {given}", "unsupported")
    return as_prediction(ids_with_views(renderer, limits, texts, names), limits)


def take(body: bytes, endpoint: str, switch: str | None, vllm_config: Any, renderer: Any) -> Taken:
    """The prediction and choices of a request, and the other parts to draft from. A body that is no JSON object is
    left to vLLM. Raises `FieldError`. switch: the header's value."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return Taken()
    if endpoint in UNSUPPORTED_ENDPOINTS:
        if document.get(FIELD) is not None:
            raise unsupported(endpoint)
        return Taken()
    xargs = document.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, dict) else {}
    tell_near_misses(document, (FIELD,))
    tell_near_misses(xargs)
    ours = {key: xargs.pop(key) for key in OURS if key in xargs}
    if FIELD in document:
        ours[FIELD] = document.pop(FIELD)
    rest = json.dumps(document).encode() if ours else None
    if switch is not None:
        ours.setdefault(wire.SWITCH_KEY, switch)
    settings = Settings.of(vllm_config)
    choices = choices_of(ours, settings)
    converse = flag(CONVERSATION, ours.get(CONVERSATION))
    if converse is None:
        converse = settings.conversation
    nothing = wire.Prediction(**choices) if choices else None
    if choices.get("drafts") is False:
        return Taken(nothing, rest)
    beams = str(document.get("use_beam_search", False)).lower() in ("true", "1", "1.0", "yes", "y", "on", "t")
    if ours.get(FIELD) is not None or wire.KEY in ours:
        plain_text = endpoint == "/v1/completions" or (endpoint == ENDPOINTS[-1] and "prompt" in document)
        prediction = _prediction(ours, document, plain_text, vllm_config, renderer)
        if not prediction.is_empty:
            if beams:
                raise FieldError("prediction: cannot be combined with use_beam_search", "unsupported")
            return Taken(replace(prediction, **choices), rest, document)
    if beams:
        return Taken(None, rest)
    # Where nothing but earlier answers is asked for, these have the place.
    drafts = choices.get("drafts") or (settings.draft_without_prediction and not settings.memory_tokens)
    return Taken(nothing, rest, document if converse or drafts else None, bool(converse))


def _prediction(
    ours: dict[str, Any], document: dict[str, Any], plain_text: bool, vllm_config: Any, renderer: Any
) -> wire.Prediction:
    value, given, limits = ours.get(FIELD), ours.get(wire.KEY), Limits.of(vllm_config)
    if value is not None and given is not None:
        raise FieldError(f"prediction: expected the field or {XARGS}, got both")
    if value is not None:
        texts = parse_prediction(value, limits, plain_text=plain_text)
    elif (found := given_texts(XARGS, given)) is not None:
        texts = checked_texts(found, limits)
    elif isinstance(given, list):
        several = isinstance(next(iter(given), None), list)
        prediction = as_prediction(given, limits, XARGS)
        vocab_size = int(vllm_config.model_config.get_vocab_size())
        ids = wire.decode_token_ids(prediction.token_ids or b"")
        ids = ids[ids < FIRST_GAP] if several else ids
        if ids.size and ids.max() >= vocab_size:
            raise FieldError(f"{XARGS}: expected 0 ≤ token id < {vocab_size}, got others")
        return prediction
    else:
        raise FieldError(f"{XARGS}: expected an array of token ids or a string, got {type_name(given)}")
    return tokenised(renderer, limits, texts, views_for(value, texts[0] if texts else "", document))


def tell_near_misses(given: Iterable[Any], known: tuple[str, ...] = OURS) -> None:
    """Tell of keys that are close to one of ours, or to the field's name; others may be another plugin's."""
    for key in set(given).difference(known):
        if name := _near(str(key)[:64], known):
            warn_once(f"Unknown field of a request ignored; did you mean {name!r}?")


@functools.lru_cache(256)
def _near(key: str, known: tuple[str, ...]) -> str | None:
    found = difflib.get_close_matches(key, (*known, FIELD), 1, 0.8)
    return next((name if name in known else wire.KEY for name in found), None)

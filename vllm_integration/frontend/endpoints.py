"""How a prediction gets into a request: read, tokenised and attached before vLLM sees it, over HTTP and offline.

Over HTTP everything that takes time in proportion to the prediction runs in a thread. A prediction travels in
`request.vllm_xargs`, which vLLM itself turns into `SamplingParams.extra_args`.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from pydantic_core import SchemaSerializer, core_schema

from ..config.engine_config import V1_SCHEDULER
from ..config.in_use import drafts_predictions
from ..config.settings import Settings, drafts_without_prediction
from ..seams.install import are_whole, seam, shown_id
from ..wire import request as wire
from . import conversation, status
from . import usage as response_usage
from .body import BodyLimit, BodyScan
from .conversation import views_for, with_views
from .prediction import (
    CONVERSATION,
    FIELD,
    HEADER,
    KEYS,
    FieldError,
    Limits,
    as_prediction,
    checked_text,
    choices_of,
    count_refused,
    guard,
    parse_prediction,
    serve_without_prediction,
    tokenize_params,
    type_name,
)

logger = logging.getLogger("vllm.gpu_align")

XARGS = f"vllm_xargs.{wire.KEY}"
_NO_TOKENIZER = f"prediction: expected token ids in {XARGS} or extra_args, there is no tokenizer for text"

# How pydantic prints a request that carries one, which vLLM does at the DEBUG level: by its size, not as bytes.
wire.Prediction.__pydantic_serializer__ = SchemaSerializer(  # type: ignore[attr-defined]
    core_schema.any_schema(serialization=core_schema.plain_serializer_function_ser_schema(repr))
)


def without_predictions(record: logging.LogRecord) -> bool:
    """A filter of a logger: drops the traceback of a validation error whose request brings a prediction; the line
    stays."""
    error = record.exc_info[1] if record.exc_info else None
    try:
        brings_prediction = _brings_prediction(getattr(error, "body", None))
    except Exception:  # of a filter it would reach whoever logs
        brings_prediction = True
    if brings_prediction:
        record.exc_info = record.exc_text = None
        record.msg = f"{record.msg} (no traceback: the request brings a prediction)"
    return True


def _brings_prediction(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    xargs = body.get("vllm_xargs")
    return body.get(FIELD) is not None or (isinstance(xargs, dict) and wire.KEY in xargs)


def install_filter() -> None:
    """Again is harmless."""
    from vllm.entrypoints.serve.exception_handling.handlers import validation

    validation.logger.addFilter(without_predictions)


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(
    original: Callable[..., Any], args: Any, app: Any, *more: Any, **kwargs: Any
) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost: behind authentication, before parsing. An HTTP
    server starts here: it says what it is, and its log is kept free of predictions."""
    from starlette.middleware import Middleware

    guard.run("could not keep predictions out of tracebacks", install_filter)
    app.user_middleware.append(Middleware(BodyLimit))
    guard.run("could not say what it is", status.announce)
    return original(args, app, *more, **kwargs)


_of_every_conversation: ContextVar[wire.Prediction | None] = ContextVar("gpu_align_prediction", default=None)
#: The `prediction` of a request to `/v1/messages`.
_of_message: ContextVar[Any] = ContextVar("gpu_align_field", default=None)


@seam("chat.create_chat_completion", "responses.create_responses")
async def serve(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    raw_request: Any = None,
    *args: Any,
    plain_text: bool = False,
    many_conversations: bool = False,
    **kwargs: Any,
) -> Any:
    """A serving method `(self, request, raw_request=None)` with the field read first. A malformed prediction or
    choice is an HTTP 400 that names the field.

    plain_text: whether the field may be a string. many_conversations: whether vLLM makes a request of each
    conversation, which is then what the prediction is attached to (see `to_chat_completion_request`).
    """
    prediction = None
    try:
        if drafts_predictions(self.engine_client.vllm_config):
            if (given := _of_message.get()) is not None:
                setattr(request, FIELD, given)  # its model takes unknown fields
            headers = getattr(raw_request, "headers", {})
            prediction = await take(self, request, plain_text=plain_text, switch=headers.get(HEADER))
        elif (request.model_extra or {}).get(FIELD) is not None:
            _tell_once(
                "Requests bring predictions; this server does not draft from them (--speculative-config)"
            )
        if prediction is not None and not many_conversations:
            attach(request, prediction)
    except FieldError as error:
        error.count()
        return self.create_error_response(str(error), param=error.parameter)
    except Exception as error:
        serve_without_prediction(f"Request {shown_id(getattr(request, 'request_id', ''))}", error)
        prediction = None
    if prediction is None:
        return await original(self, request, raw_request, *args, **kwargs)
    if many_conversations:
        _of_every_conversation.set(prediction)  # in the context of this request's own task
    result = await original(self, request, raw_request, *args, **kwargs)
    return response_usage.with_usage(result, prediction.http_request_id or "")


serve_completion = seam("completions.create_completion")(functools.partial(serve, plain_text=True))
serve_batch = seam("batch.create_batch_chat_completion")(functools.partial(serve, many_conversations=True))


@seam("messages.create_messages")
async def serve_message(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`AnthropicServingMessages.create_messages`: the chat request that it makes gets the field. vLLM's model of a
    message has dropped it, so a body that has it is parsed again."""
    given = None
    try:
        if raw_request is not None and drafts_predictions(self.engine_client.vllm_config):
            scan = BodyScan()
            scan.feed(body := await raw_request.body())
            if scan.brings_prediction:
                given = (await asyncio.to_thread(json.loads, body)).get(FIELD)
    except Exception as error:
        serve_without_prediction("A message", error)
    token = _of_message.set(given)  # in the context of this request's own task
    try:
        return await original(self, request, raw_request, *args, **kwargs)
    finally:
        _of_message.reset(token)


def attach(request: Any, prediction: wire.Prediction) -> None:
    """Put a prediction where vLLM turns it into `SamplingParams.extra_args`."""
    request.vllm_xargs = {**(request.vllm_xargs or {}), wire.KEY: prediction}


@seam("batch.to_chat_completion_request")
def to_chat_completion_request(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`BatchChatCompletionRequest.to_chat_completion_request`: each conversation gets the prediction."""
    request = original(self, *args, **kwargs)
    prediction = _of_every_conversation.get()
    if prediction is not None:
        guard.run("could not give a prediction to a conversation", attach, request, prediction)
    return request


async def take(
    serving: Any, request: Any, *, plain_text: bool, switch: str | None = None
) -> wire.Prediction | None:
    """Take out of a request what is ours; None when it is served as it came. Raises `FieldError`.

    switch: what the header says of drafts for it, if anything."""
    # A field, or one more unknown key of a batch request.
    xargs = getattr(request, "vllm_xargs", None)
    xargs = xargs if isinstance(xargs, dict) else {}
    choices = {key: xargs.pop(key) for key in KEYS if key in xargs}
    if switch is not None:
        choices.setdefault(wire.SWITCH_KEY, switch.strip().lower())
    if choices:
        choices = await asyncio.to_thread(choices_of, choices, Settings.here())
    for given, known in ((request.model_extra or {}, (FIELD,)), (xargs, (wire.KEY, CONVERSATION, *KEYS))):
        for key in given.keys() - known:
            tell_misspelt(key, known)
    converses = conversation.asked_for(xargs.pop(CONVERSATION, None))
    if choices.get("drafts") is False:
        for given in (request.model_extra or {}, xargs):
            for key in (FIELD, wire.KEY):
                given.pop(key, None)
        return wire.Prediction(token_ids=b"", **choices)
    prediction = None
    if (request.model_extra or {}).get(FIELD) is not None or wire.KEY in xargs:
        prediction = await take_prediction(serving, request, xargs, plain_text=plain_text)
    elif getattr(request, "use_beam_search", False):
        return None
    if prediction is None and converses and not getattr(request, "use_beam_search", False):
        try:
            prediction = await conversation.predict(serving, request)
        except Exception as error:
            count_refused("conversation", "dropped")
            serve_without_prediction("A conversation", error)
    if prediction is None:
        if not choices and not (drafts_without_prediction() and Settings.here().usage_details):
            return None
        prediction = wire.Prediction(token_ids=b"")
    # One name for its usage, unique among all front ends.
    return replace(prediction, **choices, http_request_id=uuid.uuid4().hex)


def tell_misspelt(key: object, known: Sequence[str]) -> None:
    """Log that vLLM drops an unknown field whose name resembles one of ours; each of ours once a process."""
    for name in difflib.get_close_matches(str(key)[:64], known, 1, 0.8):
        _tell_once(
            f"A request has an unknown field that resembles {name!r}, and vLLM ignores it: a misspelling?"
        )


@functools.cache
def _tell_once(message: str) -> None:
    logger.warning(message)


async def take_prediction(
    serving: Any, request: Any, xargs: dict[str, Any], *, plain_text: bool
) -> wire.Prediction | None:
    """Take the prediction of a request out of it, so that nothing holds the text while the answer is generated, or
    prints it; None when it is empty. Raises `FieldError`."""
    value, given = (request.model_extra or {}).pop(FIELD, None), xargs.pop(wire.KEY, None)
    if value is not None and given is not None:
        raise FieldError(f"prediction: expected the field or {XARGS}, got both")
    vllm_config = serving.engine_client.vllm_config
    allowed = Limits.of(vllm_config)
    if value is None and not isinstance(given, str):
        vocab_size = int(vllm_config.model_config.get_vocab_size())
        prediction = await asyncio.to_thread(_check_ids, given, vocab_size, allowed)
    else:
        if value is not None:
            text = await asyncio.to_thread(parse_prediction, value, allowed, plain_text=plain_text)
        else:
            text = await asyncio.to_thread(checked_text, XARGS, [given], allowed)
        names = views_for(value, text, request)
        if not text:
            return None
        if serving.renderer.tokenizer is None:
            raise FieldError(_NO_TOKENIZER, "unsupported")

        async def tokenize(text: str) -> list[int]:
            prompt = await serving.renderer.tokenize_prompt_async({"prompt": text}, tokenize_params(allowed))
            return list(prompt["prompt_token_ids"])

        token_ids = await with_views(await tokenize(text), text, names, allowed, tokenize)
        prediction = await asyncio.to_thread(as_prediction, token_ids, allowed)
    if prediction.is_empty:
        return None
    if getattr(request, "use_beam_search", False):
        raise FieldError("prediction: cannot be combined with use_beam_search", "unsupported")
    return prediction


def _check_ids(given: object, vocab_size: int, allowed: Limits) -> wire.Prediction:
    if not isinstance(given, list):
        raise FieldError(f"{XARGS}: expected an array of token ids or a string, got {type_name(given)}")
    prediction = as_prediction(given, allowed, XARGS)
    ids = wire.decode_token_ids(prediction.token_ids or b"")
    if ids.size and ids.max() >= vocab_size:
        raise FieldError(f"{XARGS}: expected 0 ≤ token id < {vocab_size}, got others")
    return prediction


#: The configuration of the engine that a request goes to, while it is checked; None where it is not one of ours.
engine_of_request: ContextVar[Any] = ContextVar("engine_of_request", default=None)


@seam("inputs.process_inputs")
def process_inputs(
    original: Callable[..., Any],
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`InputProcessor.process_inputs`, with a text prediction in `params.extra_args` tokenised first, and with an
    empty prediction where a request without one is drafted for. The caller's params stay as they are."""
    if not drafts_predictions(self.vllm_config):
        return original(self, request_id, prompt, params, *args, **kwargs)
    try:
        params = _prepared(self, params)
    except FieldError as error:
        from vllm.exceptions import VLLMValidationError

        error.count()
        raise VLLMValidationError(str(error), parameter=error.parameter) from None
    except Exception as error:
        serve_without_prediction(f"Request {shown_id(request_id)}", error)
        if getattr(params, "extra_args", None):
            params = wire.with_extra_args(params, dict.fromkeys((wire.KEY, *KEYS)))
    outer = engine_of_request.set(self.vllm_config)
    try:
        return original(self, request_id, prompt, params, *args, **kwargs)
    finally:
        engine_of_request.reset(outer)


def _prepared(processor: Any, params: Any) -> Any:
    """`params` with what the engine shall know; the caller's own where that is nothing."""
    extra_args = getattr(params, "extra_args", None) or {}
    prediction = _with_token_ids(processor, extra_args[wire.KEY]) if wire.KEY in extra_args else None
    if any(key in extra_args for key in KEYS):
        choices = choices_of(extra_args, Settings.here())
        prediction = replace(prediction or wire.Prediction(token_ids=b""), **choices)
    if extra_args.get(CONVERSATION):
        message = f"{CONVERSATION}: expected over HTTP; offline the texts can be the prediction"
        raise FieldError(message, "unsupported", parameter=CONVERSATION)
    given = prediction or wire.Prediction(token_ids=b"")
    # Without a prediction it is drafted for where that is asked for, and a draft can become output.
    max_tokens = getattr(params, "max_tokens", None)
    is_drafted_for = not given.is_empty or (
        hasattr(params, "extra_args")
        and (max_tokens is None or max_tokens > 1)
        and (given.drafts or drafts_without_prediction(given.recipes, given.memory))
    )
    kept = given if is_drafted_for and given.drafts is not False else None
    if given.drafts is False and Settings.here().draft_without_prediction:
        kept = wire.Prediction(token_ids=b"", drafts=False, memory=False)
    # Where nothing is drafted for a request, its answer may still be one that is not to be remembered.
    apart = kept is None and given.memory is False
    changes: dict[str, Any] = {**dict.fromkeys(KEYS), wire.KEY: kept}
    changes[wire.MEMORY_KEY] = False if apart else None
    if kept is None and not changes.keys() & extra_args.keys():
        return params
    return wire.with_extra_args(params, changes)


#: Fields of a `wire.Prediction` that no client sets.
_OURS = set(wire.Prediction.__dataclass_fields__) - {"token_ids", "text"}


def _with_token_ids(processor: Any, value: Any) -> wire.Prediction:
    if isinstance(value, Mapping):  # a client's: the rest is ours to say
        value = {name: value[name] for name in value if name not in _OURS}
    try:
        prediction = wire.read(value)
    except (TypeError, ValueError) as error:
        raise FieldError(str(error)) from None
    if prediction.text is None:
        return prediction
    if processor.renderer.tokenizer is None:
        raise FieldError(_NO_TOKENIZER, "unsupported")
    limits = Limits.of(processor.vllm_config)
    text = checked_text(FIELD, [prediction.text], limits)
    prompt = processor.renderer.tokenize_prompt({"prompt": text}, tokenize_params(limits))
    token_ids = as_prediction(prompt["prompt_token_ids"], limits).token_ids
    return replace(prediction, text=None, token_ids=token_ids)


@seam("parameters._validate_spec_decode")
def validate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`SamplingParams._validate_spec_decode`, which finds neither `min_p` nor `logit_bias`."""
    if (self.min_p or self.logit_bias) and _serves_them(engine_of_request.get()):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    return original(self, *args, **kwargs)


def _serves_them(vllm_config: Any) -> bool:
    """Whether the engine of this configuration does; None: of none of ours. On V1 our scheduler keeps vLLM's from
    planning placeholders for such a request, which would be verified like drafts."""
    if vllm_config is None or not drafts_predictions(vllm_config):
        return False
    if vllm_config.use_v2_model_runner:
        return True
    return vllm_config.scheduler_config.scheduler_cls == V1_SCHEDULER and are_whole(
        ("v1",), "gpu_align leaves min_p and logit_bias to vLLM"
    )

"""The `prediction` field of the OpenAI endpoints: read, tokenised and attached before vLLM sees the request.

Everything that takes time in proportion to the prediction runs in a thread. A prediction travels in
`request.vllm_xargs`, which vLLM itself turns into `SamplingParams.extra_args`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from pydantic_core import SchemaSerializer, core_schema

from ..config.in_use import drafts_predictions
from ..config.settings import Settings, drafts_without_prediction
from ..seams.install import seam, shown_id
from ..wire import request as wire
from . import prediction as limits
from . import status
from . import usage as response_usage
from .body import BodyLimit, BodyScan, RefusedPredictions
from .input_processor import as_prediction, tokenize_params
from .prediction import (
    KEYS,
    ChoiceError,
    Limits,
    PredictionError,
    check_known,
    checked_text,
    choices_of,
    guard,
    parse_prediction,
    serve_without_prediction,
    type_name,
)


class WithoutPredictions(logging.Filter):
    """Drops the traceback of a validation error whose request brings a prediction; the line stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        try:
            brings_prediction = _body_brings_prediction(getattr(error, "body", None))
        except Exception:  # of a filter it would reach whoever logs
            brings_prediction = True
        if brings_prediction:
            record.exc_info = record.exc_text = None
            record.msg = f"{record.msg} (no traceback: the request brings a prediction)"
        return True


def _body_brings_prediction(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    xargs = body.get("vllm_xargs")
    return body.get("prediction") is not None or (isinstance(xargs, dict) and wire.KEY in xargs)


def install() -> None:
    """Add the filter to vLLM's logger; again is harmless."""
    from vllm.entrypoints.serve.exception_handling.handlers import validation

    if not any(isinstance(known, WithoutPredictions) for known in validation.logger.filters):
        validation.logger.addFilter(WithoutPredictions())


logger = logging.getLogger("vllm.gpu_align")

FIELD = "prediction"

# How pydantic prints a request that carries one, which vLLM does at the DEBUG level: by its size, not as bytes.
wire.Prediction.__pydantic_serializer__ = SchemaSerializer(  # type: ignore[attr-defined]
    core_schema.any_schema(serialization=core_schema.plain_serializer_function_ser_schema(repr))
)


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
    """A serving method `(self, request, raw_request=None)` with the field read first.

    plain_text: whether the field may be a string. many_conversations: whether vLLM makes a request of each
    conversation, which is then what the prediction is attached to (see `to_chat_completion_request`).

    A malformed prediction or choice is an HTTP 400 that names the field. Requests that bring neither are passed on
    untouched, unless the usage of drafts without a prediction is asked for.
    """
    prediction = None
    try:
        if drafts_predictions(self.engine_client.vllm_config):
            if given := _of_message.get():
                _put_into(request, given)
            prediction = await take(self, request, plain_text=plain_text)
        if prediction is not None and not many_conversations:
            attach(request, prediction)
    except PredictionError as error:
        limits.count_refused(error.reason)
        return self.create_error_response(str(error), param=FIELD)
    except ChoiceError as error:
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

_of_every_conversation: ContextVar[wire.Prediction | None] = ContextVar("gpu_align_prediction", default=None)
#: What a client of `/v1/messages` sent beside vLLM's fields: `FIELD`, and ours of `vllm_xargs`.
_of_message: ContextVar[dict[str, Any] | None] = ContextVar("gpu_align_fields", default=None)


@seam("messages.create_messages")
async def serve_message(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`AnthropicServingMessages.create_messages`: the chat request that it makes gets the field.

    vLLM's model of the request has dropped it, so it is read from the body, which is parsed again if it has one.
    """
    given = None
    try:
        if raw_request is not None and drafts_predictions(self.engine_client.vllm_config):
            given = await _fields_of_body(await raw_request.body())
    except Exception as error:
        serve_without_prediction("A message", error)
    token = _of_message.set(given)  # in the context of this request's own task
    try:
        return await original(self, request, raw_request, *args, **kwargs)
    finally:
        _of_message.reset(token)


async def _fields_of_body(body: bytes) -> dict[str, Any] | None:
    scan = BodyScan()
    scan.feed(body)
    if not scan.brings_prediction and b"vllm_xargs" not in body:
        return None
    document = await asyncio.to_thread(json.loads, body)
    xargs = document.get("vllm_xargs")
    given = {key: xargs[key] for key in (wire.KEY, *KEYS) if key in xargs} if isinstance(xargs, dict) else {}
    return {FIELD: document.get(FIELD), **given}


def _put_into(request: Any, given: dict[str, Any]) -> None:
    xargs = dict(given)
    setattr(request, FIELD, xargs.pop(FIELD))  # its model takes unknown fields
    if xargs:
        request.vllm_xargs = {**(request.vllm_xargs or {}), **xargs}


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


def _xargs(request: Any) -> dict[str, Any]:
    """`vllm_xargs`, which is a field, or one more unknown key of a batch request; `{}` when there is none."""
    xargs = getattr(request, "vllm_xargs", None)
    return xargs if isinstance(xargs, dict) else {}


async def take(serving: Any, request: Any, *, plain_text: bool) -> wire.Prediction | None:
    """Take out of a request what is ours; None when it is served as it came. Raises `PredictionError` and
    `ChoiceError`."""
    xargs = _xargs(request)
    choices = choices_of({key: xargs.pop(key) for key in KEYS if key in xargs})
    if choices.recipes:
        await asyncio.to_thread(check_known, choices, Settings.from_env())
    prediction = None
    if (request.model_extra or {}).get(FIELD) is not None or wire.KEY in xargs:
        prediction = await take_prediction(serving, request, plain_text=plain_text)
    elif getattr(request, "use_beam_search", False):
        return None
    if prediction is None:
        if not choices and not (drafts_without_prediction() and Settings.from_env().usage_details):
            return None
        prediction = wire.Prediction(token_ids=b"")
    # One name for its usage, unique among all front ends.
    return replace(choices.put_into(prediction), http_request_id=uuid.uuid4().hex)


async def take_prediction(serving: Any, request: Any, *, plain_text: bool) -> wire.Prediction | None:
    """Take the prediction of a request out of it; None when it is empty. Raises `PredictionError`.

    It is taken out so that nothing holds the text while the answer is generated, or prints it.
    """
    value = (request.model_extra or {}).pop(FIELD, None)
    given = _xargs(request).pop(wire.KEY, None)
    if value is not None and given is not None:
        raise PredictionError(f"prediction: expected the field or vllm_xargs.{wire.KEY}, got both")
    vllm_config = serving.engine_client.vllm_config
    allowed = Limits.of(vllm_config)
    if value is not None:
        text = await asyncio.to_thread(parse_prediction, value, allowed, plain_text=plain_text)
        prediction = await _tokenise(serving, text, allowed)
    elif isinstance(given, str):
        text = await asyncio.to_thread(checked_text, f"vllm_xargs.{wire.KEY}", [given], allowed)
        prediction = await _tokenise(serving, text, allowed)
    else:
        vocab_size = int(vllm_config.model_config.get_vocab_size())
        prediction = await asyncio.to_thread(_check_ids, given, vocab_size, allowed)
    if prediction is not None and getattr(request, "use_beam_search", False):
        raise PredictionError("prediction: cannot be combined with use_beam_search", "unsupported")
    return prediction


async def _tokenise(serving: Any, text: str, allowed: Limits) -> wire.Prediction | None:
    if not text:
        return None
    if serving.renderer.tokenizer is None:
        raise PredictionError(
            f"prediction: expected token ids in vllm_xargs.{wire.KEY}, the server has no tokenizer for text",
            "unsupported",
        )
    params = tokenize_params(allowed.tokens)
    prompt = await serving.renderer.tokenize_prompt_async({"prompt": text}, params)
    return await asyncio.to_thread(as_prediction, prompt["prompt_token_ids"], allowed)


def _check_ids(given: object, vocab_size: int, allowed: Limits) -> wire.Prediction | None:
    where = f"vllm_xargs.{wire.KEY}"
    if not isinstance(given, list):
        raise PredictionError(f"{where}: expected an array of token ids or a string, got {type_name(given)}")
    if len(given) > allowed.tokens:
        allowed.exceeded(where, "tokens", allowed.tokens)
        given = given[: allowed.tokens]
    try:
        encoded = wire.encode_token_ids(where, given, tell=False)
    except (TypeError, ValueError) as error:
        raise PredictionError(str(error)) from None
    ids = wire.decode_token_ids(encoded)
    if ids.size and ids.max() >= vocab_size:
        raise PredictionError(f"{where}: expected 0 ≤ token id < {vocab_size}, got others")
    return wire.Prediction(token_ids=encoded) if ids.size else None


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(
    original: Callable[..., Any],
    args: Any,
    app: Any,
    supported_tasks: Sequence[str],
    *more: Any,
    **kwargs: Any,
) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost: behind authentication, before parsing.

    An HTTP server starts here, so this is also where it says what it is, and where its log is kept free of
    predictions.
    """
    from starlette.middleware import Middleware

    guard.run("could not keep predictions out of tracebacks", install)
    app.user_middleware += [Middleware(BodyLimit), Middleware(RefusedPredictions)]
    guard.run("could not say what it is", status.announce, args, app, supported_tasks)
    return original(args, app, supported_tasks, *more, **kwargs)

"""The `prediction` field of the OpenAI API.

    {"prediction": {"type": "content", "content": "text" | [{"type": "text", "text": "text"}, …]}}

Text parts are joined as they are; CR LF and lone CR become LF; empty content is no prediction; keys that
are not known are ignored. Whatever else differs from this shape is an HTTP 400 that names the field.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictStr, TypeAdapter, ValidationError

from vllm_integration import compat, inputs, response_usage, wire

logger = logging.getLogger("vllm.gpu_align")

MAX_PARTS = 10_000


class PredictionError(ValueError):
    """The `prediction` field is malformed; the message names the field, what was expected and found."""


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
_PARTS = TypeAdapter(Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


def parse_prediction(value: object) -> str:
    """The text of a `prediction` field; empty when there is nothing to predict from.

    Raises `PredictionError`. Its message never repeats what the client sent, only types and places.
    """
    if not isinstance(value, dict):
        raise PredictionError(f'prediction: expected {{"type": "content", …}}, got {_type_name(value)}')
    try:
        content = PredictionContent.model_validate(value).content
    except ValidationError as error:
        raise PredictionError(_explain(error, "prediction")) from None
    if isinstance(content, list):
        try:
            content = "".join(part.text for part in _PARTS.validate_python(content))
        except ValidationError as error:
            raise PredictionError(_explain(error, "prediction.content")) from None
    elif not isinstance(content, str):
        raise PredictionError(
            f"prediction.content: expected a string or an array of text parts, got {_type_name(content)}"
        )
    try:
        wire.check_text("prediction.content", content)
    except ValueError as error:
        raise PredictionError(str(error)) from None
    return wire.normalise_newlines(content)


def _explain(error: ValidationError, where: str) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}"
    if first["type"] == "missing":
        return f"{where}: expected, but missing"
    message = first["msg"].removeprefix("Input should be ")
    return f"{where}: expected {message[0].lower()}{message[1:]}, got {_type_name(first['input'])}"


def _type_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, (int, float)) else type(value).__name__)


def wrap_create_chat_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    """`OpenAIServingChat.create_chat_completion`, with the field read first.

    A valid prediction is tokenised off the event loop and put into `request.vllm_xargs`, which vLLM
    itself turns into `SamplingParams.extra_args`. Requests without the field, and engines that do not
    draft from predictions, are passed on untouched.
    """

    @functools.wraps(original)
    async def create_chat_completion(
        self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        value = (request.model_extra or {}).get("prediction")
        tag = None
        if value is not None and inputs.drafts_predictions(self.engine_client.vllm_config):
            try:
                tag = await attach_prediction(self, request, value)
            except PredictionError as error:
                return self.create_error_response(str(error), param="prediction")
            except Exception as error:
                if compat.strict():
                    raise
                # The prediction is a hint: failing to use it must not cost the client the answer.
                logger.warning(
                    "Request %s is served without its prediction: %s",
                    request.request_id,
                    type(error).__name__,
                )
        result = await original(self, request, raw_request, *args, **kwargs)
        return result if tag is None else response_usage.with_usage(result, tag)

    return create_chat_completion


async def attach_prediction(serving: Any, request: Any, value: object) -> str | None:
    """Validate, tokenise and attach the prediction of one chat request; its tag, or None when it is empty.

    Raises `PredictionError`.
    """
    text = parse_prediction(value)
    if request.use_beam_search:
        raise PredictionError("prediction: cannot be combined with use_beam_search")
    if not text:
        return None
    tag = response_usage.new_tag()
    limit = inputs.capacity(serving.engine_client.vllm_config)
    prompt = await serving.renderer.tokenize_prompt_async({"prompt": text}, inputs.tokenize_params(limit))
    prediction = inputs.as_prediction(prompt["prompt_token_ids"], limit, request.request_id, tag)
    request.vllm_xargs = {**(request.vllm_xargs or {}), wire.KEY: prediction}
    return tag


WRAPPERS: dict[str, compat.Wrapper] = {"chat.create": wrap_create_chat_completion}

"""Text predictions become token ids: the front end's part of it, and of the offline API all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ..config.engine_config import V1_SCHEDULER
from ..config.in_use import drafts_predictions
from ..config.settings import Settings, drafts_without_prediction
from ..seams.install import are_whole, seam, shown_id
from ..wire import request as wire
from .prediction import (
    KEYS,
    ChoiceError,
    Limits,
    PredictionError,
    check_known,
    checked_text,
    choices_of,
    count_refused,
    serve_without_prediction,
)

#: The configuration of the engine that a request goes to, while it is checked; None where it is not one of ours.
engine_of_request: ContextVar[Any] = ContextVar("engine_of_request", default=None)


def tokenize_params(limit: int) -> Any:
    """No special tokens; one token more than `limit` is kept, to tell "cut" from "just fits"."""
    from vllm.renderers import TokenizeParams

    return TokenizeParams(
        max_total_tokens=limit + 1,
        truncate_prompt_tokens=limit + 1,
        truncation_side="right",
        add_special_tokens=False,
    )


def as_prediction(token_ids: list[int], limits: Limits) -> wire.Prediction:
    """A tokenizer's ids, at most `limits.tokens` of them, ready to travel."""
    if len(token_ids) > limits.tokens:
        limits.exceeded("prediction", "tokens", limits.tokens)
        token_ids = token_ids[: limits.tokens]
    return wire.Prediction(token_ids=wire.encode_token_ids("prediction", token_ids, tell=False))


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
    empty prediction where a request without one is drafted for.

    The caller's params stay as they are: a copy carries the ids. Malformed → `VLLMValidationError`.
    """
    if not drafts_predictions(self.vllm_config):
        return original(self, request_id, prompt, params, *args, **kwargs)
    try:
        params = _prepared(self, params)
    except Exception as error:
        if _is_the_callers(error):
            raise
        serve_without_prediction(f"Request {shown_id(request_id)}", error)
        if getattr(params, "extra_args", None):
            params = wire.with_extra_args(params, dict.fromkeys((wire.KEY, *KEYS)))
    outer = engine_of_request.set(self.vllm_config)
    try:
        return original(self, request_id, prompt, params, *args, **kwargs)
    finally:
        engine_of_request.reset(outer)


def _is_the_callers(error: Exception) -> bool:
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError)


def _prepared(processor: Any, params: Any) -> Any:
    """`params` with what the engine shall know; the caller's own where that is nothing."""
    extra_args = getattr(params, "extra_args", None) or {}
    prediction = kept = _with_token_ids(processor, extra_args[wire.KEY]) if wire.KEY in extra_args else None
    if any(key in extra_args for key in KEYS):
        prediction = kept = _choices_of(extra_args).put_into(prediction or wire.Prediction(token_ids=b""))
    if prediction is None or prediction.is_empty:
        kept = _of_none(params, prediction)
    # Where nothing is drafted for a request, its answer may still be one that is not to be remembered.
    apart = kept is None and prediction is not None and prediction.memory is False
    changes = {wire.KEY: kept, wire.RECIPES_KEY: None, wire.MEMORY_KEY: False if apart else None}
    if kept is None and not changes.keys() & extra_args.keys():
        return params
    return wire.with_extra_args(params, changes)


def _of_none(params: Any, empty: wire.Prediction | None) -> wire.Prediction | None:
    """What a request that predicts nothing brings: an empty prediction where it is drafted for, None where it is
    not, or where no draft can become output."""
    max_tokens = getattr(params, "max_tokens", None)
    if not hasattr(params, "extra_args") or (max_tokens is not None and max_tokens <= 1):
        return None
    given = empty or wire.Prediction(token_ids=b"")
    return given if drafts_without_prediction(given.recipes, given.memory) else None


def _choices_of(extra_args: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    try:
        choices = choices_of(extra_args)
        check_known(choices, Settings.from_env())
    except ChoiceError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter) from None
    return choices


#: Fields of a `wire.Prediction` that no client sets.
_OURS = set(wire.Prediction.__dataclass_fields__) - {"token_ids", "text"}


def _with_token_ids(processor: Any, value: Any) -> wire.Prediction:
    from vllm.exceptions import VLLMValidationError

    if isinstance(value, Mapping):  # a client's: the rest is ours to say
        value = {name: value[name] for name in value if name not in _OURS}
    try:
        prediction = wire.read(value)
        if prediction.text is not None:
            if processor.renderer.tokenizer is None:
                raise ValueError("prediction: expected token ids, the engine has no tokenizer for text")
            limits = Limits.of(processor.vllm_config)
            text = checked_text("prediction", [prediction.text], limits)
            prompt = processor.renderer.tokenize_prompt({"prompt": text}, tokenize_params(limits.tokens))
            tokenised = as_prediction(prompt["prompt_token_ids"], limits)
            prediction = replace(prediction, text=None, token_ids=tokenised.token_ids)
    except (TypeError, ValueError) as error:
        count_refused(error.reason if isinstance(error, PredictionError) else "malformed")
        raise VLLMValidationError(str(error), parameter="prediction") from None
    return prediction


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

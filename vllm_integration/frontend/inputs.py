"""The engine's part of a request: ids and options in `SamplingParams.extra_args`, over HTTP and offline."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from ..config.in_use import drafts_predictions, engine_of_request
from ..config.settings import Settings, drafts_without_prediction
from ..seams.guard import Guard, shown_id
from ..seams.install import Original, seam
from ..wire import request as wire
from . import metrics
from .prediction import (
    CONVERSATION,
    FIELD,
    KEYS,
    OURS,
    FieldError,
    Limits,
    checked_texts,
    choices_of,
    given_texts,
    serve_without_prediction,
    tell_near_misses,
    tokenised,
)
from .usage import http_request

#: What fails in it costs that samples draft from all predictions of their request.
samples = Guard("samples", "gives no sample a prediction of its own", then=metrics.show_faults)


@seam("inputs.process_inputs")
def process_inputs(
    original: Original, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """`InputProcessor.process_inputs`, with what the HTTP request brought in `params.extra_args`, and an empty
    prediction where a request without one is drafted for. The caller's params stay as they are."""
    is_ours = drafts_predictions(self.vllm_config)
    engine_of_request.set(is_ours and self.vllm_config)
    if not is_ours:
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
    return original(self, request_id, prompt, params, *args, **kwargs)


def _prepared(processor: Any, params: Any) -> Any:
    """`params` with what the engine shall know; the caller's own where that is nothing."""
    extra_args, http = getattr(params, "extra_args", None) or {}, http_request.get()
    settings = Settings.of(processor.vllm_config)
    tell_near_misses(extra_args)
    given = wire.Prediction() if http is None else http.prediction
    if wire.KEY in extra_args:
        given = _offline(processor, extra_args[wire.KEY])
    if any(key in extra_args for key in KEYS):
        given = replace(given, **choices_of(extra_args, settings))
    if extra_args.get(CONVERSATION) and http is None:
        message = f"{CONVERSATION}: expected over HTTP; offline the texts can be the prediction"
        raise FieldError(message, "unsupported", parameter=CONVERSATION)
    # Without a prediction it is drafted for where that is asked for, and a draft can become output.
    asks = given.drafts or drafts_without_prediction(settings, given.recipes, given.memory)
    asks = asks and (getattr(params, "max_tokens", None) or 2) > 1
    is_drafted_for = hasattr(params, "extra_args") and (asks or not given.is_empty)
    kept = wire.for_samples(params, given) if is_drafted_for and given.drafts is not False else None
    if given.drafts is False and settings.draft_without_prediction:
        kept = wire.Prediction(drafts=False, memory=False)
    # Where nothing is drafted for a request, its answer may still be one that is not to be remembered.
    apart = kept is None and given.memory is False
    memory = False if apart else None
    changes: dict[str, Any] = {**dict.fromkeys(OURS), wire.KEY: kept, wire.MEMORY_KEY: memory}
    if kept is None and not apart and not changes.keys() & extra_args.keys():
        return params
    return wire.with_extra_args(params, changes)


@seam("samples._get_child_sampling_params")
def params_of_sample(original: Original, self: Any, index: int, *args: Any, **kwargs: Any) -> Any:
    """`ParentRequest._get_child_sampling_params`, with the prediction of this one of `n` samples."""
    params = original(self, index, *args, **kwargs)
    given = wire.brought_by(params)
    if given is None or not given.one_each or (own := samples.run(wire.of_sample, given, index)) is None:
        return params
    return wire.with_extra_args(params, {wire.KEY: own})


def _offline(processor: Any, value: Any) -> wire.Prediction:
    """A prediction of the offline API, or of a client whose endpoint takes sampling parameters as they are."""
    if isinstance(value, dict):  # the rest is ours to say
        value = value.get("text", value.get("token_ids"))
    given = value.prediction if isinstance(value, wire.PredictedOutputParams) else value
    if (found := given_texts(FIELD, given)) is None:
        try:
            return wire.read(value)
        except (TypeError, ValueError) as error:
            raise FieldError(str(error)) from None
    limits = Limits.of(processor.vllm_config)
    return tokenised(processor.renderer, limits, checked_texts(found, limits))


@seam("parameters._validate_spec_decode")
def validate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`SamplingParams._validate_spec_decode`, which on V2 finds neither `min_p` nor `logit_bias`: drafts are
    verified by both there."""
    engine = engine_of_request.get()
    if engine and engine.use_v2_model_runner and drafts_predictions(engine):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    return original(self, *args, **kwargs)

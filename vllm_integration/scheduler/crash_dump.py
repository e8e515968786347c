"""Keeps predictions out of what vLLM prints of its engine core, above all when a step fails.

MessagePack makes a dict of a `wire.prediction.Prediction`, and a dict prints its bytes. vLLM's dump of a failed
step prints `extra_args` of new requests and the draft tokens of all.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.seams.install import seam
from vllm_integration.wire import prediction as wire


def put_back(request: Any) -> None:
    """Give a vLLM `Request` (or `NewRequestData`) its prediction as a `wire.prediction.Prediction` again, which
    prints as its size and carries who may share its memory: the requests of one `cache_salt`.

    The request gets sampling parameters of its own: in an engine without processes the caller holds the others.
    """
    params = request.sampling_params
    extra_args = getattr(params, "extra_args", None)
    if extra_args and extra_args.get(wire.KEY) is not None:
        given = wire.printable(extra_args[wire.KEY], sharing_key_of(request))
        request.sampling_params = with_prediction(params, given)


def without_prediction(request: Any) -> None:
    """Give a vLLM `Request` sampling parameters without its prediction."""
    params = copy.copy(request.sampling_params)
    params.extra_args = {name: value for name, value in params.extra_args.items() if name != wire.KEY}
    request.sampling_params = params


def sharing_key_of(request: Any) -> bytes:
    """The same for all requests with one `cache_salt`, and for all without one."""
    salt = getattr(request, "cache_salt", None)
    return b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()


@seam("dump._dump_engine_exception")
def dump_engine_exception(
    original: Callable[..., Any], config: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`_dump_engine_exception` of an engine that drafts from predictions: draft tokens, which may be a part of
    one, are printed as their number, and so are predictions, whichever scheduler there is."""
    if drafts_predictions(config, even_if_off=True):
        try:
            scheduler_output = _without_predictions(scheduler_output)
        except Exception as error:
            scheduler_output = f"not printed: {type(error).__name__}"
    return original(config, scheduler_output, *args, **kwargs)


def _without_predictions(scheduler_output: Any) -> Any:
    output = copy.copy(scheduler_output)
    drafts = output.scheduled_spec_decode_tokens
    output.scheduled_spec_decode_tokens = {req_id: f"{len(ids)} tokens" for req_id, ids in drafts.items()}
    output.scheduled_new_reqs = list(map(copy.copy, output.scheduled_new_reqs))
    for new in output.scheduled_new_reqs:
        put_back(new)
    return output


def with_prediction(params: Any, prediction: wire.Prediction) -> Any:
    """A copy of vLLM's `SamplingParams` that carries this prediction."""
    params = copy.copy(params)
    params.extra_args = {**params.extra_args, wire.KEY: prediction}
    return params

"""What a worker accepts as a prediction. Nothing here knows which model runner asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import Any

from vllm_integration.seams.log_text import shown_id, shown_reason
from vllm_integration.wire import prediction as wire

logger = logging.getLogger("vllm.gpu_align")

#: Predictions of this process that were not used as they came: "dropped" (malformed), "cut" (too long) or
#: "no_room" (the arena is full of others that are in use).
refused: Counter[str] = Counter()
_MAX_REFUSALS = 1000
_refusals: dict[str, str] = {}


def take_refusals() -> dict[str, str]:
    """Request → "dropped", "cut" or "no_room", since this was last asked."""
    taken = dict(_refusals)
    _refusals.clear()
    return taken


def _refuse(req_id: str, reason: str) -> None:
    refused[reason] += 1
    if len(_refusals) < _MAX_REFUSALS:  # where nobody asks they must not pile up
        _refusals[req_id] = reason


def found_no_room(req_id: str) -> None:
    """The drafter could not hold a request's prediction: warn and count."""
    logger.warning(
        "Request %s is served without its prediction: no room for it among the others (GPU_ALIGN_ARENA_TOKENS)",
        shown_id(req_id),
    )
    _refuse(req_id, "no_room")


def sharing_key_of(req_id: str, sampling_params: Any) -> Hashable:
    """Who may share the memory of this request's prediction: see `wire.prediction.Prediction.sharing_key`. Where
    no scheduler of ours said who, this request alone, which finds its prediction again after a preemption."""
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    key: bytes | None = getattr(extra_args.get(wire.KEY), "sharing_key", None)
    return req_id if key is None else key


def accept_prediction(
    req_id: str, sampling_params: Any, *, vocab_size: int, capacity: int
) -> wire.TokenIds | None:
    """The prediction of a request that reached the worker, int32 [N] with 0 < N ≤ capacity, or None.

    None when there is none, and when it is malformed (wrong type, an id outside `vocab_size`, text that no
    front end tokenised): then one warning names the request and the reason, never the content, and the
    request is served without. Longer than `capacity`: cut there, with a warning. Both are counted in `refused`.
    """
    extra_args = getattr(sampling_params, "extra_args", None)
    if not extra_args or extra_args.get(wire.KEY) is None:
        return None
    try:
        prediction = wire.read(extra_args[wire.KEY])
        if prediction.token_ids is None:
            raise ValueError("prediction: expected token ids, got text that was not tokenised")
        token_ids = wire.decode_token_ids(prediction.token_ids)
        if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
            raise ValueError(f"prediction: expected 0 ≤ token id < {vocab_size}, got others")
    except (TypeError, ValueError) as error:
        _refuse(req_id, "dropped")
        logger.warning(
            "Request %s is served without its prediction: %s (%d dropped so far)",
            shown_id(req_id),
            shown_reason(error),
            refused["dropped"],
        )
        return None
    if not token_ids.size:
        return None
    if token_ids.size > capacity:
        _refuse(req_id, "cut")
        logger.warning(
            "The prediction of request %s was cut: expected at most %d tokens, got %d",
            shown_id(req_id),
            capacity,
            token_ids.size,
        )
        token_ids = token_ids[:capacity]
    return token_ids

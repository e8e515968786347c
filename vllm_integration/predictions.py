"""What a worker accepts as a prediction. Nothing here knows which model runner asks."""

from __future__ import annotations

import logging
from typing import Any

from vllm_integration import wire

logger = logging.getLogger("vllm.gpu_align")


def accept_prediction(
    req_id: str, sampling_params: Any, *, vocab_size: int, capacity: int
) -> wire.TokenIds | None:
    """The prediction of a request that reached the worker, int32 [N] with 0 < N ≤ capacity, or None.

    None when there is none, and when it is malformed (wrong type, an id outside `vocab_size`, text that no
    front end tokenised): then one warning names the request and the reason, never the content, and the
    request is served without. Longer than `capacity`: cut there, with a warning.
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
            bad = token_ids.min() if token_ids.min() < 0 else token_ids.max()
            raise ValueError(f"prediction: expected 0 ≤ token id < {vocab_size}, got {bad}")
    except (TypeError, ValueError) as error:
        logger.warning("Request %s is served without its prediction: %s", req_id, error)
        return None
    if not token_ids.size:
        return None
    if token_ids.size > capacity:
        logger.warning(
            "The prediction of request %s was cut: expected at most %d tokens, got %d",
            req_id,
            capacity,
            token_ids.size,
        )
        token_ids = token_ids[:capacity]
    return token_ids

"""What a worker accepts as a prediction. Nothing here knows which model runner asks."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

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


class Terms(NamedTuple):
    """What a request is drafted from besides its context.

    empty: it predicts nothing and is drafted for all the same. recipes: names of the packs whose recipes it uses;
    None: of all. memory: what it brings are earlier answers, and no prediction. related: they are answers to
    requests like this one.
    """

    empty: bool = False
    recipes: tuple[str, ...] | None = None
    memory: bool = False
    related: bool = False


DEFAULT_TERMS = Terms()

#: Names of packs that requests have asked for and this worker does not have.
_unknown: set[str] = set()
_MAX_UNKNOWN = 100


def terms_of(sampling_params: Any, packs: Collection[str]) -> Terms:
    """The terms of a request that reached the worker.

    packs: those of the drafter. A request that names another one, which the front end could not know, uses all of
    them; one WARNING a name says so.
    """
    given = wire.brought_by(sampling_params)
    if given is None:
        return DEFAULT_TERMS
    recipes = given.recipes
    unknown = set(recipes or ()).difference(packs)
    if unknown:
        recipes = None
        for name in sorted(unknown - _unknown):
            if len(_unknown) < _MAX_UNKNOWN:
                _unknown.add(name)
                logger.warning(
                    "A request names recipes that are not there, and uses all that are: %s (told once)",
                    shown_reason(name),
                )
    return Terms(given.is_empty, recipes, bool(given.memory), bool(given.related))


def found_no_room(req_id: str, *, memory: bool = False) -> None:
    """The drafter could not hold a request's prediction: warn and count. Earlier answers are no prediction."""
    if memory:
        _tell_of_no_room()
        return
    logger.warning(
        "Request %s is served without its prediction: no room for it among the others (GPU_ALIGN_ARENA_TOKENS)",
        shown_id(req_id),
    )
    _refuse(req_id, "no_room")


@functools.cache
def _tell_of_no_room() -> None:
    logger.warning(
        "A request is served without earlier answers: no room for them among the predictions "
        "(GPU_ALIGN_ARENA_TOKENS; told once)"
    )


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

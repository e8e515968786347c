"""The requests of a worker, of either model runner."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from gpu_align.ops.layout import FIRST_GAP

from ..seams.guard import first_to_tell, logger, shown_id, shown_reason
from ..wire import request as wire

_MAX_REFUSALS = 1000


class Refusals(dict[str, str]):
    """Request → why an engine does not use its prediction as it came, one of `REFUSALS`."""

    def take(self) -> dict[str, str]:
        """Those since this was last called."""
        taken = dict(self)
        self.clear()
        return taken

    def tell(self, req_id: str, reason: str, told: str, *args: Any) -> None:
        """Add one, and say so in one WARNING: `told` with the request's id and `args`."""
        if len(self) < _MAX_REFUSALS:  # they must not pile up if they are not read
            self[req_id] = reason
        logger.warning(told, shown_id(req_id), *args)


def open_request(
    req_id: str,
    sampling_params: Any,
    refused: Refusals,
    *,
    vocab_size: int,
    capacity: int,
    packs: Collection[str] = (),
    even_without: bool = False,
) -> wire.RequestContent | None:
    """The text that a request is drafted from, at most `capacity` tokens; None if nothing is drafted for it.

    A malformed prediction is dropped, and a longer one cut, with a warning that shows nothing of it. A name that
    is not among `packs` means all of them. even_without: also a request that brings nothing is drafted for.
    """
    value = (getattr(sampling_params, "extra_args", None) or {}).get(wire.KEY)
    temperature = getattr(sampling_params, "temperature", 0.0)
    content = wire.RequestContent(end_tokens=end_tokens(sampling_params), temperature=temperature)
    if value is None:
        return content if even_without else None
    try:
        given = wire.read(value)
        if given.drafts is False:
            return None
        # Who may share is the scheduler's to say. One that is not ours leaves what a client may have written.
        key = value.sharing_key if isinstance(value, wire.Prediction) else None
        recipes = given.recipes
        if unknown := sorted({*(recipes or ())} - {*packs}):
            if first_to_tell("unknown recipe packs"):
                told = "A request names unknown recipe packs: %s; using all loaded packs (told once)"
                logger.warning(told, shown_reason(", ".join(unknown)))
            recipes = None
        content = content._replace(kind=given.kind, recipes=recipes, sharing_key=key)
        token_ids = wire.decode_token_ids(given.token_ids or b"")
        if token_ids.min(initial=0) < 0 or token_ids[token_ids < FIRST_GAP].max(initial=0) >= vocab_size:
            raise ValueError(f"prediction: expected 0 ≤ token id < {vocab_size}, got others")
    except (TypeError, ValueError) as error:
        told = "Request %s is served without its prediction: %s"
        refused.tell(req_id, "malformed", told, shown_reason(error))
        return content if even_without else None
    if token_ids.size > capacity:
        told = "The prediction of request %s was cut: expected at most %d tokens, got %d"
        refused.tell(req_id, "tokens", told, capacity, token_ids.size)
    return content._replace(token_ids=token_ids[:capacity])


class StopRule(NamedTuple):
    """When the engine ends a request by its tokens (the front end finds stop strings). min_tokens: the first token
    of the output that may be a stop token."""

    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None
    min_tokens: int = 0

    def kept(self, sampled: list[int], output_len: int) -> int:
        """How many of `sampled` belong to the output that has `output_len` tokens before them."""
        kept = len(sampled)
        if self.max_tokens is not None:
            kept = max(0, min(kept, self.max_tokens - output_len))
        stops = (index for index in range(kept) if sampled[index] in self.stop_token_ids)
        return next(stops, kept - 1) + 1

    def ends(self, kept: list[int], output_len: int) -> bool:
        """Whether the output is complete with `kept`, the last of its `output_len` tokens."""
        if self.max_tokens is not None and output_len >= self.max_tokens:
            return True
        return bool(kept) and kept[-1] in self.stop_token_ids

    def room(self, sampled: list[int], output_len: int, most: int) -> int:
        """How many drafts, at most `most`, can become output after its `output_len` tokens, the last of them
        `sampled`: verifying d of them yields at most d + 1 tokens. None reaches over `min_tokens`: V1 masks stop
        tokens in the last of the d + 1 as if the drafts before it were not there."""
        if not self.stop_token_ids.isdisjoint(sampled):
            return 0
        if self.max_tokens is not None:
            most = min(most, self.max_tokens - output_len - 1)
        if output_len < self.min_tokens:
            most = min(most, self.min_tokens - output_len - 1)
        return max(0, most)


def end_tokens(sampling_params: Any) -> tuple[int, ...]:
    """Tokens that end a request: vLLM gives the worker no end of sequence where ``ignore_eos`` is set."""
    eos, stop = (getattr(sampling_params, name, None) for name in ("eos_token_id", "stop_token_ids"))
    return (*(() if eos is None else (eos,)), *(stop or ()))


def stop_rule(sampling_params: Any) -> StopRule:
    """From vLLM's `SamplingParams` as the worker gets them."""
    stop_ids = frozenset(end_tokens(sampling_params))
    return StopRule(stop_ids, sampling_params.max_tokens, sampling_params.min_tokens)

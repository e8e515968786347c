"""The requests of a worker. Nothing here knows which model runner asks."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_align.step_log import SOURCES, Step
from gpu_align.tools.explain import Explainer, Explanation

from ..seams.install import shown_id, shown_reason
from ..wire import request as wire
from ..wire.steps import count_verified

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


def refuse(req_id: str, reason: str) -> None:
    refused[reason] += 1
    if len(_refusals) < _MAX_REFUSALS:  # where nobody asks they must not pile up
        _refusals[req_id] = reason


#: Names of packs that requests have asked for and this worker does not have.
_unknown: set[str] = set()
_MAX_UNKNOWN = 100


def open_request(
    req_id: str,
    sampling_params: Any,
    *,
    vocab_size: int,
    capacity: int,
    packs: Collection[str] = (),
    even_without: bool = False,
) -> wire.RequestContent | None:
    """What a request is drafted from, at most `capacity` tokens; None where nothing is drafted for it.

    even_without: whether a request is drafted for that brings nothing at all.

    A malformed prediction (wrong type, an id outside `vocab_size`, text that no front end tokenised) is
    dropped, with a warning that shows nothing of it; a longer one is cut. Both are counted in `refused`. A
    name that is not among `packs`, which the front end could not know, means all of them, and costs one
    WARNING.
    """
    value = (getattr(sampling_params, "extra_args", None) or {}).get(wire.KEY)
    if value is None:
        return wire.RequestContent() if even_without else None
    content = wire.RequestContent()
    try:
        given = wire.read(value)
        # Who may share is the scheduler's to say. One that is not ours leaves what a client may have written.
        key = value.sharing_key if isinstance(value, wire.Prediction) else None
        content = wire.RequestContent(content.token_ids, given.kind, _known(given.recipes, packs), key)
        if given.token_ids is None:
            raise ValueError("prediction: expected token ids, got text that was not tokenised")
        token_ids = wire.decode_token_ids(given.token_ids)
        if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
            raise ValueError(f"prediction: expected 0 ≤ token id < {vocab_size}, got others")
    except (TypeError, ValueError) as error:
        refuse(req_id, "dropped")
        logger.warning(
            "Request %s is served without its prediction: %s (%d dropped so far)",
            shown_id(req_id),
            shown_reason(error),
            refused["dropped"],
        )
        return content if even_without else None
    if token_ids.size > capacity:
        refuse(req_id, "cut")
        logger.warning(
            "The prediction of request %s was cut: expected at most %d tokens, got %d",
            shown_id(req_id),
            capacity,
            token_ids.size,
        )
    return content._replace(token_ids=token_ids[:capacity])


def _known(recipes: tuple[str, ...] | None, packs: Collection[str]) -> tuple[str, ...] | None:
    unknown = set(recipes or ()).difference(packs)
    for name in sorted(unknown - _unknown):
        if len(_unknown) < _MAX_UNKNOWN:
            _unknown.add(name)
            logger.warning(
                "A request names recipes that are not there, and uses all that are: %s (told once)",
                shown_reason(name),
            )
    return None if unknown else recipes


class SlotTable:
    """Request id → slot, 0 ≤ slot < max_slots, for requests that hold none; the smallest free slot is given
    first."""

    def __init__(self, max_slots: int) -> None:
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_slots))

    def get(self, req_id: str) -> int | None:
        return self._slot_of.get(req_id)

    def acquire(self, req_id: str) -> int:
        """Raises `IndexError` when no slot is free."""
        slot = self._slot_of[req_id] = heapq.heappop(self._free)
        return slot

    def release(self, req_id: str) -> int | None:
        """Take the slot back and return it; None when the request held none."""
        slot = self._slot_of.pop(req_id, None)
        if slot is not None:
            heapq.heappush(self._free, slot)
        return slot

    def holders(self) -> list[str]:
        """The requests that hold a slot, oldest first."""
        return list(self._slot_of)


@dataclass(frozen=True)
class Proposal:
    """Drafts handed to the engine, to be verified by the request's next step."""

    token_ids: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    source: str = SOURCES[0]
    duration_us: int = 0


def proposals_of(draft: Any, duration_us: int, rooms: Sequence[int] | None = None) -> list[Proposal]:
    """The drafts of a step, each cut to its room. Waits for the device."""
    lengths = draft.length.tolist()
    if rooms is not None:
        lengths = list(map(min, lengths, rooms))
    columns = (draft.token_ids.tolist(), draft.confidence.tolist(), draft.source.tolist())
    return [
        Proposal(token_ids[:length], confidence[:length], SOURCES[source if length else 0], duration_us)
        for length, token_ids, confidence, source in zip(lengths, *columns, strict=True)
    ]


@dataclass(frozen=True)
class StopRule:
    """When the engine ends a request by its tokens, so that tokens sampled after the end are not counted.
    (Stop strings are found by the front end: tokens that follow one are counted here.)

    min_tokens: the first token of the output that may be a stop token.
    """

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
        """Whether the output is complete with `kept` appended to `output_len` tokens."""
        if self.max_tokens is not None and output_len + len(kept) >= self.max_tokens:
            return True
        return bool(kept) and kept[-1] in self.stop_token_ids


@dataclass
class RequestState:
    """One request: what it is drafted from, where it stands, and where a log keeps its steps, what they did.

    prompt_len: known once the request has sampled a token. synced: tokens of it that its slot's row holds.
    ended: it has met a stop token or `max_tokens`; nothing more is proposed.
    tokens, explainer: prompt and output, and what explains its drafts, of requests whose steps are kept.
    """

    req_id: str
    content: wire.RequestContent
    stop: StopRule
    prompt_len: int = 0
    synced: int = 0
    ended: bool = False
    proposal: Proposal = field(default_factory=Proposal)
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    explainer: Explainer | None = None
    _explanation: Explanation | None = None

    def record(self, sampled: list[int], verified: Sequence[int], total_len: int) -> None:
        """Keep one step for the log, before it is settled: `sampled` (accepted drafts and one more) after
        verifying `verified`, where the output stood in the prediction, and why this was drafted. Steps after
        the end, which asynchronous scheduling had already started, are left out.

        total_len: tokens of the request after the step. −1 in `verified` are placeholders that vLLM
        schedules to keep the batch uniform; nobody proposed them.
        """
        if self.ended:
            return
        position = total_len - len(sampled)
        new = sampled[: self.stop.kept(sampled, position - self.prompt_len)]
        proposal = self.proposal
        slots = sum(1 for token in verified if token >= 0)
        num_verified, accepted = count_verified(slots, len(proposal.token_ids), len(sampled), len(new))
        before, after = self._explanation, None
        self.tokens += new
        if self.explainer is not None:
            after = self._explanation = self.explainer.at(self.tokens)
        explained = before if before is not None and proposal.token_ids else None
        chosen = None if explained is None else explained.chosen
        self.steps.append(
            Step(
                step=len(self.steps),
                position=position,
                source=proposal.source if num_verified else SOURCES[0],
                proposed=proposal.token_ids,
                confidence=proposal.confidence,
                duration_us=proposal.duration_us,
                verified=int(num_verified),
                accepted=int(accepted),
                new=new,
                cursor_before=before.cursor if before is not None else 0,
                cursor_after=after.cursor if after is not None else 0,
                candidate=None if chosen is None else vars(chosen),
                others=0 if explained is None else len(explained.others),
            )
        )

    def settle(self, sampled: list[int], total_len: int) -> None:
        """Take in one step that sampled these tokens: it used the proposal up, and may have ended the
        request."""
        if self.ended:
            return
        written = total_len - len(sampled) - self.prompt_len
        self.proposal = Proposal()
        self.ended = self.stop.ends(sampled[: self.stop.kept(sampled, written)], written)

    def room(self, total_len: int, num_draft_tokens: int, max_model_len: int) -> int:
        """How many drafts can still become output: verifying d of them yields at most d + 1 tokens.

        No draft reaches over `min_tokens`: V1 masks stop tokens in the last of the d + 1 by the tokens before
        the step, as if the drafts that come before it were not there.
        """
        if self.ended:
            return 0
        left = max_model_len - total_len
        written = total_len - self.prompt_len
        if self.stop.max_tokens is not None:
            left = min(left, self.stop.max_tokens - written)
        if written < self.stop.min_tokens:
            left = min(left, self.stop.min_tokens - written)
        return max(0, min(num_draft_tokens, left - 1))


def stop_rule(sampling_params: Any) -> StopRule:
    """From vLLM's `SamplingParams` as the worker gets them."""
    stop_ids = set(sampling_params.stop_token_ids or ())
    if sampling_params.eos_token_id is not None:
        stop_ids.add(sampling_params.eos_token_id)
    return StopRule(frozenset(stop_ids), sampling_params.max_tokens, sampling_params.min_tokens)

"""What a worker accepts as a prediction. Nothing here knows which model runner asks."""

from __future__ import annotations

import functools
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_align import Recipes
from gpu_align.ops.constants import ALL_PACKS
from gpu_align.step_log import SOURCES, Step
from gpu_align.tools import explain
from gpu_align.tools.explain import Explainer, Explanation

from ..config.settings import Settings
from ..seams.install import shown_id, shown_reason
from ..wire import request as wire
from ..wire.steps import count_verified
from .startup import WarmUp, drafter_config

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


class SlotTable:
    """Request id → slot, 0 ≤ slot < max_slots; the smallest free slot is given first.

    A request holds at most one slot, a slot at most one request. Not thread-safe: a model runner is not
    either.
    """

    def __init__(self, max_slots: int) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots: expected at least 1, got {max_slots}")
        self.max_slots = max_slots
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_slots))

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slot_of

    def get(self, req_id: str) -> int | None:
        """The slot of a request, or None."""
        return self._slot_of.get(req_id)

    def acquire(self, req_id: str) -> int:
        """Give the request a slot. Raises `ValueError` when it has one or none is free."""
        if req_id in self._slot_of:
            raise ValueError(f"req_id: {req_id!r} already holds slot {self._slot_of[req_id]}")
        if not self._free:
            raise ValueError(f"req_id: no slot left for {req_id!r}, all {self.max_slots} are taken")
        slot = heapq.heappop(self._free)
        self._slot_of[req_id] = slot
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


@dataclass(frozen=True)
class StopRule:
    """When the engine ends a request by its tokens, so that tokens sampled after the end are not counted.

    Stop strings are found by the front end, after detokenising: tokens of the last step that follow one
    are still counted here.

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
    """One request: its prediction, where it stands, and where a log keeps its steps, what they did.

    prediction: int32 [N], or None for a request that is drafted from its context only.
    prompt_len: known once the request has sampled a token. synced: tokens of it that its slot's row holds.
    ended: it has met a stop token or `max_tokens`; nothing more is proposed.
    sharing_key: who may share the memory of the prediction. terms: what else it is drafted from.
    tokens: prompt and output, of requests whose steps are kept.
    recipes: of the drafter, to explain its drafts by.
    """

    req_id: str
    prediction: wire.TokenIds | None
    stop: StopRule
    sharing_key: Hashable = None
    terms: Terms = DEFAULT_TERMS
    prompt_len: int = 0
    synced: int = 0
    ended: bool = False
    proposal: Proposal = field(default_factory=Proposal)
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    recipes: Recipes | None = None
    _explainer: Explainer | None = None
    _explanation: Explanation | None = None

    def know_prompt(
        self, tokens: Callable[[], list[int]], num_draft_tokens: int, max_context_len: int
    ) -> None:
        """For requests whose steps are kept, before the first: `tokens()` are all before its sampled ones."""
        if self._explainer is None:
            self.tokens = tokens()
            prediction = [] if self.prediction is None else self.prediction.tolist()
            self._explainer = Explainer(
                prediction,
                self.prompt_len,
                num_draft_tokens,
                drafter_config(Settings.from_env().survival_table),
                recipes=self.recipes,
                max_context_len=max_context_len,
                recipe_packs=ALL_PACKS
                if self.recipes is None
                else self.recipes.pack_bits(self.terms.recipes),
                is_memory=self.terms.memory,
                is_related=self.terms.related,
            )

    def record(self, sampled: list[int], verified: Sequence[int], total_len: int) -> None:
        """Keep one step for the log, before it is settled: `sampled` (accepted drafts and one more) after
        verifying `verified`. Steps after the end, which asynchronous scheduling had already started, are left out.

        total_len: tokens of the request after the step. −1 in `verified` are placeholders that vLLM
        schedules to keep the batch uniform; nobody proposed them.
        """
        if self.ended:
            return
        before = total_len - len(sampled)
        kept = self.stop.kept(sampled, before - self.prompt_len)
        proposal = self.proposal
        slots = sum(1 for token in verified if token >= 0)
        num_verified, accepted = count_verified(slots, len(proposal.token_ids), len(sampled), kept)
        self.steps.append(
            self._explained(
                step=len(self.steps),
                position=before,
                source=proposal.source if num_verified else SOURCES[0],
                proposed=proposal.token_ids,
                confidence=proposal.confidence,
                duration_us=proposal.duration_us,
                verified=int(num_verified),
                accepted=int(accepted),
                new=sampled[:kept],
            )
        )

    def settle(self, sampled: list[int], total_len: int) -> None:
        """Take in one step that sampled these tokens: it used the proposal up, and may have ended the request."""
        if self.ended:
            return
        before = total_len - len(sampled)
        kept = self.stop.kept(sampled, before - self.prompt_len)
        self.proposal = Proposal()
        self.ended = self.stop.ends(sampled[:kept], before - self.prompt_len)

    def _explained(self, *, new: list[int], proposed: list[int], **record: Any) -> Step:
        """The record of a step, with where the output stood in the prediction and why this was drafted."""
        before, after = self._explanation, None
        self.tokens += new
        if self._explainer is not None:
            after = self._explanation = self._explainer.at(self.tokens)
        chosen = before.chosen if before is not None and proposed else None
        return Step(
            **record,
            proposed=proposed,
            new=new,
            cursor_before=before.cursor if before is not None else 0,
            cursor_after=after.cursor if after is not None else 0,
            candidate=None if chosen is None else vars(chosen),
            others=len(before.others) if before is not None and proposed else 0,
        )

    def room(self, total_len: int, num_draft_tokens: int, max_model_len: int) -> int:
        """How many drafts can still become output: verifying d of them yields at most d + 1 tokens.

        No draft reaches over `min_tokens`: V1 masks stop tokens in the last of the d + 1 by the tokens before the
        step, as if the drafts that come before it were not there.
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


def warm_up_log(num_draft_tokens: int, max_context_len: int, recipes: Recipes | None) -> WarmUp:
    """Compile in the background what `RequestState` explains drafts with; arguments as those of the drafter."""
    return WarmUp(
        "what the step log explains drafts with",
        lambda: explain.warm_up(
            num_draft_tokens,
            drafter_config(Settings.from_env().survival_table),
            recipes=recipes,
            max_context_len=max_context_len,
        ),
    )


def stop_rule(sampling_params: Any) -> StopRule:
    """The token-level end of a request, from vLLM's `SamplingParams` as the worker gets them."""
    stop_ids = set(sampling_params.stop_token_ids or ())
    if sampling_params.eos_token_id is not None:
        stop_ids.add(sampling_params.eos_token_id)
    return StopRule(frozenset(stop_ids), sampling_params.max_tokens, sampling_params.min_tokens)

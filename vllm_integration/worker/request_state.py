"""What the worker knows about one request that may be drafted for. Independent of the model runner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_align import Recipes, explain
from gpu_align.explain import Explainer, Explanation
from gpu_align.ops.constants import ALL_PACKS
from gpu_align.step_log import SOURCES, Step
from vllm_integration.config.settings import Settings
from vllm_integration.wire import prediction as wire
from vllm_integration.wire.steps import count_verified
from vllm_integration.worker.accept import DEFAULT_TERMS, Terms
from vllm_integration.worker.tuned import drafter_config
from vllm_integration.worker.warm_up import WarmUp


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

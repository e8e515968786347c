"""The drafter of a worker, with what both model runners do around it in the same way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

from gpu_align import Drafter, Recipes
from gpu_align.tools import explain

from ..config.settings import Settings
from ..seams.install import DraftingGuard, off_reason, shown_error, shown_id
from ..wire import request as wire
from .miss_log import MissLog, open_miss_log
from .requests import open_request, refuse
from .startup import WarmUp, drafter_config, load_recipes
from .step_log import Log, open_log

logger = logging.getLogger("vllm.gpu_align")


@functools.cache
def _tell_of_no_room() -> None:
    logger.warning(
        "A request is served without earlier answers: no room for them among the predictions "
        "(GPU_ALIGN_ARENA_TOKENS; told once)"
    )


DRAFTING = "drafting failed"


def make_drafter(proposer: RequestDrafter[Any], max_slots: int, **where: Any) -> Drafter:
    """where: the device, and what else the model runners want differently."""
    return Drafter(
        max_slots=max_slots,
        max_context_len=proposer.max_context_len,
        max_prediction_len=proposer.capacity,
        num_draft_tokens=proposer.num_draft_tokens,
        vocab_size=proposer.vocab_size,
        config=drafter_config(proposer.settings.survival_table),
        recipes=proposer.recipes,
        max_prediction_tokens=proposer.settings.prediction_room(max_slots, proposer.capacity),
        **where,
    )


class RequestDrafter(Generic[Log]):
    """What the proposers of both model runners do in the same way: they have a drafter, and give it requests.

    Raises `ValueError` when a `GPU_ALIGN_*` variable cannot be read. Whatever else fails turns drafting off, with
    one ERROR line; but see `DraftingGuard`.
    """

    def __init__(self, vllm_config: Any, max_context_len: int, guard: DraftingGuard) -> None:
        self.settings = Settings.from_env()
        self.guard = guard
        self.num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self.max_context_len = max_context_len
        self.capacity = self.settings.prediction_capacity(max_context_len)
        self.recipes: Recipes | None = None
        self.drafter: Any = None
        self.log: Log | None = None
        self.miss_log: MissLog | None = None
        self._warm_up: WarmUp | None = None

    def make(
        self,
        vllm_config: Any,
        max_slots: int,
        log: type[Log],
        compiling: AbstractContextManager[None] | None = None,
        **where: Any,
    ) -> None:
        """Make what only drafting needs; a server where that fails serves without drafts.

        compiling: around the drafter. where: see `make_drafter`.
        """
        self.recipes = load_recipes(self.settings, vllm_config)
        with compiling or nullcontext():
            self.drafter = make_drafter(self, max_slots, **where)
        self.log = open_log(log, self.settings, self.num_draft_tokens, vllm_config)
        self.miss_log = open_miss_log(self.settings, self.recipes, self.num_draft_tokens, vllm_config)
        if self.log is not None and off_reason() is None:
            self._warm_up = WarmUp(
                "what the step log explains drafts with",
                lambda: explain.warm_up(
                    self.num_draft_tokens,
                    drafter_config(self.settings.survival_table),
                    recipes=self.recipes,
                    max_context_len=self.max_context_len,
                ),
            )

    def finish_warm_up(self) -> None:
        """Wait for what the step log runs: who calls this is about to serve, so all has to be compiled. A log that
        would have to wait for it with a request is off."""
        if self._warm_up is not None and self.log is not None:
            self.log.run(self._warm_up.finish)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """`step(*args)`, a step of drafting; None once drafting is off."""
        return self.guard.run(DRAFTING, step, *args)

    def open(self, req_id: str, sampling_params: Any) -> wire.RequestContent | None:
        """`open_request` with what this drafter has."""
        return open_request(
            req_id,
            sampling_params,
            vocab_size=self.vocab_size,
            capacity=self.capacity,
            packs=() if self.recipes is None else self.recipes.names,
            even_without=self.settings.draft_without_prediction,
        )

    def add(
        self, slot: int, req_id: str, content: wire.RequestContent, prompt_len: int
    ) -> wire.RequestContent | None:
        """Give a slot of the drafter to a request: what it is drafted from, without `token_ids` where these have
        no room among the others; None, with a warning, where the drafter refuses them, or has no memory."""
        # Where no scheduler of ours said who may share, nobody: the request finds its own after a preemption.
        key = req_id if content.sharing_key is None else content.sharing_key
        try:
            held = self.drafter.add(
                slot,
                content.token_ids,
                prompt_len,
                sharing_key=key,
                recipes=content.recipes,
                memory=content.kind != wire.TextKind.PREDICTION,
                related=content.kind == wire.TextKind.RELATED_MEMORY,
            )
        except Exception as error:
            if not isinstance(error, (TypeError, ValueError)) and self.guard.raises(error):
                raise
            logger.warning(
                "Request %s is served without its prediction: %s", shown_id(req_id), shown_error(error)
            )
            return None
        if held:
            return content
        if content.kind == wire.TextKind.PREDICTION:
            refuse(req_id, "no_room")
            logger.warning(
                "Request %s is served without its prediction: no room for it among the others "
                "(GPU_ALIGN_ARENA_TOKENS)",
                shown_id(req_id),
            )
        else:
            _tell_of_no_room()
        return content._replace(token_ids=content.token_ids[:0])

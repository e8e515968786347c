"""The drafter of a worker, with what both model runners do around it in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from gpu_align import Drafter, Recipes
from gpu_align.drafter.explain import Explainer
from gpu_align.ops import host
from gpu_align.ops.recipes import ALL_PACKS

from ..config.engine_config import beyond_longest
from ..config.settings import Settings
from ..seams.guard import Guard, faults, logger, shown_fault, shown_id, warn_once
from ..seams.install import Original, off_reason, seam
from ..wire import request as wire
from ..wire.reports import DRAFTING, REPORTS, DraftReport, attach
from .draft_reporter import when_it_leaves
from .requests import Refusals, open_request
from .startup import compiling, drafter_config, load_recipes
from .step_log import DebugLog, open_log
from .step_timer import StepTimer


class RequestDrafter:
    """A worker's drafter, and the requests that it is given. A fault costs the drafts of one request or of a step,
    after three steps in a row those of all requests for a minute; at the start all of them for good.

    num_ranks, clock: as of `Guard`. device: where steps run that the host does not wait for.
    """

    def __init__(
        self,
        vllm_config: Any,
        max_context_len: int,
        num_ranks: int = 1,
        clock: Callable[[], float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings = Settings.of(vllm_config)
        self.timer = StepTimer(device, int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)))
        #: This engine, for its guards: another one of the process goes on without what is off here.
        self.engine, self.refused = object(), Refusals()
        ranks: dict[str, Any] = {"clock": clock, "num_ranks": num_ranks}
        self.guard = Guard(
            DRAFTING, "drafts nothing", core=True, then=self.start_over, engine=self.engine, **ranks
        )
        #: Of reports. Where it is off the scheduler grants no slots, and all ranks draft on alike.
        self.reporting = Guard(REPORTS, "reports no drafts", core=True, engine=self.engine)
        self.num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._model_config = vllm_config.model_config
        self.max_context_len = max_context_len
        self.capacity = self.settings.prediction_capacity(max_context_len)
        self.recipes: Recipes | None = None
        self.drafter: Any = None
        self.log: DebugLog | None = None

    def start(self, step: Callable[[], object]) -> None:
        """Run what makes the drafter; where that fails, nothing is drafted until the process ends."""
        self._step = step
        if reason := off_reason() or beyond_longest(self.max_context_len):
            self.guard.end(reason)
            return
        try:
            step()
        except Exception as error:
            self.guard.end(error)

    def fit(self) -> None:
        """Make the drafter again where vLLM has lowered `max_model_len` since (``--max-model-len auto``), before
        the first request. Called before the rows of new requests are written."""
        limit = int(self._model_config.max_model_len)
        if limit < self.max_context_len and self.drafter is not None:
            told = "gpu_align has room for contexts of %d tokens now, and had for %d: max_model_len is auto"
            logger.info(told, limit, self.max_context_len)
            self.max_context_len, self.drafter = limit, None
            self.capacity = self.settings.prediction_capacity(limit)
            self.start(self._step)

    def make(self, vllm_config: Any, token_ids: torch.Tensor, total_len: torch.Tensor, **more: Any) -> None:
        """Make the drafter of these rows, and the log. more: of the drafter."""
        settings, K = self.settings, self.num_draft_tokens
        load = Guard("recipes", "drafts without recipes", num_ranks=self.guard.num_ranks)
        if self.recipes is None:
            self.recipes = load.run(load_recipes, settings, vllm_config)
        with compiling("the drafter's step"):
            self.drafter = Drafter(
                token_ids,
                total_len,
                max_prediction_len=self.capacity,
                num_draft_tokens=K,
                vocab_size=self.vocab_size,
                config=drafter_config(settings.survival_table, settings.min_match),
                recipes=self.recipes,
                max_prediction_tokens=settings.prediction_room(len(token_ids), self.capacity),
                **more,
            )
        open_logs = Guard("step log", "writes no step logs")
        self.log = self.log or open_logs.run(open_log, settings, K, vllm_config, self.explainer_of)
        if self.log is not None:
            with compiling("what the step log explains drafts with"):
                self.log.guard.run(lambda: self.explainer_of(wire.RequestContent(), 0).at([0]))
        if host.not_kept and (self.log is not None or token_ids.device.type == "cpu"):
            how = "compiled anew with each start" if host.COMPILED else "slow, in plain Python"
            logger.warning("gpu_align's code on the host is %s: %s", how, host.not_kept)

    def explainer_of(self, content: wire.RequestContent, prompt_len: int) -> Explainer:
        return Explainer(
            content.token_ids.tolist(),
            prompt_len,
            self.num_draft_tokens,
            drafter_config(self.settings.survival_table, self.settings.min_match),
            recipes=self.recipes,
            max_context_len=self.max_context_len,
            recipe_packs=ALL_PACKS if self.recipes is None else self.recipes.pack_bits(content.recipes),
            kind=content.kind,
            temperature=content.temperature,
        )

    def start_over(self) -> None:
        """Forget what the drafter knows of requests: a step that failed may have left it half changed."""
        raise NotImplementedError

    def for_request(self, req_id: str, step: Callable[..., Any], *args: Any) -> Any:
        """`step(*args)`; None where that fails, which costs the drafts of this request alone."""
        try:
            return step(*args)
        except Exception as error:
            self.guard.raise_if_wrong(error)
            self.guard.tell(f"for request {shown_id(req_id)}", error)
            return None

    def report(self) -> Callable[[], DraftReport]:
        """A function that makes the step's draft report when its output leaves the worker."""
        raise NotImplementedError

    def has_nothing_to_report(self) -> bool:
        """Whether there are no drafts, nor any on their way."""
        raise NotImplementedError

    def leaves(self, output: Any) -> Any:
        """The output of a step of the runner, with a draft report."""
        if not (self.timer.pending or self.refused or faults(self.engine)) and self.has_nothing_to_report():
            return output
        try:
            report, told = self.report(), {"refused": self.refused.take(), "faults": faults(self.engine)}
            return when_it_leaves(output, partial(self._leaves, report, told))
        except Exception as error:
            self.reporting.fail(error)
            self._attach_faults(output)
            return output

    def _leaves(self, report: Callable[[], DraftReport], told: dict[str, Any], output: Any) -> None:
        self.reporting.run(lambda: attach(output, report()._replace(**told, times=self.timer.take())))
        if self.reporting.is_off:
            self._attach_faults(output)

    def _attach_faults(self, output: Any) -> None:
        """So that the scheduler grants no slots."""
        with suppress(Exception):
            attach(output, DraftReport(faults=faults(self.engine)))

    def open(self, req_id: str, sampling_params: Any) -> wire.RequestContent | None:
        """`open_request` with what this drafter has."""
        return open_request(
            req_id,
            sampling_params,
            self.refused,
            vocab_size=self.vocab_size,
            capacity=self.capacity,
            packs=() if self.recipes is None else self.recipes.names,
            even_without=self.settings.draft_without_prediction,
        )

    def follow(self, req_id: str, content: wire.RequestContent, prompt_len: int, params: Any) -> None:
        """A request that is drafted for has come, or has returned."""
        if self.log is not None:
            self.log.add(req_id, content, prompt_len, params)

    def finish(self, req_ids: Collection[str]) -> None:
        if self.log is not None:
            self.log.finish(req_ids)

    def add(
        self, slot: int, req_id: str, content: wire.RequestContent, prompt_len: int
    ) -> wire.RequestContent | None:
        """Give a slot of the drafter to a request: what it is drafted from, without `token_ids` where these
        have no room; None, with a warning, where the drafter refuses them."""
        # Without our scheduler no request shares: it finds its own after a preemption.
        key = req_id if content.sharing_key is None else content.sharing_key
        try:
            held = self.drafter.add(
                slot,
                content.token_ids,
                prompt_len,
                sharing_key=key,
                recipes=content.recipes,
                kind=content.kind,
                end_tokens=content.end_tokens,
                temperature=content.temperature,
            )
        except Exception as error:
            if not isinstance(error, (TypeError, ValueError)):
                self.guard.raise_if_wrong(error)
            told = "Request %s is served without its prediction: %s"
            logger.warning(told, shown_id(req_id), shown_fault(error))
            return None
        if held:
            return content
        if content.kind == wire.TextKind.PREDICTION:
            told = "Request %s is served without its prediction: no room for it among the others "
            self.refused.tell(req_id, "room", told + "(GPU_ALIGN_ARENA_TOKENS)")
        else:
            told = "A request is served without earlier answers: no room for them among the predictions"
            warn_once(f"{told} (GPU_ALIGN_ARENA_TOKENS; told once)")
        return content._replace(token_ids=content.token_ids[:0])


def ours(runner: Any) -> Any:
    """The drafter of either model runner, if it is ours."""
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    drafter = getattr(drafter, "predicted", drafter)  # beside vLLM's own
    return drafter if isinstance(drafter, RequestDrafter) else None


@seam("usage_v1.sample_tokens", "v2.sample_tokens")
def sample_tokens(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner.sample_tokens` of either runner, whose output then has a draft report."""
    output = original(self, *args, **kwargs)
    drafter = ours(self)
    if drafter is None or output is None:
        return output
    drafter.timer.end(self)
    return drafter.leaves(output)

"""The drafter of vLLM's V2 model runner: drafts are made and stay on the device. The rows of the runner's
`req_states` are the drafter's slots, its tensors the drafter's arguments: nothing is translated or copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from ..config import engine_config
from ..config.in_use import inner_tokens
from ..seams.guard import PAUSE, Guard
from ..seams.install import Original, install, seam
from ..wire.reports import DRAFT_MODEL, INNER_DRAFTER, DraftReport
from ..wire.request import RequestContent
from .draft_reporter import DraftReporter
from .own_draw import verify_by_own_draw
from .request_drafter import RequestDrafter, ours
from .startup import compiling
from .step_log import DebugLog

#: In place of the seconds of `PAUSE` where ranks have to draft alike.
PAUSE_STEPS = 3000


class PredictedOutputsSpeculator(RequestDrafter, BaseSpeculator):  # type: ignore[misc]  # not typed for us
    """Drafts from each request's prediction, its own context and recipes; made on the last PP rank, once a worker.
    Each tensor-parallel rank verifies the drafts that it made itself.

    req_states: the runner's table of requests. The drafter reads `all_token_ids.gpu` [max_num_reqs, max_model_len]
    int32, which becomes dense device memory, and `total_len.gpu` [max_num_reqs] int32.
    """

    supports_mm_inputs = False
    draft_logits = None  # no model samples drafts: see `own_draw`

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        max_slots, max_context_len = req_states.all_token_ids.gpu.shape
        parallel = vllm_config.parallel_config
        tp_size, self._steps = int(parallel.tensor_parallel_size), 0
        clock = None if tp_size == 1 else lambda: self._steps * PAUSE / PAUSE_STEPS
        super().__init__(vllm_config, max_context_len, tp_size, clock, device)
        self.num_ranks = tp_size * int(getattr(parallel, "data_parallel_size", 1))
        self.req_states = req_states
        # What vLLM's adaptive verification trims by.
        self._speculative = vllm_config.speculative_config
        self.draft_token_confidence_probs = torch.zeros(
            (max_slots, self.num_draft_tokens), dtype=torch.float32, device=device
        )
        self._occupied = np.zeros(max_slots, dtype=np.bool_)
        #: Row → its request, what that is drafted from, and the length of its prompt. A step without one is
        #: vLLM's, but for this test.
        self._held: dict[int, tuple[str, RequestContent, int]] = {}
        #: Whether the drafter has to be given all of them again.
        self._starts_over = False
        #: The same on the device, where vLLM's own drafter drafts for the others.
        self._is_ours = torch.zeros(
            max_slots if inner_tokens(vllm_config) else 0, dtype=torch.bool, device=device
        )
        self._nothing = torch.zeros((max_slots, self.num_draft_tokens), dtype=torch.int64, device=device)
        self._idle = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self.reporter: Any = None
        #: Of the model's own drafter, where there is one.
        self.inner = Guard(INNER_DRAFTER, "uses no drafter of the model's", engine=self.engine)
        self.start(partial(self._make_all, vllm_config, device))

    def _make_all(self, vllm_config: Any, device: torch.device) -> None:
        states, max_slots = self.req_states, len(self._occupied)
        _make_dense(states, (max_slots, self.max_context_len), device)
        self.make(vllm_config, states.all_token_ids.gpu, states.total_len.gpu, backend="triton")
        # Nothing else makes sure that a dummy run comes before the first request.
        with compiling("the drafter's kernel"):
            self.drafter.warm_up()
        in_flight = 1 + int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1))
        self.reporter = DraftReporter(max_slots, self.num_draft_tokens, device, in_flight)

    @property
    def enable_adaptive_verification(self) -> bool:
        """Whether vLLM shall trim our drafts; by the time it asks, that may have been refused."""
        return bool(self._speculative.enable_adaptive_verification)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to set up: the step is one launch outside the model's graphs."""

    def capture(self) -> None:
        """Nothing to capture."""

    def observe(self, new: Any) -> None:
        """The runner has given a row to a new request, or to one that resumes."""
        slot = self.req_states.req_id_to_index[new.req_id]
        self.add_request(new.req_id, slot, int(self.req_states.prompt_len.np[slot]), new.sampling_params)

    def add_request(self, req_id: str, slot: int, prompt_len: int, sampling_params: Any) -> None:
        """A request got row `slot`, maybe after a preemption, with more tokens than its prompt."""
        self.remove_slot(slot)
        if sampling_params is None or self.drafter is None:
            return
        content = self.open(req_id, sampling_params)
        if content is not None and not self._starts_over:
            content = self.add(slot, req_id, content, prompt_len)
        if content is None:
            return
        self._held[slot] = req_id, content, prompt_len
        self._occupied[slot] = True
        self._is_ours[slot : slot + 1] = True
        self.follow(req_id, content, prompt_len, sampling_params)

    def remove_slot(self, slot: int) -> None:
        """Row `slot` is free. Harmless when nothing is drafted for it."""
        if (held := self._held.pop(slot, None)) is not None:
            self._occupied[slot] = False
            self._is_ours[slot : slot + 1] = False
            if not self._starts_over:
                self.for_request(held[0], self.drafter.remove, slot)

    def start_over(self) -> None:
        self._starts_over = True

    def _add_all(self) -> None:
        """Give the drafter all requests again, as after a preemption."""
        for slot in range(len(self._occupied)):
            self.drafter.remove(slot)
        self._starts_over = False
        for slot, (req_id, content, prompt_len) in [*self._held.items()]:
            if self.add(slot, req_id, content, prompt_len) is None:
                self.remove_slot(slot)

    def has_nothing_to_report(self) -> bool:
        return not (self._held or (self.reporter is not None and self.reporter.in_flight))

    def report(self) -> Callable[[], DraftReport]:
        reporter = self.reporter
        return DraftReport if reporter is None else partial(reporter.report, reporter.step)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any = None,
        slot_mappings: Any = None,
        last_hidden_states: Any = None,
        aux_hidden_states: Any = None,
        num_sampled: Any = None,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        models: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [num_reqs, K] in batch order, always valid token ids. Called after the sampled tokens are in
        `req_states`; waits for nothing (but for the step log, with `GPU_ALIGN_DEBUG_DIR`).

        num_sampled: [num_reqs] int32; 0 = still prefilling. dummy_run: a step without requests: the kernels run
        (and compile), no state changes. num_speculative_tokens: how many of the drafts may be verified. models:
        [num_reqs, k], k ≤ K, the drafts of the model's own drafter, for the rows of requests that are not ours.
        """
        num_reqs = len(input_batch.req_ids)
        drafts: torch.Tensor | None = None
        self._steps += 1
        if dummy_run or self._held:
            drafts = self.guard.run(self._propose, input_batch, num_reqs, num_sampled, dummy_run, models)
        else:
            # Of a step before, or on a rank whose outputs are not used.
            if self.reporter is not None and self.reporter.in_flight:
                self.reporter.begin_step()
            if num_speculative_tokens == 0:
                return self._nothing[:num_reqs]  # which the runner overwrites
        if drafts is None:
            if self.enable_adaptive_verification:
                self.draft_token_confidence_probs[:num_reqs].zero_()
            # The runner may have written -1 into what it was given.
            drafts = self._nothing[:num_reqs].zero_()
            if models is not None:
                self._choose(models, input_batch, drafts)
        return drafts

    def _propose(
        self, input_batch: Any, num_reqs: int, num_sampled: Any, dummy_run: bool, models: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self._starts_over:
            self._add_all()
        self.reporter.begin_step()
        if dummy_run:
            num_sampled = self._idle[:num_reqs]
        elif not self._occupied[input_batch.idx_mapping_np].any():
            return None
        rows = input_batch.idx_mapping.to(torch.int64)  # int32 before vLLM 0.32
        log = None if dummy_run else self.log
        trims = self.enable_adaptive_verification
        req_ids, host_rows = input_batch.req_ids, input_batch.idx_mapping_np
        started = time.perf_counter_ns()
        if log is not None:
            log.guard.run(self._settle, log, input_batch, num_sampled)
        draft = self.drafter.propose(rows, num_sampled)
        if models is not None:
            self._choose(models, input_batch, draft.token_ids, draft)
        if log is not None:
            log.proposed(req_ids, draft, (time.perf_counter_ns() - started) // 1000)
        if not dummy_run:
            if trims:
                self.draft_token_confidence_probs[:num_reqs].copy_(draft.confidence)
            ends = input_batch.cu_num_logits if trims else None
            self.reporter.copy(req_ids, host_rows, draft, self.drafter.total_len, ends)
        drafts: torch.Tensor = draft.token_ids
        return drafts

    def _settle(self, log: DebugLog, batch: Any, num_sampled: torch.Tensor) -> None:
        """Log a step with the draft slots that it verified: those that the device kept."""
        slots = batch.num_draft_tokens_per_req
        if slots is None:
            slots = [0] * len(batch.req_ids)
        elif self.enable_adaptive_verification:
            slots = (batch.cu_num_logits.diff() - 1).tolist()
        tables = self.drafter.total_len, self.drafter.token_ids
        log.settle(batch.req_ids, batch.idx_mapping_np, slots, num_sampled.tolist(), *tables)

    def _choose(
        self, models: torch.Tensor, input_batch: Any, drafts: torch.Tensor, draft: Any = None
    ) -> None:
        """Put `models` into the rows of `drafts` whose requests are not ours, and with `GPU_ALIGN_DRAFTER_FILLS`
        into those that are empty. draft: of ours, whose length and source are told of it."""
        num_reqs, width = models.shape
        is_theirs = ~self._is_ours[input_batch.idx_mapping[:num_reqs].long()]
        if draft is not None:
            if self.settings.drafter_fills:
                is_theirs |= draft.length == 0
            draft.length.masked_fill_(is_theirs, width)
            draft.source.masked_fill_(is_theirs, DRAFT_MODEL)
        drafts[:, :width] = torch.where(is_theirs[:, None], models, drafts[:, :width])


def _make_dense(req_states: Any, shape: tuple[int, int], device: torch.device) -> None:
    """Put the runner's tokens into device memory, as vLLM does for its own n-gram drafter only: host memory
    would go over the bus every step. Nothing refers to the tensor yet; its pinned memory, which PyTorch would keep
    (4 bytes a token of every row), goes back."""
    req_states.all_token_ids = None  # its memory first
    req_states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=device)
    if device.type == "cuda":
        with suppress(AttributeError):  # of an older PyTorch
            torch.accelerator.memory.empty_host_cache()


def make_speculator(
    vllm_config: Any, device: torch.device, req_states: Any, original: Original | None = None
) -> Any:
    """Our speculator; or vLLM's own, which `original` makes, with ours inside."""
    install("v2")  # where that fails the engine, which is configured for drafts, gets empty ones
    install("graphs")
    verify_by_own_draw(vllm_config, device, req_states)
    if vllm_config.speculative_config.enable_adaptive_verification and (reason := install("adaptive")):
        engine_config.do_without(vllm_config, reason)
    if not inner_tokens(vllm_config) or original is None:
        return PredictedOutputsSpeculator(vllm_config, device, req_states)
    inner = original(engine_config.inner_config(vllm_config), device, req_states)
    return with_predictions(inner, PredictedOutputsSpeculator(vllm_config, device, req_states))


def with_predictions(inner: Any, predicted: PredictedOutputsSpeculator) -> Any:
    """A speculator of vLLM's that stays what it is for the runner, but for `propose`: requests that are ours get
    our drafts, every other one those of the model's drafter; never a draft of both."""
    base: Any = type(inner)

    class WithPredictions(base):  # type: ignore[misc]  # not typed for us
        def propose(
            self,
            *args: Any,
            dummy_run: bool = False,
            num_speculative_tokens: int | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            models: torch.Tensor | None = None
            if not predicted.inner.is_off:
                more = {"dummy_run": dummy_run, **kwargs}
                if num_speculative_tokens is not None:  # ours; 0 where no request can use a draft
                    more["num_speculative_tokens"] = min(num_speculative_tokens, self.num_speculative_steps)
                try:
                    models = super().propose(*args, **more)
                except Exception as error:
                    if dummy_run or predicted.num_ranks > 1:
                        raise  # a start, or ranks that would part
                    predicted.inner.end(error)
            chosen = None if num_speculative_tokens == 0 else models
            return predicted.propose(*args, dummy_run=dummy_run, models=chosen, **kwargs)

    inner.predicted, inner.__class__ = predicted, WithPredictions
    return inner


@seam("v2.add_requests")
def add_requests(original: Original, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner.add_requests`, which begins a step; after it our speculator learns the new rows."""
    new, finished = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
    speculator = ours(self)
    if speculator is not None:
        speculator.timer.begin(scheduler_output, idle=speculator.has_nothing_to_report())
        if new or finished:
            speculator.finish(finished)
            speculator.fit()
    result = original(self, scheduler_output, *args, **kwargs)
    for request in new if speculator is not None else ():
        speculator.for_request(request.req_id, speculator.observe, request)
    return result


@seam("v2._remove_request")
def remove_request(original: Original, self: Any, req_id: str, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner._remove_request` (finished, aborted, preempted), which also frees our slot."""
    if (speculator := ours(self)) is not None:
        speculator.remove_slot(speculator.req_states.req_id_to_index.get(req_id, -1))
    return original(self, req_id, *args, **kwargs)

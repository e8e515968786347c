"""The drafter of vLLM's V2 model runner: drafts are made and stay on the device. The rows of the runner's
`req_states` are the drafter's slots, its tensors the drafter's arguments: nothing is translated or copied.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from ..config import engine_config
from ..config.in_use import inner_tokens
from ..seams.install import DraftingGuard, guarded, install, off_reason, seam, shown_error
from ..wire.reports import DRAFT_MODEL
from .draft_reporter import DraftReporter
from .request_drafter import DRAFTING, RequestDrafter, ours
from .requests import take_refusals
from .startup import compiling

logger = logging.getLogger("vllm.gpu_align")

#: Requests of so many tokens, and those that return with output, are prepared beside their prefill.
PREPARED_LEN = 512


class PredictedOutputsSpeculator(RequestDrafter, BaseSpeculator):  # type: ignore[misc]  # not typed for us
    """Drafts from each request's prediction, its own context and recipes; made on the last PP rank, once a worker.
    Each tensor-parallel rank verifies the drafts that it made itself.

    req_states: the runner's table of requests. Each step reads `all_token_ids.gpu` [max_num_reqs, max_model_len]
    int32 and `total_len.gpu` [max_num_reqs] int32. The former becomes dense device memory (4 bytes a token of
    every row); the drafter's index of it takes as much or up to twice that.
    """

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain: the rejection sampler accepts with the target's probability

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        max_slots, max_context_len = req_states.all_token_ids.gpu.shape
        guard = DraftingGuard(int(vllm_config.parallel_config.tensor_parallel_size))
        super().__init__(vllm_config, max_context_len, guard)
        self.req_states = req_states
        # What vLLM's adaptive verification trims by.
        self._speculative = vllm_config.speculative_config
        self.draft_token_confidence_probs = torch.zeros(
            (max_slots, self.num_draft_tokens), dtype=torch.float32, device=device
        )
        self._occupied = np.zeros(max_slots, dtype=np.bool_)
        #: Rows that are occupied. A step without one is vLLM's, but for this number's test.
        self._num_occupied = 0
        parallel = vllm_config.parallel_config
        self.num_ranks = int(parallel.tensor_parallel_size) * int(getattr(parallel, "data_parallel_size", 1))
        #: The same on the device, where vLLM's own drafter drafts for the others.
        self._is_ours = torch.zeros(
            max_slots if inner_tokens(vllm_config) else 0, dtype=torch.bool, device=device
        )
        self._nothing = torch.zeros((max_slots, self.num_draft_tokens), dtype=torch.int64, device=device)
        self._idle = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self.reporter: Any = None
        batches_in_flight = int(getattr(vllm_config, "max_concurrent_batches", 1))
        try:
            _make_dense(req_states, device)
            self.make(vllm_config, max_slots, device, backend="triton")
            self.reporter = DraftReporter(
                max_slots, self.num_draft_tokens, device, batches_in_flight, self.miss_log
            )
        except Exception as error:
            self.guard.fail(DRAFTING, error)
        self.run(self._compile)

    @property
    def enable_adaptive_verification(self) -> bool:
        """Whether vLLM shall trim our drafts; by the time it asks, that may have been refused."""
        return bool(self._speculative.enable_adaptive_verification)

    def _compile(self) -> None:
        """Nothing else makes sure that a dummy run comes before the first request."""
        with compiling("the drafter's kernel"):
            self.drafter.warm_up(self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to set up: the step is one launch outside the model's graphs."""

    def capture(self) -> None:
        """Nothing to capture."""

    @guarded
    def observe_new(self, scheduler_output: Any) -> None:
        """The runner has given rows to the new requests of a step, and to those that resume."""
        states, long = self.req_states, []
        for new in scheduler_output.scheduled_new_reqs:
            slot = states.req_id_to_index[new.req_id]
            prompt_len, num_tokens = int(states.prompt_len.np[slot]), int(states.prefill_len.np[slot])
            self.add_request(new.req_id, slot, prompt_len, new.sampling_params)
            if self._occupied[slot] and (num_tokens >= PREPARED_LEN or num_tokens > prompt_len):
                long.append(slot)
        if long:
            self.drafter.prepare(states.all_token_ids.gpu, states.total_len.gpu, long)

    @guarded
    def observe_gone(self, req_id: str) -> None:
        """The runner is about to free the row of a request: finished, aborted or preempted."""
        slot = self.req_states.req_id_to_index.get(req_id)
        if slot is not None:
            self.remove_slot(slot)

    @guarded
    def add_request(self, req_id: str, slot: int, prompt_len: int, sampling_params: Any) -> None:
        """A request got row `slot`, maybe after a preemption, with more tokens than its prompt: upload its
        prediction. The next step rebuilds what is known of it from its tokens."""
        self.remove_slot(slot)
        if sampling_params is None:
            return
        content = self.open(req_id, sampling_params)
        held = None if content is None else self.add(slot, req_id, content, prompt_len)
        if held is None:
            return
        self._occupied[slot] = True
        self._num_occupied += 1
        self._is_ours[slot : slot + 1] = True
        self.follow(req_id, held, prompt_len, sampling_params)

    def remove_slot(self, slot: int) -> None:
        """Row `slot` no longer belongs to its request. Harmless when nothing is drafted for it."""
        if self._occupied[slot]:
            self._occupied[slot] = False
            self._num_occupied -= 1
            self._is_ours[slot : slot + 1] = False
            self.drafter.remove(slot)

    def has_nothing_to_report(self) -> bool:
        reporter = self.reporter
        return not (self._num_occupied or reporter is None or reporter.in_flight or reporter.model_fails)

    def report(self) -> Callable[[Any], None]:
        if self.reporter is None:
            return super().report()
        return partial(self.reporter.attach, step=self.reporter.step, refused=take_refusals())

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

        num_sampled: [num_reqs] int32; 0 = still prefilling. dummy_run: vLLM runs the step without requests, to
        warm up or to keep ranks together: the kernels run (and compile), no state changes. num_speculative_tokens:
        how many of the drafts the scheduler may verify. models: [num_reqs, k], k ≤ K, the drafts of the model's
        own drafter, which rows of requests that are not ours begin with; nobody verifies what is behind them.
        """
        num_reqs = len(input_batch.req_ids)
        drafts: torch.Tensor | None = None
        if dummy_run or self._num_occupied or self.reporter is None:
            drafts = self.run(self._propose, input_batch, num_reqs, num_sampled, dummy_run, models)
        else:
            if self.reporter.in_flight:  # of a step before, or on a rank whose outputs are not used
                self.run(self.reporter.begin_step)
            if num_speculative_tokens == 0:
                return self._nothing[:num_reqs]  # which the runner overwrites
        if drafts is None:
            drafts = self._no_drafts(num_reqs)
            if models is not None:
                self._choose(models, input_batch, drafts)
        return drafts

    def _propose(
        self, input_batch: Any, num_reqs: int, num_sampled: Any, dummy_run: bool, models: torch.Tensor | None
    ) -> torch.Tensor | None:
        self.reporter.begin_step()
        if dummy_run:
            num_sampled = self._idle[:num_reqs]
        elif not self._occupied[input_batch.idx_mapping_np].any():
            return None
        states, rows = self.req_states, input_batch.idx_mapping.to(torch.int64)  # int32 before vLLM 0.32
        token_ids, total_len = states.all_token_ids.gpu, states.total_len.gpu
        log = None if dummy_run or self.log is None or not self.log.on else self.log
        trims = self.enable_adaptive_verification
        req_ids, host_rows = input_batch.req_ids, input_batch.idx_mapping_np
        started = time.perf_counter_ns()
        if log is not None:
            slots = _verified(input_batch, trims)
            log.settle(req_ids, host_rows, slots, num_sampled.tolist(), total_len, token_ids)
        draft = self.drafter.propose(token_ids, total_len, rows, num_sampled)
        if models is not None:
            self._choose(models, input_batch, draft.token_ids, draft.length, draft.source)
        if log is not None:
            log.proposed(req_ids, draft, (time.perf_counter_ns() - started) // 1000)
        if not dummy_run:
            if trims:
                self.draft_token_confidence_probs[:num_reqs].copy_(draft.confidence)
            tails = None if self.miss_log is None else self.miss_log.tails_of(token_ids, total_len, rows)
            ends = input_batch.cu_num_logits if trims else None
            self.reporter.copy(req_ids, host_rows, draft, total_len, ends, tails)
        drafts: torch.Tensor = draft.token_ids
        return drafts

    def _choose(
        self,
        models: torch.Tensor,
        input_batch: Any,
        drafts: torch.Tensor,
        length: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        """Put `models` into the rows of `drafts` whose requests are not ours, and with `GPU_ALIGN_DRAFTER_FILLS`
        into those that are empty. length, source: [num_reqs] of the drafts, which are told of it."""
        num_reqs, width = models.shape
        _put_models[(num_reqs,)](
            drafts,
            models,
            input_batch.idx_mapping,
            self._is_ours,
            length,
            source,
            width,
            *(*drafts.stride(), *models.stride()),
            SOURCE=DRAFT_MODEL,
            FILLS=self.settings.drafter_fills,
            BLOCK=triton.next_power_of_2(width),
        )

    def _no_drafts(self, num_reqs: int) -> torch.Tensor:
        if self.enable_adaptive_verification:
            self.draft_token_confidence_probs[:num_reqs].zero_()
        # The runner may have written -1 into what it was given.
        return self._nothing[:num_reqs].zero_()


@triton.jit  # type: ignore[untyped-decorator]
def _put_models(  # type: ignore[no-untyped-def]
    drafts_ptr, models_ptr, rows_ptr, is_ours_ptr, length_ptr, source_ptr,
    width, draft_row, draft_column, model_row, model_column,
    SOURCE: tl.constexpr, FILLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The drafts of the model's own drafter, where the request of a batch position is not ours; `FILLS`: also
    where ours is empty. length_ptr, source_ptr: [B] or None."""
    b = tl.program_id(0)
    is_theirs = tl.load(is_ours_ptr + tl.load(rows_ptr + b)) == 0
    if length_ptr is not None:
        if FILLS:
            is_theirs |= tl.load(length_ptr + b) == 0
        tl.store(length_ptr + b, width, mask=is_theirs)
        tl.store(source_ptr + b, SOURCE, mask=is_theirs)
    k = tl.arange(0, BLOCK)
    taken = k < tl.where(is_theirs, width, 0)
    tokens = tl.load(models_ptr + b * model_row + k * model_column, mask=taken)
    tl.store(drafts_ptr + b * draft_row + k * draft_column, tokens, mask=taken)


def _verified(batch: Any, trims: bool) -> Sequence[int]:
    """[B] draft slots that a step verified: what the device kept, of one logit more, not what was scheduled."""
    if batch.num_draft_tokens_per_req is None:
        return [0] * len(batch.req_ids)
    kept: Sequence[int] = (
        (batch.cu_num_logits.diff() - 1).tolist() if trims else batch.num_draft_tokens_per_req
    )
    return kept


def _make_dense(req_states: Any, device: torch.device) -> None:
    """Put the runner's tokens into device memory, as vLLM does for its own n-gram drafter only: host memory
    that the device can read would go over the bus every step. Nothing has been written to, or refers to, the
    tensor yet; its pinned memory, which PyTorch would keep (4 bytes a token of every row), goes back."""
    shape = tuple(req_states.all_token_ids.gpu.shape)
    req_states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=device)
    if device.type == "cuda":
        with suppress(AttributeError):  # of an older PyTorch
            torch.accelerator.memory.empty_host_cache()


def make_speculator(
    vllm_config: Any, device: torch.device, req_states: Any, original: Callable[..., Any] | None = None
) -> Any:
    """Our speculator, with the runner's methods wrapped so that it hears of requests; or vLLM's own, which
    `original` makes, with ours inside."""
    if install("v2"):
        # The engine is configured for drafts and has to get some; these will be none.
        logger.warning("gpu_align proposes nothing: %s", off_reason())
    engine_config.prepare(vllm_config)
    if not inner_tokens(vllm_config) or original is None:
        return PredictedOutputsSpeculator(vllm_config, device, req_states)
    inner = original(engine_config.inner_config(vllm_config), device, req_states)
    return with_predictions(inner, PredictedOutputsSpeculator(vllm_config, device, req_states))


def with_predictions(inner: Any, predicted: PredictedOutputsSpeculator) -> Any:
    """A speculator of vLLM's that stays what it is for the runner, but for `propose`: requests that are ours get
    our drafts, every other one those of the model's drafter; never a draft of both."""
    inner.predicted = predicted
    inner.__class__ = _with_predictions(type(inner))  # type: ignore[arg-type]
    return inner


@functools.cache
def _with_predictions(base: Hashable) -> Any:
    class WithPredictions(base):  # type: ignore[misc, valid-type]  # not typed for us
        predicted: PredictedOutputsSpeculator
        has_failed = False

        def propose(
            self,
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: Any,
            aux_hidden_states: Any,
            num_sampled: Any,
            *args: Any,
            num_speculative_tokens: int | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            hidden = last_hidden_states, aux_hidden_states
            given = input_batch, attn_metadata, slot_mappings, *hidden, num_sampled, *args
            dummy_run = bool(kwargs.get("dummy_run"))
            models: torch.Tensor | None = None
            if not self.has_failed:
                if num_speculative_tokens is not None:  # ours; 0 where no request can use a draft
                    kwargs["num_speculative_tokens"] = min(num_speculative_tokens, self.num_speculative_steps)
                try:
                    models = super().propose(*given, **kwargs)
                except Exception as error:
                    if dummy_run or self.predicted.num_ranks > 1:
                        raise  # a start, or ranks that would part
                    self.has_failed = True
                    if self.predicted.reporter is not None:
                        self.predicted.reporter.model_fails = True
                    logger.error(
                        "gpu_align goes on without the model's drafter: %s", shown_error(error), exc_info=True
                    )
            return self.predicted.propose(
                input_batch,
                num_sampled=num_sampled,
                dummy_run=dummy_run,
                models=None if num_speculative_tokens == 0 else models,
            )

    return WithPredictions


@seam("v2.add_requests")
def add_requests(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner.add_requests`, after which our speculator learns the new rows and predictions."""
    result = original(self, scheduler_output, *args, **kwargs)
    if scheduler_output.scheduled_new_reqs and (speculator := ours(self)) is not None:
        speculator.observe_new(scheduler_output)
    return result


@seam("v2._remove_request")
def remove_request(original: Callable[..., Any], self: Any, req_id: str, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner._remove_request` (finished, aborted, preempted), which also frees our slot."""
    if (speculator := ours(self)) is not None:
        speculator.observe_gone(req_id)
    return original(self, req_id, *args, **kwargs)


@seam("v2.finish_requests")
def finish_requests(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner.finish_requests`, before which finished requests' step logs are written."""
    if scheduler_output.finished_req_ids and (speculator := ours(self)) is not None:
        speculator.finish(scheduler_output.finished_req_ids)
    return original(self, scheduler_output, *args, **kwargs)

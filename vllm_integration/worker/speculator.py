"""The drafter of vLLM's V2 model runner: drafts are made and stay on the device.

vLLM's V2 runner keeps every request in a row of `req_states`; its row numbers are the drafter's slots, its
tensors the drafter's arguments. Nothing is translated, and nothing is copied, on the way in or out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from gpu_align import Drafter
from vllm_integration.config import adaptive
from vllm_integration.config.settings import Settings
from vllm_integration.seams.install import install, off_reason, seam, turn_off
from vllm_integration.worker.accept import accept_prediction, found_no_room, take_refusals
from vllm_integration.worker.draft_reporter import DraftReporter, when_it_leaves
from vllm_integration.worker.recipes import load_recipes
from vllm_integration.worker.request_state import warm_up_log
from vllm_integration.worker.step_log import open_step_log
from vllm_integration.worker.warm_up import compiling

logger = logging.getLogger("vllm.gpu_align")


class PredictedOutputsSpeculator(BaseSpeculator):  # type: ignore[misc]  # vLLM is not typed for us
    """Drafts from each request's prediction, its own context and recipes; made once a worker, on the last PP rank.

    vllm_config: the engine's configuration. device: where the engine's tensors are.
    req_states: the runner's table of requests. Read each step, as they are on the device:
        `all_token_ids.gpu` [max_num_reqs, max_model_len] int32, `total_len.gpu` [max_num_reqs] int32.

    Memory on the device: `all_token_ids` becomes dense (4 bytes a token of every row), the drafter's
    index of it takes as much or up to twice that, predictions take 12 bytes a token of `GPU_ALIGN_ARENA_TOKENS`,
    recipes about 150 bytes each.
    Raises `ValueError` when a `GPU_ALIGN_*` variable cannot be read.
    """

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain: the rejection sampler accepts with the target's probability

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        speculative = vllm_config.speculative_config
        self.settings = Settings.from_env()
        self.req_states = req_states
        self.num_draft_tokens = int(speculative.num_speculative_tokens)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        max_slots, max_context_len = _make_dense(req_states, device)
        self.capacity = self.settings.prediction_capacity(max_context_len)
        recipes = load_recipes(self.settings, vllm_config)
        self.drafter = Drafter(
            max_slots=max_slots,
            max_context_len=max_context_len,
            max_prediction_len=self.capacity,
            num_draft_tokens=self.num_draft_tokens,
            vocab_size=self.vocab_size,
            device=device,
            recipes=recipes,
            backend="triton",
            max_prediction_tokens=self.settings.prediction_room(max_slots, self.capacity),
        )
        self.reporter = DraftReporter(
            max_slots, self.num_draft_tokens, device, int(getattr(vllm_config, "max_concurrent_batches", 1))
        )
        # What vLLM's adaptive verification trims by.
        self._speculative = speculative
        self.draft_token_confidence_probs = torch.zeros(
            (max_slots, self.num_draft_tokens), dtype=torch.float32, device=device
        )
        self.log = open_step_log(self.settings.debug_dir, self.num_draft_tokens, vllm_config, recipes)
        self._occupied = np.zeros(max_slots, dtype=np.bool_)
        self._nothing = torch.zeros((max_slots, self.num_draft_tokens), dtype=torch.int64, device=device)
        self._idle = torch.zeros(max_slots, dtype=torch.int32, device=device)
        # vLLM's row numbers are int32; widened in place, so that a step allocates nothing.
        self._slots = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._warm_up = (
            None if self.log is None else warm_up_log(self.num_draft_tokens, max_context_len, recipes)
        )
        self._compile()

    @property
    def enable_adaptive_verification(self) -> bool:
        """Whether vLLM shall trim our drafts; by the time it asks, that may have been refused."""
        return bool(self._speculative.enable_adaptive_verification)

    def _compile(self) -> None:
        """Compile the step now: nothing but this makes sure that a dummy run comes before the first request."""
        if off_reason() is not None:
            return
        try:
            with compiling("the drafter's kernel"):
                self.drafter.warm_up(self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu)
        except Exception as error:
            if self.settings.strict:
                raise
            turn_off(f"drafting failed, {type(error).__name__}: {error}")

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to set up: the step is one launch outside the model's graphs. The runner calls this last before
        it may serve, when it has loaded the model and knows its memory, so by then everything has to be compiled.
        """
        if self._warm_up is not None:
            self._warm_up.finish()

    def capture(self) -> None:
        """Nothing to capture."""

    def add_request(self, req_id: str, slot: int, prompt_len: int, sampling_params: Any) -> None:
        """A request got row `slot`: upload its prediction, once.

        Also called when a preempted request returns, in whatever row and with more tokens than its prompt:
        the next step rebuilds what is known of it from its tokens.
        """
        self.remove_slot(slot)
        if sampling_params is None or off_reason() is not None:
            return
        prediction = accept_prediction(
            req_id, sampling_params, vocab_size=self.vocab_size, capacity=self.capacity
        )
        if prediction is None and not self.settings.draft_without_prediction:
            return
        try:
            held = self.drafter.add(slot, [] if prediction is None else prediction, prompt_len)
        except Exception as error:
            # A prediction that the drafter refuses, or memory that is not to be had.
            logger.warning("Request %s is served without its prediction: %s", req_id, error)
            return
        if not held:
            found_no_room(req_id)
        self._occupied[slot] = True
        if self.log is not None:
            self.log.add(req_id, prediction if held else None, prompt_len, sampling_params)

    def remove_slot(self, slot: int) -> None:
        """Row `slot` no longer belongs to its request. Harmless when nothing is drafted for it."""
        if self._occupied[slot]:
            self._occupied[slot] = False
            self.drafter.remove(slot)

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
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [num_reqs, K] in batch order, always valid token ids. Called after the sampled tokens are in
        `req_states`; waits for nothing and copies nothing to the host (unless `GPU_ALIGN_DEBUG_DIR` asks for
        a log of every step).

        input_batch: read: `num_reqs`, `idx_mapping` [num_reqs] (batch position → row) and its host copy.
        num_sampled: [num_reqs] int32; 0 = still prefilling.
        dummy_run: vLLM runs the step without requests, to warm up or to keep ranks together: the kernels
            run (and compile), no state changes.
        """
        num_reqs = int(input_batch.num_reqs)
        self.reporter.begin_step()
        if off_reason() is not None:
            return self._no_drafts(num_reqs)
        if dummy_run:
            num_sampled = self._idle[:num_reqs]
        elif not self._occupied[input_batch.idx_mapping_np].any():
            return self._no_drafts(num_reqs)
        log = None if dummy_run else self.log
        started = time.perf_counter_ns()
        try:
            if log is not None:
                verified = (
                    adaptive.as_verified(input_batch) if self.enable_adaptive_verification else input_batch
                )
                log.settle(verified, num_sampled, self.req_states)
            draft = self.drafter.propose(
                self.req_states.all_token_ids.gpu,
                self.req_states.total_len.gpu,
                self._slots[:num_reqs].copy_(input_batch.idx_mapping),
                num_sampled,
            )
            if log is not None:
                log.proposed(input_batch, draft, (time.perf_counter_ns() - started) // 1000)
            if not dummy_run:
                self.draft_token_confidence_probs[:num_reqs].copy_(draft.confidence)
                self.reporter.copy(
                    input_batch.req_ids,
                    input_batch.idx_mapping_np,
                    draft,
                    self.req_states.total_len.gpu,
                    input_batch.cu_num_logits if self.enable_adaptive_verification else None,
                )
        except Exception as error:
            if self.settings.strict:
                raise
            turn_off(f"drafting failed, {type(error).__name__}: {error}")
            return self._no_drafts(num_reqs)
        return draft.token_ids

    def _no_drafts(self, num_reqs: int) -> torch.Tensor:
        self.draft_token_confidence_probs[:num_reqs].zero_()
        # The runner may have written -1 into what it was given.
        return self._nothing[:num_reqs].zero_()


def _make_dense(req_states: Any, device: torch.device) -> tuple[int, int]:
    """Put the runner's tokens into device memory; the shape of the table.

    By default they are host memory that the device can read, which a kernel that scans rows every step
    would drag over the bus. vLLM makes them dense for its own n-gram drafter only. Nothing has been written
    to, or has kept a reference to, the tensor yet.
    """
    rows, width = req_states.all_token_ids.gpu.shape
    req_states.all_token_ids = StagedWriteTensor((rows, width), dtype=torch.int32, device=device)
    return int(rows), int(width)


def _ours(runner: Any) -> PredictedOutputsSpeculator | None:
    speculator = getattr(runner, "speculator", None)
    return speculator if isinstance(speculator, PredictedOutputsSpeculator) else None


def make_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> PredictedOutputsSpeculator:
    """Our speculator, with the runner's methods wrapped so that it hears of requests."""
    if install("v2"):
        # The engine is configured for drafts and has to get some; these will be none.
        logger.warning("gpu_align proposes nothing: %s", off_reason())
    adaptive.prepare(vllm_config)
    return PredictedOutputsSpeculator(vllm_config, device, req_states)


@seam("v2.add_requests")
def add_requests(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner.add_requests`, after which our speculator learns the new rows and predictions."""
    result = original(self, scheduler_output, *args, **kwargs)
    speculator = _ours(self)
    if speculator is not None:
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[new.req_id]
            speculator.add_request(
                new.req_id, slot, int(self.req_states.prompt_len.np[slot]), new.sampling_params
            )
    return result


@seam("v2._remove_request")
def remove_request(original: Callable[..., Any], self: Any, req_id: str, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner._remove_request` (finished, aborted, preempted), which also frees our slot."""
    speculator = _ours(self)
    if speculator is not None:
        slot = self.req_states.req_id_to_index.get(req_id)
        if slot is not None:
            speculator.remove_slot(slot)
    return original(self, req_id, *args, **kwargs)


@seam("v2.finish_requests")
def finish_requests(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner.finish_requests`, before which finished requests' step logs are written."""
    speculator = _ours(self)
    if speculator is not None and speculator.log is not None:
        speculator.log.finish(scheduler_output.finished_req_ids)
    return original(self, scheduler_output, *args, **kwargs)


@seam("v2.sample_tokens")
def sample_tokens(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner.sample_tokens`, whose output then carries draft lengths to the scheduler."""
    output = original(self, *args, **kwargs)
    speculator = _ours(self)
    if speculator is None or output is None:
        return output
    reporter, step, refused = speculator.reporter, speculator.reporter.step, take_refusals()
    return when_it_leaves(output, lambda finished: reporter.attach(finished, step, refused))

"""vLLM's adaptive verification with our confidences where it works, and draft slots without it where not.

With `enable_adaptive_verification` vLLM trims drafts on the device, by their probability of being accepted and
by what a longer step costs. It refuses what it cannot do at four places, from the configuration to the capture
of CUDA graphs, each time by an error that ends the start. Our schedulers bound draft slots in any case, so that
with our class each refusal becomes one WARNING, and the server starts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.seams.install import install, seam
from vllm_integration.seams.log_text import shown_reason

logger = logging.getLogger("vllm.gpu_align")


def is_on(vllm_config: Any) -> bool:
    """Whether the engine of this configuration drafts from predictions and is to trim them on the device."""
    return drafts_predictions(vllm_config) and bool(
        getattr(vllm_config.speculative_config, "enable_adaptive_verification", False)
    )


def do_without(vllm_config: Any, reason: object) -> None:
    """Turn adaptive verification off in this process; the first rank says so."""
    vllm_config.speculative_config.enable_adaptive_verification = False
    level = logging.DEBUG if getattr(vllm_config.parallel_config, "rank", 0) else logging.WARNING
    logger.log(
        level, "gpu_align schedules draft slots without adaptive verification: %s", shown_reason(reason)
    )


def prepare(vllm_config: Any) -> None:
    """Called before the model is loaded: the later refusals will be caught. A vLLM where they cannot be is one
    more refusal (with `GPU_ALIGN_STRICT=1` this raises `SeamError`)."""
    if is_on(vllm_config) and (reason := install("adaptive")):
        do_without(vllm_config, reason)


@seam("config._validate_adaptive_verification")
def validate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`VllmConfig._validate_adaptive_verification`, which refuses LoRA, pipeline parallelism and graphs that
    are not full."""
    try:
        return original(self, *args, **kwargs)
    except ValueError as error:
        if not is_on(self):
            raise
        do_without(self, error)


@seam("adaptive._cached_get_attn_backend")
def select_backend(
    original: Callable[..., Any], backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """`_cached_get_attn_backend`: where no attention backend, or not the one that was asked for, takes query
    lengths that only the device knows, one is chosen as without adaptive verification."""
    try:
        return original(backend, attn_selector_config, *args, **kwargs)
    except ValueError as error:
        from vllm.config import get_current_vllm_config

        if not attn_selector_config.use_adaptive_verification:
            raise
        config = get_current_vllm_config()
        if not drafts_predictions(config):
            raise
        # Raises what is wrong in any case.
        without = attn_selector_config._replace(use_adaptive_verification=False)
        chosen = original(backend, without, *args, **kwargs)
        if is_on(config):
            do_without(config, error)
        return chosen


@seam("adaptive.maybe_create_adaptive_verification_manager")
def create_manager(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`maybe_create_adaptive_verification_manager`, which refuses attention backends whose CUDA graphs take one
    query length only (FlashAttention 2), and those that a model brings and that need the lengths on the host."""
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        if not is_on(kwargs["vllm_config"]):
            raise
        do_without(kwargs["vllm_config"], error)
        return None


@seam("adaptive.initialize_kv_cache")
def initialize_kv_cache(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner.initialize_kv_cache`, in which the manager is made or refused. The rejection sampler was
    made before it; vLLM's own warm-up runs it without the manager in the same way."""
    result = original(self, *args, **kwargs)
    sampler = self.rejection_sampler
    if drafts_predictions(self.vllm_config) and self.adaptive_verification is None and sampler is not None:
        sampler.enable_adaptive_verification = False
    return result


@seam("adaptive.set_cost_curves")
def set_cost_curves(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`AdaptiveVerificationManager.set_cost_curves`, which fails when there was no step to time. Then every
    length costs the same: only drafts that cannot be accepted are trimmed."""
    try:
        return original(self, *args, **kwargs)
    except RuntimeError as error:
        states = self.req_states
        self.cost_tables = np.zeros(states.max_num_reqs + 1), np.ones(states.max_num_batched_tokens + 1)
        logger.warning(
            "gpu_align lets adaptive verification trim drafts without a price: %s", shown_reason(error)
        )


def as_verified(input_batch: Any) -> Any:
    """A view of a batch whose `num_draft_tokens_per_req` are the drafts that the device kept, not those that
    were scheduled. Waits for the device."""
    if input_batch.num_draft_tokens_per_req is None:
        return input_batch
    batch = copy.copy(input_batch)
    batch.num_draft_tokens_per_req = input_batch.cu_num_logits.diff().cpu().numpy() - 1
    return batch

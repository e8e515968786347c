"""How V1 samples where a request is drafted for: what vLLM (0.32) does there with parameters of sampling, mended.

With any drafter vLLM leaves out the logits processors of `min_p` and `logit_bias`, which its rejection
sampler does not give to drafts. The last token of each request goes through the ordinary sampler, with all
processors: a request that is never drafted for is served as by an engine without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..config.in_use import drafts_predictions
from ..seams.install import seam

logger = logging.getLogger("vllm.gpu_align")


def without_drafts(sampling_params: Any) -> bool:
    """Whether drafts of a request with these parameters would not be verified by its own distribution."""
    return (
        bool(sampling_params.logit_bias)
        or sampling_params.min_p > 0
        or sampling_params.thinking_token_budget is not None
    )


@seam("v1.apply_to_logits")
def apply_budget(
    original: Callable[..., Any],
    self: Any,
    logits: Any,
    predict_bonus_token: bool,
    spec_token_ids: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`ThinkingBudgetStateHolder.apply_to_logits`, which counts rows of logits by drafts and looks for the ends of
    thinking in what is written. Where the ordinary sampler samples a step, there is one row a request."""
    spec_mode = self.in_spec_mode
    self.in_spec_mode = spec_mode and (predict_bonus_token or any(spec_token_ids or ()))
    try:
        return original(self, logits, predict_bonus_token, spec_token_ids, *args, **kwargs)
    finally:
        self.in_spec_mode = spec_mode


@seam("v1.build_logitsprocs")
def build_processors(
    original: Callable[..., Any],
    vllm_config: Any,
    device: Any,
    is_pin_memory: bool,
    is_pooling_model: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`build_logitsprocs` as the V1 runner imported it: all that are built in. The original refuses others."""
    made = original(vllm_config, device, is_pin_memory, is_pooling_model, *args, **kwargs)
    if is_pooling_model or not drafts_predictions(vllm_config, even_if_off=True):
        return made
    from vllm.v1.sample import logits_processor

    known = list(made.all)
    added = [
        processor(vllm_config, device, is_pin_memory)
        for processor in logits_processor.BUILTIN_LOGITS_PROCESSORS
        if not any(isinstance(each, processor) for each in known)
    ]
    logger.info("gpu_align: requests with min_p or logit_bias are served, without drafts")
    return logits_processor.LogitsProcessors([*known, *added])


@seam("v1._sample")
def sample(
    original: Callable[..., Any], self: Any, logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner._sample`: `logprob_token_ids` are answered by the ordinary sampler only. Our scheduler plans
    no drafts beside them, so that it can sample the step."""
    if (
        spec_decode_metadata is not None
        and self.input_batch.sampling_metadata.logprob_token_ids
        and not any(spec_decode_metadata.num_draft_tokens)
    ):
        spec_decode_metadata = None
    return original(self, logits, spec_decode_metadata, *args, **kwargs)


@seam("v1.apply_sampling_constraints")
def constraints(original: Callable[..., Any], logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`apply_sampling_constraints` of [num_drafts, V] logits: of none, these. The original takes the largest
    `top_k` of the drafts, of which there is none, and the engine ends."""
    return original(logits, *args, **kwargs) if len(logits) else logits


@seam("v1.expand_batch_to_tokens")
def expand(
    original: Callable[..., Any],
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Any:
    """`expand_batch_to_tokens`: x[i], or `replace_to` where that is `replace_from`, as many times as request i has
    drafts, which end at cu_num_tokens[i]. On the CPU the original returns memory that nobody wrote to."""
    if x.device.type != "cpu":
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)

"""Two faults of the V1 rejection sampler (vLLM 0.32) that any drafter meets, mended where ours is configured.

Both are in functions of `vllm.v1.sample.rejection_sampler` that give each draft the sampling parameters of its
request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..seams.install import seam


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
    """`expand_batch_to_tokens`: x[i], or `replace_to` where that is `replace_from`, as many times as request i
    has drafts. On the CPU the original returns memory that nobody wrote to: the kernel that stands in for
    Triton's there writes to a converted copy.

    x: [B]. cu_num_tokens: [B], ends of the requests' drafts. Returns [num_tokens], the dtype of x.
    """
    if x.device.type != "cpu":
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)

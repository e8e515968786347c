"""Sampling parameters that vLLM refuses on any server that drafts, let through where ours serves them.

On V2 the sampler applies `min_p` and `logit_bias` to each draft as to any token. On V1 a request that has them
gets no drafts: `worker.parameters_v1`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm_integration.config.engine_config import V1_SCHEDULER
from vllm_integration.config.in_use import drafts_predictions
from vllm_integration.frontend.input_processor import engine_of_request
from vllm_integration.seams.install import are_whole, seam


@seam("parameters._validate_spec_decode")
def validate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`SamplingParams._validate_spec_decode`, which finds neither `min_p` nor `logit_bias`."""
    if (self.min_p or self.logit_bias) and _serves_them(engine_of_request.get()):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    return original(self, *args, **kwargs)


def _serves_them(vllm_config: Any) -> bool:
    """Whether the engine of this configuration does; None: of none of ours. On V1 our scheduler keeps vLLM's from
    planning placeholders for such a request, which would be verified like drafts."""
    if vllm_config is None or not drafts_predictions(vllm_config):
        return False
    if vllm_config.use_v2_model_runner:
        return True
    return vllm_config.scheduler_config.scheduler_cls == V1_SCHEDULER and are_whole(
        ("v1",), "gpu_align leaves min_p and logit_bias to vLLM"
    )

"""vLLM plugin of gpu-align: predicted outputs as draft tokens.

Importing this package imports neither vLLM nor torch; the names below load on first use.

    vllm serve MODEL --speculative-config \\
      '{"method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": 32}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .wire.request import PredictedOutputParams
    from .worker.proposer_v1 import PredictedOutputs

__all__ = ["PredictedOutputParams", "PredictedOutputs"]


def __getattr__(name: str) -> Any:
    if name == "PredictedOutputs":
        from .worker.proposer_v1 import PredictedOutputs

        return PredictedOutputs
    if name == "PredictedOutputParams":
        from .wire.request import PredictedOutputParams

        return PredictedOutputParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Every private vLLM name this package touches, in one table: `SEAMS`, put together from one module an area.

A seam is a name vLLM does not promise to keep. `compat` looks them up in the installed vLLM and wraps them,
`source_probe` looks them up in sources.
"""

from __future__ import annotations

from vllm_integration.seams import drafting_v1, drafting_v2, engine, recipes, serving, usage
from vllm_integration.seams.seam import (
    APP_MODULE,
    BATCH_MODULE,
    CHAT_MODULE,
    COMPLETION_MODULE,
    CONFIG_MODULE,
    INPUTS_MODULE,
    OUTPUTS_MODULE,
    RESPONSES_MODULE,
    RUNNER_MODULE,
    TESTED,
    Group,
    Seam,
    SeamStatus,
    signature_difference,
)

__all__ = [
    "APP_MODULE",
    "BATCH_MODULE",
    "CHAT_MODULE",
    "COMPLETION_MODULE",
    "CONFIG_MODULE",
    "INPUTS_MODULE",
    "OUTPUTS_MODULE",
    "RESPONSES_MODULE",
    "RUNNER_MODULE",
    "SEAMS",
    "TESTED",
    "Group",
    "Seam",
    "SeamStatus",
    "signature_difference",
]

SEAMS: tuple[Seam, ...] = (
    *drafting_v1.SEAMS,
    *drafting_v2.SEAMS,
    *engine.SEAMS,
    *serving.SEAMS,
    *usage.SEAMS,
    *recipes.SEAMS,
)

"""The drafter's settings: those of the table that `gpu-align tune` made, where the server is given one."""

from __future__ import annotations

import functools
import logging

from gpu_align import DrafterConfig
from vllm_integration.seams.log_text import shown_error

logger = logging.getLogger("vllm.gpu_align")


@functools.cache
def drafter_config(survival_table: str | None) -> DrafterConfig:
    """The settings with this file's table; the defaults with the shipped one where there is none, or, with one
    WARNING a process, where it cannot be used."""
    if survival_table is None:
        return DrafterConfig()
    try:
        return DrafterConfig.tuned(survival_table)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else shown_error(error)
        logger.warning(
            "gpu_align drafts with the survival table that comes with it (GPU_ALIGN_SURVIVAL_TABLE=%r): %s",
            survival_table,
            reason,
        )
        return DrafterConfig()

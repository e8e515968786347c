"""`GPU_ALIGN_VERBOSE`: INFO lines about requests that are drafted for. They tell ids and counts, never content.

They are written where usage is counted anyway, in the front end: neither the engine nor the device does more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from gpu_align.step_log import SOURCES
from vllm_integration.config.settings import Settings
from vllm_integration.seams.log_text import shown_id
from vllm_integration.wire.usage import RequestUsage

logger = logging.getLogger("vllm.gpu_align")


@functools.cache
def level() -> int:
    """0: nothing. 1: a line for each request that has ended. 2: and one for each of its steps."""
    return Settings.from_env().verbose


def tell_request(req_id: str, prediction_tokens: int, usage: RequestUsage, *, aborted: bool) -> None:
    """A request has ended. prediction_tokens: the length of its prediction."""
    per_step = usage.output_tokens / usage.steps if usage.steps else 0.0
    drafted = [
        f"{name} {counts['accepted']} of {counts['drafted']}" for name, counts in usage.by_source().items()
    ]
    logger.info(
        "gpu_align: request %s %s: %d tokens in %d steps, %.1f a step; prediction of %d tokens; "
        "draft tokens accepted of verified: %s",
        shown_id(req_id),
        "aborted" if aborted else "ended",
        usage.output_tokens,
        usage.steps,
        per_step,
        prediction_tokens,
        ", ".join(drafted) or "none verified",
    )


def tell_steps(req_id: str, first: int, steps: Iterable[tuple[int, int, int, int]]) -> None:
    """Steps of a request, the first of them number `first`. Each: source, proposed, verified, accepted."""
    for number, (source, proposed, verified, accepted) in enumerate(steps, first):
        told = "no draft"
        if proposed:
            told = f"{proposed} proposed from {SOURCES[source]}, {verified} verified, {accepted} accepted"
        logger.info("gpu_align: request %s step %d: %s", shown_id(req_id), number, told)

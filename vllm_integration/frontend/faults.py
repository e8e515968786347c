"""What fails in the front end besides reading a prediction costs numbers, and never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_integration.seams.install import strict
from vllm_integration.seams.log_text import shown_error

logger = logging.getLogger("vllm.gpu_align")

#: What has failed in this process. A fault that returns with each output must not fill the log.
_told: set[str] = set()


def unless_it_fails(what: str, step: Callable[..., Any], *args: Any) -> Any:
    """`step(*args)`; None where it fails, with one ERROR line the first time that this fails in the process.

    The next call tries again. With `GPU_ALIGN_STRICT=1` the error is raised.
    """
    try:
        return step(*args)
    except Exception as error:
        if strict():
            raise
        tell(what, error)
        return None


def tell(what: str, error: Exception) -> None:
    """One ERROR line, the first time: gpu_align could not do `what`."""
    if what not in _told:
        _told.add(what)
        logger.error("gpu_align could not %s (told once): %s", what, shown_error(error))

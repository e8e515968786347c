"""Keeps predictions out of the one log line of vLLM that repeats what a client sent.

With `--log-error-stack` vLLM logs a request that fails its validation with a traceback, and that ends with the
values that were refused; for some mistakes that is the whole body.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_integration.wire import prediction as wire


class WithoutPredictions(logging.Filter):
    """Drops the traceback of a validation error whose request brings a prediction; the line stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        try:
            brings_prediction = _brings_prediction(getattr(error, "body", None))
        except Exception:  # of a filter it would reach whoever logs
            brings_prediction = True
        if brings_prediction:
            record.exc_info = record.exc_text = None
            record.msg = f"{record.msg} (no traceback: the request brings a prediction)"
        return True


def _brings_prediction(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    xargs = body.get("vllm_xargs")
    return body.get("prediction") is not None or (isinstance(xargs, dict) and wire.KEY in xargs)


def install() -> None:
    """Add the filter to vLLM's logger; again is harmless."""
    from vllm.entrypoints.serve.exception_handling.handlers import validation

    if not any(isinstance(known, WithoutPredictions) for known in validation.logger.filters):
        validation.logger.addFilter(WithoutPredictions())

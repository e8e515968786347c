"""How much of one prediction is used, and counts of those that were cut or refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_integration.config.settings import CHARS_PER_TOKEN, Settings
from vllm_integration.frontend.faults import unless_it_fails

logger = logging.getLogger("vllm.gpu_align")

#: Which limit it was; or the field was "malformed", or of a request that cannot have one ("unsupported").
Reason = Literal["characters", "tokens", "parts", "nesting", "bytes", "items", "malformed", "unsupported"]
#: "truncated": served with what fits. "refused": an HTTP error, or an exception of the offline API.
Action = Literal["truncated", "refused"]

#: Predictions of this front end that were cut or refused, by (reason, action).
counts: Counter[tuple[Reason, Action]] = Counter()
#: Called with (reason, action) after each count. Any thread may call it.
on_count: list[Callable[[Reason, Action], None]] = []


def count_refused(reason: Reason, action: Action = "refused") -> None:
    """Count a prediction that was cut or refused."""
    counts[reason, action] += 1
    for callback in on_count:
        unless_it_fails("count a refused prediction", callback, reason, action)


class PredictionError(ValueError):
    """A prediction that is refused; the message names the field, what was expected and what was found.

    The message never repeats what the client sent, only types, places and sizes.
    """

    def __init__(self, message: str, reason: Reason = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """The limits of one prediction. Over a limit it is cut; with `strict` it is refused.

    characters: of its text, before newlines are normalised. tokens: at most what the drafter and the
    model's context hold. parts: of its content, if that is an array. depth: levels of nesting of the field;
    the documented shape has 3, deeper is only what is ignored anyway.
    """

    characters: int
    tokens: int
    parts: int
    depth: int
    strict: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> Limits:
        """The limits of an engine, by its context length and the `GPU_ALIGN_*` variables."""
        settings = Settings.from_env()
        tokens = settings.prediction_capacity(vllm_config.model_config.max_model_len)
        return cls(
            characters=settings.max_prediction_chars or CHARS_PER_TOKEN * tokens,
            tokens=tokens,
            parts=settings.max_prediction_parts,
            depth=settings.max_prediction_depth,
            strict=settings.strict_limits,
        )

    def exceeded(self, where: str, reason: Reason, limit: int) -> None:
        """Count what the caller is about to cut. Raises `PredictionError` instead when strict."""
        message = f"{where}: expected at most {limit} {_UNITS[reason]}, got more"
        if self.strict:
            raise PredictionError(message, reason)
        count_refused(reason, "truncated")
        logger.warning("A prediction is cut: %s", message)


_UNITS: dict[Reason, str] = {
    "characters": "characters",
    "tokens": "tokens",
    "parts": "parts",
    "nesting": "levels of nesting",
    "bytes": "bytes",
}

"""Whether an engine drafts from predictions: the one answer, for the front end, the scheduler and the worker."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from ..seams.install import off_reason

#: What `"model"` of the speculative configuration may say.
OUR_CLASSES = ("vllm_integration.PredictedOutputs", "vllm_integration.worker.proposer_v1.PredictedOutputs")

#: Attribute of the `SpeculativeConfig` of vLLM's own drafter, beside which ours drafts: its number of tokens.
INNER = "gpu_align_inner_tokens"

#: The configuration of the engine to which this task or thread sent its last request; False if it is not ours.
engine_of_request: ContextVar[Any] = ContextVar("engine_of_request", default=None)
_engine: Any = None


def drafts_predictions(vllm_config: Any, *, even_if_off: bool = False) -> bool:
    """Whether the engine of this configuration drafts from predictions, and the plugin is on."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not (even_if_off or off_reason() is None):
        return False
    return names_ours(speculative) or inner_tokens(vllm_config) > 0


def names_ours(speculative: Any) -> bool:
    """Whether a speculative configuration asks for our class."""
    return bool(speculative.method == "custom_class" and speculative.model in OUR_CLASSES)


def inner_tokens(vllm_config: Any) -> int:
    """Draft tokens of vLLM's own drafter for requests that are not ours; 0 without one."""
    return int(getattr(vllm_config.speculative_config, INNER, 0))


def note_engine(vllm_config: Any) -> None:
    """This configuration of an engine that drafts from predictions is complete."""
    global _engine
    _engine = vllm_config


def engine_here() -> Any:
    """That of `engine_of_request`, or None; without a request that of the last `note_engine` in this process."""
    return _engine if (engine := engine_of_request.get()) is None else engine or None

"""Whether an engine drafts from predictions: the one answer, for the front end, the scheduler and the worker."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..seams.install import off_reason

#: What `"model"` of the speculative configuration may say.
OUR_CLASSES = frozenset(
    {"vllm_integration.PredictedOutputs", "vllm_integration.worker.proposer_v1.PredictedOutputs"}
)

#: Attribute of a `SpeculativeConfig` of vLLM's own drafter, beside which ours drafts: how many tokens that drafts.
INNER = "gpu_align_inner_tokens"


class EngineFacts(NamedTuple):
    """Of an engine that drafts from predictions. num_draft_tokens: K. runner: "V1" or "V2". counts_graph_modes:
    whether vLLM tells each step's CUDA graph mode. drafter: the model's own beside ours, or empty."""

    num_draft_tokens: int
    runner: str
    max_num_seqs: int
    counts_graph_modes: bool = False
    drafter: str = ""


_facts: EngineFacts | None = None


def drafts_predictions(vllm_config: Any, *, even_if_off: bool = False) -> bool:
    """Whether the engine of this configuration drafts from predictions, and the plugin is on."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return (
        speculative is not None
        and (even_if_off or off_reason() is None)
        and (names_ours(speculative) or inner_tokens(vllm_config) > 0)
    )


def names_ours(speculative: Any) -> bool:
    """Whether a speculative configuration asks for our class."""
    return bool(speculative.method == "custom_class" and speculative.model in OUR_CLASSES)


def inner_tokens(vllm_config: Any) -> int:
    """Draft tokens of vLLM's own drafter for requests that are not ours; 0 where there is none."""
    return int(getattr(vllm_config.speculative_config, INNER, 0))


def note_engine(vllm_config: Any) -> None:
    """This configuration of an engine that drafts from predictions is complete."""
    global _facts
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    speculative, inner = vllm_config.speculative_config, inner_tokens(vllm_config)
    drafter = f"{speculative.method}, {inner} tokens" if inner else ""
    counts = bool(getattr(getattr(vllm_config, "observability_config", None), "cudagraph_metrics", False))
    sizes = int(speculative.num_speculative_tokens), runner, int(vllm_config.scheduler_config.max_num_seqs)
    _facts = EngineFacts(*sizes, counts, drafter)


def engine_here() -> EngineFacts | None:
    """What `note_engine` was last told in this process."""
    return _facts

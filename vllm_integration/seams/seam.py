"""A private vLLM name, and the modules they are in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

TESTED = ("0.32.0",)

Group = Literal[
    "v1",
    "v2",
    "v2_runner",
    "config",
    "inputs",
    "chat",
    "completions",
    "responses",
    "batch",
    "app",
    "adaptive",
    "usage",
    "usage_v1",
    "recipes",
]


@dataclass(frozen=True)
class Seam:
    """One private name.

    name: what this project calls it. group: what is installed together with it.
    module, attribute: where it is; `attribute` is dotted below the module.
    kind: "wrap" (replaced by a wrapper that calls the original), "call" (called as it is), "implement"
        (vLLM calls ours in its place), "field" (an instance attribute or dataclass field that is read),
        "global" (a name in a module that is read or, for a moment, replaced).
    parameters: for "wrap", "call" and "implement": the leading parameters, in order, that must be there.
        Further parameters of a called function must have defaults.
    """

    name: str
    group: Group
    kind: Literal["wrap", "call", "implement", "field", "global"]
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()
    tested: tuple[str, ...] = TESTED


@dataclass(frozen=True)
class SeamStatus:
    """What a probe found: "found", "missing", or "changed" with the difference in `detail`."""

    seam: Seam
    state: Literal["found", "missing", "changed"]
    detail: str = ""


def signature_difference(seam: Seam, names: Sequence[str], needed: Collection[str]) -> str:
    """What keeps a seam's signature from being the expected one; empty when nothing does.

    names: all parameters, in order. needed: those that need an argument.
    """
    if tuple(names[: len(seam.parameters)]) != seam.parameters:
        return f"expected parameters {', '.join(seam.parameters)}, got {', '.join(names)}"
    more = [name for name in names[len(seam.parameters) :] if name in needed]
    if seam.kind == "call" and more:
        return f"needs further parameters {', '.join(more)}"
    return ""


V1_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
REJECTION_MODULE = "vllm.v1.sample.rejection_sampler"
V1_BATCH_MODULE = "vllm.v1.worker.gpu_input_batch"
OUTPUT_MODULE = "vllm.v1.core.sched.output"
RENDERER_MODULE = "vllm.renderers.base"
INPUTS_MODULE = "vllm.v1.engine.input_processor"
CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"
COMPLETION_MODULE = "vllm.entrypoints.openai.completion.serving"
RESPONSES_MODULE = "vllm.entrypoints.openai.responses.serving"
BATCH_MODULE = "vllm.entrypoints.openai.chat_completion.batch_serving"
APP_MODULE = "vllm.entrypoints.launchers.app"
CHAT_PROTOCOL_MODULE = "vllm.entrypoints.openai.chat_completion.protocol"
CONFIG_MODULE = "vllm.config.vllm"
RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
STATES_MODULE = "vllm.v1.worker.gpu.states"
SPECULATOR_MODULE = "vllm.v1.worker.gpu.spec_decode.speculator"
INPUT_BATCH_MODULE = "vllm.v1.worker.gpu.input_batch"
SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
REQUEST_MODULE = "vllm.v1.request"
ADAPTIVE_MODULE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
SELECTOR_MODULE = "vllm.v1.attention.selector"
ENGINE_MODULE = "vllm.v1.engine"
OUTPUTS_MODULE = "vllm.v1.engine.output_processor"
PARALLEL_MODULE = "vllm.distributed.parallel_state"
PROTOCOL_MODULE = "vllm.entrypoints.serve.engine.protocol"

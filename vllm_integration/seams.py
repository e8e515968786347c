"""Every private vLLM name this package touches, in one table.

A seam is a name vLLM does not promise to keep. `compat` looks them up in the installed vLLM and wraps them,
`source_probe` looks them up in sources.
"""

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


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_OUTPUT = "vllm.v1.core.sched.output"
_RENDERER = "vllm.renderers.base"
INPUTS_MODULE = "vllm.v1.engine.input_processor"
CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"
COMPLETION_MODULE = "vllm.entrypoints.openai.completion.serving"
RESPONSES_MODULE = "vllm.entrypoints.openai.responses.serving"
BATCH_MODULE = "vllm.entrypoints.openai.chat_completion.batch_serving"
APP_MODULE = "vllm.entrypoints.launchers.app"
_CHAT_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"
CONFIG_MODULE = "vllm.config.vllm"
RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_STATES = "vllm.v1.worker.gpu.states"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
_INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_REQUEST = "vllm.v1.request"
_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_SELECTOR = "vllm.v1.attention.selector"
_ENGINE = "vllm.v1.engine"
OUTPUTS_MODULE = "vllm.v1.engine.output_processor"
_PROTOCOL = "vllm.entrypoints.serve.engine.protocol"

SEAMS: tuple[Seam, ...] = (
    Seam(
        "v1.update_states",
        "v1",
        "wrap",
        _RUNNER,
        "GPUModelRunner._update_states",
        "learn which requests arrived, finished or left the batch; runs even when nothing is scheduled",
        ("self", "scheduler_output"),
    ),
    Seam(
        "v1.input_fits_in_drafter",
        "v1",
        "wrap",
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        "near max_model_len vLLM replaces the whole batch's drafts by zeros; ours end in time by themselves",
        ("self", "common_attn_metadata"),
    ),
    Seam("v1.drafter", "v1", "field", _RUNNER, "GPUModelRunner.drafter", "find our proposer on a runner"),
    Seam("v1.input_batch", "v1", "field", _RUNNER, "GPUModelRunner.input_batch", "the rows of the batch"),
    Seam("batch.req_ids", "v1", "field", _BATCH, "InputBatch.req_ids", "row → request"),
    Seam("batch.req_id_to_index", "v1", "field", _BATCH, "InputBatch.req_id_to_index", "request → row"),
    Seam("batch.num_prompt_tokens", "v1", "field", _BATCH, "InputBatch.num_prompt_tokens", "prompt length"),
    Seam("output.new", "v1", "field", _OUTPUT, "SchedulerOutput.scheduled_new_reqs", "new requests"),
    Seam("output.finished", "v1", "field", _OUTPUT, "SchedulerOutput.finished_req_ids", "finished requests"),
    Seam(
        "output.drafts",
        "v1",
        "field",
        _OUTPUT,
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "the drafts that this step verifies",
    ),
    Seam("new.req_id", "v1", "field", _OUTPUT, "NewRequestData.req_id", "id of a new request"),
    Seam(
        "new.sampling_params", "v1", "field", _OUTPUT, "NewRequestData.sampling_params", "extra_args, limits"
    ),
    Seam(
        "config.unsupported",
        "config",
        "wrap",
        CONFIG_MODULE,
        "VllmConfig._get_v2_model_runner_unsupported_features",
        "V2 refuses custom drafter classes; ours has a V2 part",
        ("self",),
    ),
    Seam(
        "config.adaptive_check",
        "config",
        "wrap",
        CONFIG_MODULE,
        "VllmConfig._validate_adaptive_verification",
        "where vLLM cannot trim drafts by confidence, our draft slots do without",
        ("self",),
    ),
    Seam(
        "config.post_init",
        "config",
        "wrap",
        CONFIG_MODULE,
        "VllmConfig.__post_init__",
        "asynchronous scheduling with our method, and our scheduler",
        ("self",),
    ),
    Seam(
        "config.on_device",
        "config",
        "global",
        CONFIG_MODULE,
        "NgramGPUTypes",
        "the drafters that asynchronous scheduling is allowed with",
    ),
    Seam(
        "config.v2",
        "config",
        "field",
        CONFIG_MODULE,
        "VllmConfig.use_v2_model_runner",
        "which model runner the engine gets",
    ),
    Seam(
        "v2.init_speculator",
        "v2",
        "wrap",
        RUNNER_MODULE,
        "init_speculator",
        "put our speculator in its place",
        ("vllm_config", "device", "req_states"),
    ),
    Seam(
        "v2.add_requests",
        "v2_runner",
        "wrap",
        RUNNER_MODULE,
        "GPUModelRunner.add_requests",
        "learn which rows new and resumed requests got, and their predictions",
        ("self", "scheduler_output"),
    ),
    Seam(
        "v2.remove_request",
        "v2_runner",
        "wrap",
        RUNNER_MODULE,
        "GPUModelRunner._remove_request",
        "learn which rows are free again: finished, aborted, preempted",
        ("self", "req_id"),
    ),
    Seam(
        "v2.finish_requests",
        "v2_runner",
        "wrap",
        RUNNER_MODULE,
        "GPUModelRunner.finish_requests",
        "write the step log of finished requests; preempted ones go on",
        ("self", "scheduler_output"),
    ),
    Seam(
        "v2.sample_tokens",
        "v2_runner",
        "wrap",
        RUNNER_MODULE,
        "GPUModelRunner.sample_tokens",
        "send draft lengths to the scheduler with the step's output",
        ("self",),
    ),
    Seam("v2.speculator", "v2_runner", "field", RUNNER_MODULE, "GPUModelRunner.speculator", "find ours"),
    Seam("v2.req_states", "v2_runner", "field", RUNNER_MODULE, "GPUModelRunner.req_states", "the rows"),
    Seam(
        "states.index",
        "v2_runner",
        "field",
        _STATES,
        "RequestState.req_id_to_index",
        "request → row, which is our slot",
    ),
    Seam(
        "states.tokens",
        "v2_runner",
        "field",
        _STATES,
        "RequestState.all_token_ids",
        "prompt and output of every row; made dense device memory",
    ),
    Seam("states.total_len", "v2_runner", "field", _STATES, "RequestState.total_len", "tokens of every row"),
    Seam("states.prompt_len", "v2_runner", "field", _STATES, "RequestState.prompt_len", "prompt length"),
    Seam(
        "states.dense",
        "v2_runner",
        "call",
        "vllm.v1.worker.gpu.buffer_utils",
        "StagedWriteTensor",
        "the rows as dense device memory",
        ("size", "dtype", "device"),
    ),
    Seam(
        "speculator.propose",
        "v2_runner",
        "implement",
        _SPECULATOR,
        "BaseSpeculator.propose",
        "what the runner calls each step",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
        ),
    ),
    Seam(
        "speculator.graphs",
        "v2_runner",
        "implement",
        _SPECULATOR,
        "BaseSpeculator.init_cudagraph_manager",
        "nothing to set up",
        ("self", "cudagraph_mode"),
    ),
    Seam(
        "speculator.capture",
        "v2_runner",
        "implement",
        _SPECULATOR,
        "BaseSpeculator.capture",
        "nothing to capture",
        ("self",),
    ),
    Seam("batch.num_reqs", "v2_runner", "field", _INPUT_BATCH, "InputBatch.num_reqs", "batch size"),
    Seam("batch.v2_req_ids", "v2_runner", "field", _INPUT_BATCH, "InputBatch.req_ids", "row → request"),
    Seam(
        "batch.rows", "v2_runner", "field", _INPUT_BATCH, "InputBatch.idx_mapping", "the rows, on the device"
    ),
    Seam(
        "batch.verified",
        "v2_runner",
        "field",
        _INPUT_BATCH,
        "InputBatch.num_draft_tokens_per_req",
        "the step log: drafts that this step verified",
    ),
    Seam(
        "batch.host_rows",
        "v2_runner",
        "field",
        _INPUT_BATCH,
        "InputBatch.idx_mapping_np",
        "the rows, on the host",
    ),
    Seam(
        "scheduler.update",
        "v2_runner",
        "implement",
        _SCHEDULER,
        "Scheduler.update_from_output",
        "read the draft lengths that came with a step's output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Seam(
        "scheduler.drafts",
        "v2_runner",
        "implement",
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        "cut the draft placeholders (synchronous scheduling)",
        ("self", "draft_token_ids"),
    ),
    Seam(
        "scheduler.async",
        "v2_runner",
        "implement",
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler._update_after_schedule",
        "cut the draft placeholders (asynchronous scheduling)",
        ("self", "scheduler_output"),
    ),
    Seam(
        "config.adaptive",
        "v2_runner",
        "field",
        "vllm.config.speculative",
        "SpeculativeConfig.enable_adaptive_verification",
        "vLLM trims drafts by our confidences where it is asked to",
    ),
    Seam(
        "scheduler.class",
        "v2_runner",
        "field",
        "vllm.config.scheduler",
        "SchedulerConfig.scheduler_cls",
        "the place for a scheduler",
    ),
    Seam(
        "scheduler.requests", "v2_runner", "field", _SCHEDULER, "Scheduler.requests", "request id → request"
    ),
    Seam(
        "request.drafts", "v2_runner", "field", _REQUEST, "Request.spec_token_ids", "a request's placeholders"
    ),
    Seam("request.params", "v2_runner", "field", _REQUEST, "Request.sampling_params", "has it a prediction"),
    Seam(
        "request.max_tokens", "v2_runner", "field", _REQUEST, "Request.max_tokens", "no drafts past the end"
    ),
    Seam(
        "request.output_len",
        "v2_runner",
        "field",
        _REQUEST,
        "Request.num_output_tokens",
        "no drafts past the end",
    ),
    Seam(
        "output.async",
        "v2_runner",
        "implement",
        "vllm.v1.outputs",
        "AsyncModelRunnerOutput.get_output",
        "vLLM asks for a step's output when the device has sampled: then draft lengths are there, too",
        ("self",),
    ),
    Seam(
        "inputs.process_inputs",
        "inputs",
        "wrap",
        INPUTS_MODULE,
        "InputProcessor.process_inputs",
        "tokenise a text prediction where the tokenizer is",
        ("self", "request_id", "prompt", "params"),
    ),
    Seam("inputs.config", "inputs", "field", INPUTS_MODULE, "InputProcessor.vllm_config", "are we in use"),
    Seam("inputs.renderer", "inputs", "field", INPUTS_MODULE, "InputProcessor.renderer", "the tokenizer"),
    Seam(
        "renderer.tokenize",
        "inputs",
        "call",
        _RENDERER,
        "BaseRenderer.tokenize_prompt",
        "tokenise as vLLM does",
        ("self", "prompt", "params"),
    ),
    Seam(
        "renderer.params",
        "inputs",
        "call",
        "vllm.renderers",
        "TokenizeParams",
        "no special tokens, cut at the capacity",
        ("max_total_tokens",),
    ),
    Seam(
        "chat.create",
        "chat",
        "wrap",
        CHAT_MODULE,
        "OpenAIServingChat.create_chat_completion",
        "read and validate the `prediction` field",
        ("self", "request", "raw_request"),
    ),
    Seam(
        "chat.error",
        "chat",
        "call",
        CHAT_MODULE,
        "OpenAIServingChat.create_error_response",
        "HTTP 400 that names the field",
        ("message", "err_type", "status_code", "param"),
    ),
    Seam("chat.renderer", "chat", "field", CHAT_MODULE, "OpenAIServingChat.renderer", "the tokenizer"),
    Seam("chat.engine", "chat", "field", CHAT_MODULE, "OpenAIServingChat.engine_client", "are we in use"),
    Seam(
        "chat.xargs",
        "chat",
        "field",
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest.vllm_xargs",
        "becomes SamplingParams.extra_args",
    ),
    Seam(
        "renderer.tokenize_async",
        "chat",
        "call",
        _RENDERER,
        "BaseRenderer.tokenize_prompt_async",
        "tokenise off the event loop",
        ("self", "prompt", "params"),
    ),
    Seam(
        "adaptive.backend",
        "adaptive",
        "wrap",
        _SELECTOR,
        "_cached_get_attn_backend",
        "attention backends that cannot trim drafts on the device are refused here",
        ("backend", "attn_selector_config"),
    ),
    Seam(
        "adaptive.asked",
        "adaptive",
        "field",
        _SELECTOR,
        "AttentionSelectorConfig.use_adaptive_verification",
        "choose a backend without",
    ),
    Seam(
        "adaptive.create",
        "adaptive",
        "wrap",
        RUNNER_MODULE,
        "maybe_create_adaptive_verification_manager",
        "attention backends whose CUDA graphs take one query length are refused here",
        (
            "enable_adaptive_verification",
            "attn_groups",
            "req_states",
            "query_start_loc",
            "num_bonus_tokens",
            "max_total_logits",
            "vllm_config",
        ),
    ),
    Seam(
        "adaptive.after",
        "adaptive",
        "wrap",
        RUNNER_MODULE,
        "GPUModelRunner.initialize_kv_cache",
        "after a refusal the rejection sampler does without, too",
        ("self", "kv_cache_config"),
    ),
    Seam(
        "adaptive.manager",
        "adaptive",
        "field",
        RUNNER_MODULE,
        "GPUModelRunner.adaptive_verification",
        "was it refused",
    ),
    Seam(
        "adaptive.sampler",
        "adaptive",
        "field",
        RUNNER_MODULE,
        "GPUModelRunner.rejection_sampler",
        "does without after a refusal",
    ),
    Seam(
        "adaptive.sampler_flag",
        "adaptive",
        "field",
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "RejectionSampler.enable_adaptive_verification",
        "does without after a refusal",
    ),
    Seam(
        "adaptive.costs",
        "adaptive",
        "wrap",
        _ADAPTIVE,
        "AdaptiveVerificationManager.set_cost_curves",
        "what a step costs; fails when there was none to time",
        ("self", "draft_curve", "verify_curve"),
    ),
    Seam(
        "adaptive.tables",
        "adaptive",
        "field",
        _ADAPTIVE,
        "AdaptiveVerificationManager.cost_tables",
        "a flat price instead",
    ),
    Seam(
        "adaptive.max_reqs",
        "adaptive",
        "field",
        _STATES,
        "RequestState.max_num_reqs",
        "the size of the flat price's first table",
    ),
    Seam(
        "adaptive.max_tokens",
        "adaptive",
        "field",
        _STATES,
        "RequestState.max_num_batched_tokens",
        "the size of the flat price's second table",
    ),
    Seam(
        "adaptive.verified",
        "adaptive",
        "field",
        _INPUT_BATCH,
        "InputBatch.cu_num_logits",
        "the step log and the usage: drafts that the device kept",
    ),
    Seam(
        "completions.create",
        "completions",
        "wrap",
        COMPLETION_MODULE,
        "OpenAIServingCompletion.create_completion",
        "read and validate the `prediction` field",
        ("self", "request", "raw_request"),
    ),
    Seam(
        "completions.error",
        "completions",
        "call",
        COMPLETION_MODULE,
        "OpenAIServingCompletion.create_error_response",
        "HTTP 400 that names the field",
        ("message", "err_type", "status_code", "param"),
    ),
    Seam(
        "completions.renderer",
        "completions",
        "field",
        COMPLETION_MODULE,
        "OpenAIServingCompletion.renderer",
        "the tokenizer",
    ),
    Seam(
        "completions.engine",
        "completions",
        "field",
        COMPLETION_MODULE,
        "OpenAIServingCompletion.engine_client",
        "are we in use",
    ),
    Seam(
        "completions.xargs",
        "completions",
        "field",
        "vllm.entrypoints.openai.completion.protocol",
        "CompletionRequest.vllm_xargs",
        "becomes SamplingParams.extra_args",
    ),
    Seam(
        "responses.create",
        "responses",
        "wrap",
        RESPONSES_MODULE,
        "OpenAIServingResponses.create_responses",
        "read and validate the `prediction` field",
        ("self", "request", "raw_request"),
    ),
    Seam(
        "responses.error",
        "responses",
        "call",
        RESPONSES_MODULE,
        "OpenAIServingResponses.create_error_response",
        "HTTP 400 that names the field",
        ("message", "err_type", "status_code", "param"),
    ),
    Seam(
        "responses.renderer",
        "responses",
        "field",
        RESPONSES_MODULE,
        "OpenAIServingResponses.renderer",
        "the tokenizer",
    ),
    Seam(
        "responses.engine",
        "responses",
        "field",
        RESPONSES_MODULE,
        "OpenAIServingResponses.engine_client",
        "are we in use",
    ),
    Seam(
        "responses.xargs",
        "responses",
        "field",
        "vllm.entrypoints.openai.responses.protocol",
        "ResponsesRequest.vllm_xargs",
        "becomes SamplingParams.extra_args",
    ),
    Seam(
        "batch.create",
        "batch",
        "wrap",
        BATCH_MODULE,
        "OpenAIServingChatBatch.create_batch_chat_completion",
        "read and validate the `prediction` field",
        ("self", "request", "raw_request"),
    ),
    Seam(
        "batch.split",
        "batch",
        "wrap",
        _CHAT_PROTOCOL,
        "BatchChatCompletionRequest.to_chat_completion_request",
        "each conversation's request gets the prediction",
        ("self", "messages"),
    ),
    Seam(
        "app.middleware",
        "app",
        "wrap",
        APP_MODULE,
        "init_entrypoints_middleware",
        "a body too long to be parsed on the event loop is refused before it is",
        ("args", "app", "supported_tasks"),
    ),
    Seam(
        "app.validation_log",
        "app",
        "global",
        "vllm.entrypoints.serve.exception_handling.handlers.validation",
        "logger",
        "a traceback there can end with the request's body: not with a prediction in it",
    ),
    Seam(
        "usage.init",
        "usage",
        "wrap",
        OUTPUTS_MODULE,
        "OutputProcessor.__init__",
        "a front end starts: its metrics begin at 0",
        ("self",),
    ),
    Seam(
        "usage.add_request",
        "usage",
        "wrap",
        OUTPUTS_MODULE,
        "OutputProcessor.add_request",
        "engine request → HTTP request",
        ("self", "request"),
    ),
    Seam(
        "usage.process_outputs",
        "usage",
        "wrap",
        OUTPUTS_MODULE,
        "OutputProcessor.process_outputs",
        "read what came with a step's outputs, and how much of it a stop string kept",
        ("self", "engine_core_outputs"),
    ),
    Seam(
        "usage.abort_requests",
        "usage",
        "wrap",
        OUTPUTS_MODULE,
        "OutputProcessor.abort_requests",
        "forget aborted requests",
        ("self", "request_ids"),
    ),
    Seam(
        "usage.states",
        "usage",
        "field",
        OUTPUTS_MODULE,
        "OutputProcessor.request_states",
        "which requests are still open",
    ),
    Seam(
        "usage.headers",
        "usage",
        "field",
        _ENGINE,
        "EngineCoreOutput.trace_headers",
        "the one open mapping from the scheduler to the front end",
    ),
    Seam(
        "usage.new_tokens",
        "usage",
        "field",
        _ENGINE,
        "EngineCoreOutput.new_token_ids",
        "tokens of a step that are output; vLLM cuts the list at a stop string",
    ),
    Seam(
        "usage.details",
        "usage",
        "field",
        _PROTOCOL,
        "CompletionTokenUsageInfo.reasoning_tokens",
        "where accepted and rejected prediction tokens are shown",
    ),
    Seam(
        "usage.chat",
        "usage",
        "field",
        _PROTOCOL,
        "UsageInfo.completion_tokens_details",
        "the same",
    ),
    Seam(
        "usage.responses",
        "usage",
        "field",
        "vllm.entrypoints.openai.responses.protocol",
        "ResponseUsage.output_tokens_details",
        "the same for /v1/responses",
    ),
    Seam(
        "usage.sample_tokens",
        "usage_v1",
        "wrap",
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        "send draft lengths to the scheduler with the step's output",
        ("self",),
    ),
    Seam(
        "usage.update",
        "usage_v1",
        "implement",
        _SCHEDULER,
        "Scheduler.update_from_output",
        "count what a step verified",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Seam(
        "usage.scheduled",
        "usage_v1",
        "field",
        _OUTPUT,
        "SchedulerOutput.num_scheduled_tokens",
        "the requests of a step",
    ),
    Seam(
        "usage.invalid",
        "usage_v1",
        "field",
        _OUTPUT,
        "SchedulerOutput.num_invalid_spec_tokens",
        "drafts that a grammar has ruled out",
    ),
    Seam("usage.num_tokens", "usage_v1", "field", _REQUEST, "Request.num_tokens", "where a draft was made"),
    Seam("usage.requests", "usage_v1", "field", _SCHEDULER, "Scheduler.requests", "request id → request"),
    Seam(
        "usage.sampled",
        "usage_v1",
        "field",
        "vllm.v1.outputs",
        "ModelRunnerOutput.sampled_token_ids",
        "tokens that a step sampled",
    ),
    Seam(
        "usage.scheduler",
        "usage_v1",
        "field",
        "vllm.config.scheduler",
        "SchedulerConfig.scheduler_cls",
        "the place for a scheduler",
    ),
)

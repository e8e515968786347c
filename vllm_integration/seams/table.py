"""Every private vLLM name this package touches: `SEAMS`, one row a name, and their `GROUPS`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TESTED = ("0.32.0",)

Kind = Literal["wrap", "call", "implement", "field", "global"]


@dataclass(frozen=True)
class Seam:
    """A name that vLLM does not promise to keep.

    group: what is installed together with it, a key of `table.GROUPS`.
    kind: "wrap" (replaced by a wrapper that calls the original), "call" (called as it is), "implement"
        (vLLM calls ours in its place), "field" (an instance attribute or dataclass field that is read),
        "global" (a name in a module that is read or, for a moment, replaced).
    module, attribute: where it is; `attribute` is dotted below the module.
    purpose: what this package needs it for.
    parameters: for "wrap", "call" and "implement": the leading parameters, in order, that must be there.
        Further parameters of a called function must have defaults.
    """

    group: str
    kind: Kind
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()
    tested: tuple[str, ...] = TESTED

    @property
    def name(self) -> str:
        """What `@seam` and reports call it: the group and the last part of the attribute."""
        return f"{self.group}.{self.attribute.rpartition('.')[2]}"


@dataclass(frozen=True)
class SeamStatus:
    """What a probe found: "found", "missing", or "changed" with the difference in `detail`."""

    seam: Seam
    state: Literal["found", "missing", "changed"]
    detail: str = ""


@dataclass(frozen=True)
class Group:
    """Seams that are installed together: all of them or none.

    turns_off: what a seam that is missing costs. "plugin": vLLM serves as without this package. "usage": no usage
        and no metrics. "dump": vLLM's dump of a failed step shows draft tokens. "parameters": vLLM refuses `min_p`
        and `logit_bias`. "caller": whoever installs the group does without it, and says so.
    after: the vLLM module after whose import the group is installed; empty where the drafter installs it, so that
        an engine that does not draft from predictions never sees it.
    rooms: our modules that define the wrappers, imported when the group is installed.
    """

    turns_off: Literal["plugin", "usage", "dump", "parameters", "caller"]
    after: str = ""
    rooms: tuple[str, ...] = ()


def status_by_signature(seam: Seam, names: Sequence[str], needed: Collection[str]) -> SeamStatus:
    """Whether what was found can be called as expected. names: all its parameters, in order. needed: those that
    need an argument."""
    more = [name for name in names[len(seam.parameters) :] if name in needed]
    if tuple(names[: len(seam.parameters)]) != seam.parameters:
        expected = ", ".join(seam.parameters)
        return SeamStatus(seam, "changed", f"expected parameters {expected}, got {', '.join(names)}")
    if seam.kind == "call" and more:
        return SeamStatus(seam, "changed", f"needs further parameters {', '.join(more)}")
    return SeamStatus(seam, "found")


V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
REJECTION = "vllm.v1.sample.rejection_sampler"
PROCESSORS = "vllm.v1.sample.logits_processor"
STATES = "vllm.v1.worker.gpu.states"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
SELECTOR = "vllm.v1.attention.selector"
PARALLEL = "vllm.distributed.parallel_state"
SCHEDULER = "vllm.v1.core.sched.scheduler"
SCHEDULED = "vllm.v1.core.sched.output"
KV_CACHE = "vllm.v1.core.kv_cache_manager"
REQUEST = "vllm.v1.request"
OUTPUTS = "vllm.v1.engine.output_processor"
INPUTS = "vllm.v1.engine.input_processor"
DUMP = "vllm.logging_utils.dump_input"
RENDERER = "vllm.renderers.base"
CONFIG = "vllm.config.vllm"
APP = "vllm.entrypoints.launchers.app"
OPENAI = "vllm.entrypoints.openai"
CHAT = f"{OPENAI}.chat_completion.serving"
CHAT_PROTOCOL = f"{OPENAI}.chat_completion.protocol"
MESSAGES = "vllm.entrypoints.anthropic.serving"
AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate"
BATCH = f"{OPENAI}.chat_completion.batch_serving"
COMPLETION = f"{OPENAI}.completion.serving"
RESPONSES = f"{OPENAI}.responses.serving"
USAGE_PROTOCOL = "vllm.entrypoints.serve.engine.protocol"

_ENDPOINTS = ("vllm_integration.frontend.endpoints",)

GROUPS: dict[str, Group] = {
    "config": Group("plugin", CONFIG, ("vllm_integration.config.engine_config",)),
    "inputs": Group("plugin", INPUTS, ("vllm_integration.frontend.endpoints",)),
    "chat": Group("plugin", CHAT, _ENDPOINTS),
    "completions": Group("plugin", COMPLETION, _ENDPOINTS),
    "responses": Group("plugin", RESPONSES, _ENDPOINTS),
    "batch": Group("plugin", BATCH, _ENDPOINTS),
    "messages": Group("caller", MESSAGES, _ENDPOINTS),
    "app": Group("plugin", APP, ("vllm_integration.frontend.endpoints",)),
    "status": Group("caller"),
    "usage": Group("usage", OUTPUTS, ("vllm_integration.frontend.usage",)),
    "dump": Group("dump", DUMP, ("vllm_integration.scheduler.schedulers",)),
    "v1": Group("plugin", "", ("vllm_integration.worker.proposer_v1", "vllm_integration.worker.sampling_v1")),
    "usage_v1": Group("usage", "", ("vllm_integration.worker.proposer_v1",)),
    "v2_start": Group("plugin", V2_RUNNER, ("vllm_integration.plugin",)),
    "v2": Group("plugin", "", ("vllm_integration.worker.speculator",)),
    "parameters": Group("parameters", INPUTS, ("vllm_integration.frontend.endpoints",)),
    "draft_limit": Group("caller"),
    "adaptive": Group("caller", "", ("vllm_integration.config.engine_config",)),
    "recipes": Group("caller"),
}


def _seams(
    group: str,
    module: str,
    *,
    wrap: Mapping[str, str] = {},
    call: Mapping[str, str] = {},
    implement: Mapping[str, str] = {},
    fields: Mapping[str, str] = {},
    names: Mapping[str, str] = {},
) -> Iterator[Seam]:
    """The seams of one group in one module: attribute → purpose. Functions are written with the parameters that
    must lead their signature; `names` are globals of the module."""
    kinds: tuple[tuple[Kind, Mapping[str, str]], ...] = (
        ("wrap", wrap), ("call", call), ("implement", implement), ("field", fields), ("global", names)
    )  # fmt: skip
    for kind, rows in kinds:
        for row, purpose in rows.items():
            attribute, _, parameters = row.rstrip(")").partition("(")
            yield Seam(
                group, kind, module, attribute, purpose, tuple(parameters.split(", ")) if parameters else ()
            )


def _endpoint(group: str, module: str, method: str) -> Iterator[Seam]:
    """What the `prediction` field needs of an endpoint: of `method`, "Serving.create_…", and of its class."""
    serving = method.partition(".")[0]
    yield from _seams(
        group,
        module,
        wrap={f"{method}(self, request, raw_request)": "read and validate the `prediction` field"},
        call={
            f"{serving}.create_error_response(message, err_type, status_code, param)": "HTTP 400 with the field"
        },
        fields={
            f"{serving}.renderer": "the tokenizer",
            f"{serving}.engine_client": "whether the engine drafts from predictions",
        },
    )


# One row a name; the formatter would take four lines for each.
# fmt: off
SEAMS: tuple[Seam, ...] = (
    # The engine's configuration.
    *_seams("config", CONFIG,
        wrap={
            "VllmConfig._get_v2_model_runner_unsupported_features(self)":
                "V2 refuses custom drafter classes; ours has a V2 part",
            "VllmConfig._validate_adaptive_verification(self)":
                "where vLLM cannot trim drafts by confidence, our draft slots do without",
            "VllmConfig.__post_init__(self)": "asynchronous scheduling with our method, and our scheduler",
        },
        fields={"VllmConfig.use_v2_model_runner": "which model runner the engine gets"},
        names={"NgramGPUTypes": "the drafters that asynchronous scheduling is allowed with"}),
    # The way of a prediction into the engine.
    *_seams("inputs", INPUTS,
        wrap={
            "InputProcessor.process_inputs(self, request_id, prompt, params)":
                "tokenise a text prediction where the tokenizer is",
        },
        fields={
            "InputProcessor.vllm_config": "whether the engine drafts from predictions",
            "InputProcessor.renderer": "the tokenizer",
        }),
    *_seams("inputs", RENDERER,
        call={"BaseRenderer.tokenize_prompt(self, prompt, params)": "tokenise as vLLM does"}),
    *_seams("inputs", "vllm.renderers",
        call={"TokenizeParams(max_total_tokens)": "no special tokens, cut at the capacity"}),
    *_endpoint("chat", CHAT, "OpenAIServingChat.create_chat_completion"),
    *_seams("chat", CHAT_PROTOCOL,
        fields={"ChatCompletionRequest.vllm_xargs": "becomes SamplingParams.extra_args"}),
    *_seams("chat", RENDERER,
        call={"BaseRenderer.tokenize_prompt_async(self, prompt, params)": "tokenise off the event loop"}),
    *_endpoint("completions", COMPLETION, "OpenAIServingCompletion.create_completion"),
    *_seams("completions", f"{OPENAI}.completion.protocol",
        fields={"CompletionRequest.vllm_xargs": "becomes SamplingParams.extra_args"}),
    *_endpoint("responses", RESPONSES, "OpenAIServingResponses.create_responses"),
    *_seams("responses", f"{OPENAI}.responses.protocol",
        fields={"ResponsesRequest.vllm_xargs": "becomes SamplingParams.extra_args"}),
    *_seams("batch", BATCH,
        wrap={
            "OpenAIServingChatBatch.create_batch_chat_completion(self, request, raw_request)":
                "read and validate the `prediction` field",
        }),
    *_seams("batch", CHAT_PROTOCOL,
        wrap={
            "BatchChatCompletionRequest.to_chat_completion_request(self, messages)":
                "each conversation's request gets the prediction",
        }),
    *_seams("messages", MESSAGES,
        wrap={
            "AnthropicServingMessages.create_messages(self, request, raw_request)":
                "the `prediction` field, which vLLM's model of the request drops",
        },
        call={
            "AnthropicServingMessages.create_chat_completion(self, request, raw_request)":
                "vLLM makes a chat request of it, which gets the prediction",
        },
        fields={"AnthropicServingMessages.engine_client": "whether the engine drafts from predictions"}),
    *_seams("app", APP,
        wrap={
            "init_entrypoints_middleware(args, app, supported_tasks)":
                "a body too long to be parsed on the event loop is refused before it is; the route of the status",
        }),
    *_seams("status", AUTHENTICATION,
        call={
            "AuthenticationMiddleware(app, tokens)": "the status is behind the server's API key",
            "AuthenticationMiddleware.verify_token(self, headers)": "the same",
        }),
    *_seams("app", "vllm.entrypoints.serve.exception_handling.handlers.validation",
        names={"logger": "a traceback there can end with the request's body: not with a prediction in it"}),
    # What vLLM prints of a step that has failed.
    *_seams("dump", DUMP,
        wrap={
            "_dump_engine_exception(config, scheduler_output, scheduler_stats)":
                "draft tokens and predictions are printed as their number",
        }),
    *_seams("dump", SCHEDULED,
        fields={
            "SchedulerOutput.scheduled_spec_decode_tokens": "draft tokens of a step",
            "SchedulerOutput.scheduled_new_reqs": "new requests",
            "NewRequestData.sampling_params": "extra_args with the prediction",
        }),
    # Usage and metrics.
    *_seams("usage", OUTPUTS,
        wrap={
            "OutputProcessor.__init__(self)": "a front end starts: its metrics begin at 0",
            "OutputProcessor.add_request(self, request)": "engine request → HTTP request",
            "OutputProcessor.process_outputs(self, engine_core_outputs)":
                "read what came with a step's outputs, and how much of it a stop string kept",
            "OutputProcessor.abort_requests(self, request_ids)": "forget aborted requests",
        },
        fields={"OutputProcessor.request_states": "which requests are still open"}),
    *_seams("usage", "vllm.v1.engine",
        fields={
            "EngineCoreOutput.trace_headers": "the one open mapping from the scheduler to the front end",
            "EngineCoreOutput.new_token_ids": "tokens of a step that are output; vLLM cuts them at a stop string",
        }),
    *_seams("usage", USAGE_PROTOCOL,
        fields={
            "CompletionTokenUsageInfo.reasoning_tokens": "where accepted and rejected prediction tokens are shown",
            "UsageInfo.completion_tokens_details": "the same",
        }),
    *_seams("usage", f"{OPENAI}.responses.protocol",
        fields={"ResponseUsage.output_tokens_details": "the same for /v1/responses"}),
    *_seams("usage_v1", V1_RUNNER,
        wrap={"GPUModelRunner.sample_tokens(self)": "the draft report leaves with the step's output"}),
    *_seams("usage_v1", SCHEDULER,
        implement={
            "Scheduler.add_request(self, request)": "predictions print as their size, and know who may share them",
            "Scheduler.update_from_output(self, scheduler_output, model_runner_output)":
                "count what a step verified",
            "Scheduler.schedule(self)":
                "plan no drafts beside `logprob_token_ids`, and no placeholders that nobody proposed",
            "Scheduler._update_request_with_output(self, request, new_token_ids)":
                "enter the tokens of a request's last step in the prefix cache",
        },
        fields={
            "Scheduler.kv_cache_manager": "the prefix cache",
            "Scheduler.requests": "request id → request",
            "Scheduler.running": "the requests of the next step",
            "Scheduler.num_spec_tokens": "placeholders of a request whose prompt is cached; 0 for a step without",
        }),
    *_seams("usage_v1", SCHEDULED,
        fields={
            "SchedulerOutput.num_invalid_spec_tokens": "drafts that a grammar has ruled out",
        }),
    *_seams("usage_v1", REQUEST,
        fields={
            "Request.num_tokens": "where a draft was made",
            "Request.num_computed_tokens": "what may enter the prefix cache",
            "Request.status": "a preempted request has no blocks; whether an answer is whole",
            "Request.output_token_ids": "the answer, for the memory of earlier answers",
            "Request.cache_salt": "who may share the memory of equal predictions, and of earlier answers",
            "Request.spec_token_ids": "a request's drafts",
        }),
    *_seams("usage_v1", KV_CACHE,
        call={"KVCacheManager.cache_blocks(self, request, num_computed_tokens)": "enter tokens in the cache"}),
    *_seams("usage_v1", "vllm.v1.outputs",
        fields={
            "ModelRunnerOutput.req_ids": "the requests of a step",
            "ModelRunnerOutput.sampled_token_ids": "tokens that a step sampled",
        }),
    *_seams("usage_v1", "vllm.config.scheduler",
        fields={"SchedulerConfig.scheduler_cls": "the place for a scheduler"}),
    # Drafting on the V1 model runner.
    *_seams("v1", V1_RUNNER,
        wrap={
            "GPUModelRunner._update_states(self, scheduler_output)":
                "which requests arrived, finished or left the batch; runs even when nothing is scheduled",
            "GPUModelRunner._input_fits_in_drafter(self, common_attn_metadata)":
                "near max_model_len vLLM replaces the whole batch's drafts by zeros; ours end in time",
        },
        fields={
            "GPUModelRunner.drafter": "find our proposer on a runner",
            "GPUModelRunner.input_batch": "the rows of the batch",
        }),
    *_seams("v1", "vllm.v1.worker.gpu_input_batch",
        fields={
            "InputBatch.req_ids": "row → request",
            "InputBatch.req_id_to_index": "request → row",
            "InputBatch.num_prompt_tokens": "prompt length",
        }),
    *_seams("v1", SCHEDULED,
        fields={
            "SchedulerOutput.scheduled_new_reqs": "new requests",
            "SchedulerOutput.finished_req_ids": "finished requests",
            "SchedulerOutput.scheduled_spec_decode_tokens": "the drafts that this step verifies",
            "NewRequestData.req_id": "id of a new request",
            "NewRequestData.sampling_params": "extra_args, limits",
        }),
    *_seams("v1", REJECTION,
        wrap={
            "apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata)":
                "fails on a step without drafts in which a request has top_k",
            "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)":
                "on the CPU the temperature, top_k and top_p of drafts are uninitialised",
        }),
    *_seams("v1", V1_RUNNER,
        wrap={
            "GPUModelRunner._sample(self, logits, spec_decode_metadata)":
                "the sampler of drafts, which also samples steps without any, does not answer logprob_token_ids",
            "build_logitsprocs(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)":
                "with any drafter vLLM leaves out those of min_p and logit_bias",
        }),
    *_seams("v1", PROCESSORS,
        call={"LogitsProcessors(logitsprocs)": "vLLM's own, and those that it leaves out"},
        names={"BUILTIN_LOGITS_PROCESSORS": "those that an engine without drafts has"}),
    *_seams("v1", "vllm.v1.sample.logits_processor.state",
        fields={"LogitsProcessors.all": "those that vLLM has made"}),
    *_seams("v1", "vllm.v1.sample.thinking_budget_state",
        wrap={
            "ThinkingBudgetStateHolder.apply_to_logits(self, logits, predict_bonus_token, spec_token_ids)":
                "in a step of the ordinary sampler it forces the end of one request's thinking on another",
        },
        fields={"ThinkingBudgetStateHolder.in_spec_mode": "whether it counts rows by drafts"}),
    *_seams("draft_limit", REJECTION,
        names={"MAX_SPEC_LEN": "drafts of a request in one step; with more the V1 sampler ends the engine"}),
    # Sampling parameters that vLLM refuses on any server that drafts.
    *_seams("parameters", "vllm.sampling_params",
        wrap={
            "SamplingParams._validate_spec_decode(self, speculative_config)":
                "min_p and logit_bias are served all the same",
        },
        fields={
            "SamplingParams.min_p": "whether a request has it",
            "SamplingParams.logit_bias": "whether a request has it",
        }),
    # Drafting on the V2 model runner, its schedulers included.
    *_seams("v2_start", V2_RUNNER,
        wrap={"init_speculator(vllm_config, device, req_states)": "put our speculator in its place"}),
    *_seams("v2", V2_RUNNER,
        wrap={
            "GPUModelRunner.add_requests(self, scheduler_output)":
                "which rows new and resumed requests got, and their predictions",
            "GPUModelRunner._remove_request(self, req_id)": "which rows are free: finished, aborted, preempted",
            "GPUModelRunner.finish_requests(self, scheduler_output)":
                "write the step log of finished requests; preempted ones go on",
            "GPUModelRunner.sample_tokens(self)": "the draft report leaves with the step's output",
        },
        fields={
            "GPUModelRunner.speculator": "find ours",
            "GPUModelRunner.req_states": "the rows",
        }),
    *_seams("v2", STATES,
        fields={
            "RequestState.req_id_to_index": "request → row, which is our slot",
            "RequestState.all_token_ids": "prompt and output of every row; made dense device memory",
            "RequestState.total_len": "tokens of every row",
            "RequestState.prompt_len": "prompt length",
            "RequestState.prefill_len": "tokens of a row when its request comes or returns",
        }),
    *_seams("v2", "vllm.v1.worker.gpu.buffer_utils",
        call={"StagedWriteTensor(size, dtype, device)": "the rows as dense device memory"}),
    *_seams("v2", SPECULATOR,
        implement={
            "BaseSpeculator.propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
            "aux_hidden_states, num_sampled)":
                "what the runner calls each step",
            "BaseSpeculator.init_cudagraph_manager(self, cudagraph_mode)": "nothing to set up",
            "BaseSpeculator.capture(self)": "nothing to capture",
        }),
    *_seams("v2", INPUT_BATCH,
        fields={
            "InputBatch.num_reqs": "batch size",
            "InputBatch.req_ids": "row → request",
            "InputBatch.idx_mapping": "the rows, on the device",
            "InputBatch.num_draft_tokens_per_req": "the step log: drafts that this step verified",
            "InputBatch.idx_mapping_np": "the rows, on the host",
        }),
    *_seams("v2", SCHEDULER,
        implement={
            "Scheduler.add_request(self, request)": "predictions print as their size, and know who may share them",
            "Scheduler.update_from_output(self, scheduler_output, model_runner_output)":
                "read the draft report that came with a step's output",
            "Scheduler.update_draft_token_ids(self, draft_token_ids)":
                "cut the draft placeholders (synchronous scheduling)",
            "Scheduler._update_request_with_output(self, request, new_token_ids)":
                "enter the tokens of a request's last step in the prefix cache (synchronous scheduling)",
        },
        fields={
            "Scheduler.kv_cache_manager": "the prefix cache",
            "Scheduler.requests": "request id → request",
            "Scheduler.running": "the requests of the next step",
        }),
    *_seams("v2", KV_CACHE,
        call={"KVCacheManager.cache_blocks(self, request, num_computed_tokens)": "enter tokens in the cache"}),
    *_seams("v2", "vllm.v1.core.sched.async_scheduler",
        implement={"AsyncScheduler.schedule(self)": "cut the draft placeholders (asynchronous scheduling)"}),
    *_seams("v2", "vllm.config.speculative",
        fields={"SpeculativeConfig.enable_adaptive_verification": "whether vLLM trims drafts by our confidences"}),
    *_seams("v2", "vllm.config.scheduler", fields={"SchedulerConfig.scheduler_cls": "the place for a scheduler"}),
    *_seams("v2", REQUEST,
        fields={
            "Request.spec_token_ids": "a request's placeholders",
            "Request.sampling_params": "whether it has a prediction",
            "Request.num_computed_tokens": "what may enter the prefix cache",
            "Request.num_tokens": "the same",
            "Request.status": "a preempted request has no blocks; whether an answer is whole",
            "Request.output_token_ids": "the answer, for the memory of earlier answers",
            "Request.cache_salt": "who may share the memory of equal predictions, and of earlier answers",
            "Request.max_tokens": "no drafts past the end",
            "Request.num_output_tokens": "no drafts past the end",
            "Request.resumable": "`max_tokens` of such a request may fall",
        }),
    *_seams("v2", "vllm.v1.outputs",
        implement={
            "AsyncModelRunnerOutput.get_output(self)":
                "vLLM asks for a step's output when the device has sampled: then the draft lengths are there, too",
        }),
    # vLLM's adaptive verification.
    *_seams("adaptive", SELECTOR,
        wrap={
            "_cached_get_attn_backend(backend, attn_selector_config)":
                "attention backends that cannot trim drafts on the device are refused here",
        },
        fields={"AttentionSelectorConfig.use_adaptive_verification": "choose a backend without"}),
    *_seams("adaptive", V2_RUNNER,
        wrap={
            "maybe_create_adaptive_verification_manager(enable_adaptive_verification, attn_groups, req_states, "
            "query_start_loc, num_bonus_tokens, max_total_logits, vllm_config)":
                "attention backends whose CUDA graphs take one query length are refused here",
            "GPUModelRunner.initialize_kv_cache(self, kv_cache_config)":
                "after a refusal the rejection sampler does without, too",
        },
        fields={
            "GPUModelRunner.adaptive_verification": "whether it was refused",
            "GPUModelRunner.rejection_sampler": "does without after a refusal",
        }),
    *_seams("adaptive", "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        fields={"RejectionSampler.enable_adaptive_verification": "does without after a refusal"}),
    *_seams("adaptive", ADAPTIVE,
        wrap={
            "AdaptiveVerificationManager.set_cost_curves(self, draft_curve, verify_curve)":
                "what a step costs; fails when there was none to time",
        },
        fields={"AdaptiveVerificationManager.cost_tables": "a flat price instead"}),
    *_seams("adaptive", STATES,
        fields={
            "RequestState.max_num_reqs": "the size of the flat price's first table",
            "RequestState.max_num_batched_tokens": "the size of the flat price's second table",
        }),
    *_seams("adaptive", INPUT_BATCH,
        fields={"InputBatch.cu_num_logits": "the step log and the usage: drafts that the device kept"}),
    # Recipes: the model's tokenizer in a worker, and the tensor-parallel group.
    *_seams("recipes", "vllm.tokenizers",
        call={
            "cached_tokenizer_from_config(model_config)": "the tokenizer of the served model",
            "TokenizerLike.encode(self, text, truncation, max_length, add_special_tokens)":
                "the tokens of a text, without special ones",
            "TokenizerLike.decode(self, ids)": "the text of a token: what it is in the shape of a context",
        }),
    *_seams("recipes", "vllm.config.model", fields={"ModelConfig.skip_tokenizer_init": "there is no tokenizer"}),
    *_seams("recipes", "vllm.config.parallel",
        fields={
            "ParallelConfig.prefill_context_parallel_size": "ranks that draft the same and are not in one group",
        }),
    *_seams("recipes", PARALLEL,
        call={"GroupCoordinator.broadcast_object(self, obj, src)": "the others get what it made"},
        fields={"GroupCoordinator.rank_in_group": "the first rank makes the recipes"},
        names={"get_tp_group": "tensor-parallel ranks draft the same"}),
)
# fmt: on

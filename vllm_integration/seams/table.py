"""Every private vLLM name this package touches: `SEAMS`, one row a name, and their `GROUPS`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

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
    purpose: what this package needs it for; behind ⇒ what would replace it on V2, in tests/vllm/upstream.patch.
    parameters: for "wrap", "call" and "implement": the leading parameters, in order, that must be there.
        Further parameters of a called function must have defaults.
    """

    group: str
    kind: Kind
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()

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


CONFIG = "vllm.config.vllm"

_ENDPOINTS = ("vllm_integration.frontend.endpoints",)

GROUPS: dict[str, Group] = {
    "config": Group("plugin", CONFIG, ("vllm_integration.config.engine_config",)),
    "inputs": Group("plugin", "vllm.v1.engine.input_processor", _ENDPOINTS),
    "chat": Group("plugin", "vllm.entrypoints.openai.chat_completion.serving", _ENDPOINTS),
    "completions": Group("plugin", "vllm.entrypoints.openai.completion.serving", _ENDPOINTS),
    "responses": Group("plugin", "vllm.entrypoints.openai.responses.serving", _ENDPOINTS),
    "batch": Group("plugin", "vllm.entrypoints.openai.chat_completion.batch_serving", _ENDPOINTS),
    "messages": Group("caller", "vllm.entrypoints.anthropic.serving", _ENDPOINTS),
    "app": Group("plugin", "vllm.entrypoints.launchers.app", _ENDPOINTS),
    "usage": Group("usage", "vllm.v1.engine.output_processor", ("vllm_integration.frontend.usage",)),
    "graph_modes": Group("caller", "", ("vllm_integration.frontend.usage",)),
    "dump": Group("dump", "vllm.logging_utils.dump_input", ("vllm_integration.scheduler.schedulers",)),
    "v1": Group("plugin", "", ("vllm_integration.worker.proposer_v1",)),
    "usage_v1": Group("usage", "", ("vllm_integration.worker.request_drafter",)),
    "seeds": Group("caller", "", ("vllm_integration.worker.proposer_v1",)),
    "v2_start": Group("plugin", "vllm.v1.worker.gpu.model_runner", ("vllm_integration.plugin",)),
    "v2": Group(
        "plugin", "", ("vllm_integration.worker.speculator", "vllm_integration.worker.request_drafter")
    ),
    "parameters": Group("parameters", "vllm.v1.engine.input_processor", _ENDPOINTS),
    "graphs": Group("caller", "", ("vllm_integration.worker.graphs",)),
    "adaptive": Group("caller", "", ("vllm_integration.config.engine_config",)),
    "inner": Group("caller"),
    "recipes": Group("caller"),
}

# Groups and the module, or module:Class, of the rows below; a row: kind, attribute(leading parameters), purpose.
_ROWS = """
# The engine's configuration.
config vllm.config.vllm:VllmConfig
  wrap _get_v2_model_runner_unsupported_features(self) V2 refuses custom classes; ours has a V2 part ⇒ custom_class
  wrap _validate_adaptive_verification(self) where vLLM cannot trim drafts, our slots do without
  wrap __post_init__(self) asynchronous scheduling with our method, and our scheduler
  field use_v2_model_runner which model runner the engine gets ⇒ custom_class
config vllm.config.model:ModelConfig
  field is_hybrid whether layers keep recurrent states, which vLLM's CPU kernels lose beside drafts
  field is_attention_free the same
  field architecture whether drafts were run with such layers
config vllm.config.vllm
  global NgramGPUTypes the drafters that asynchronous scheduling is allowed with

# The way of a prediction into the engine.
inputs vllm.v1.engine.input_processor:InputProcessor
  wrap process_inputs(self,request_id,prompt,params) tokenise a text prediction where the tokenizer is
  field vllm_config whether the engine drafts from predictions
  field renderer the tokenizer
inputs vllm.renderers.base:BaseRenderer
  call tokenize_prompt(self,prompt,params) tokenise as vLLM does
inputs vllm.renderers
  call TokenizeParams(max_total_tokens) no special tokens, cut at the capacity
chat vllm.entrypoints.generate.base.serving:GenerateBaseServing
  call create_error_response(message,err_type,status_code,param) HTTP 400 with the field
  field renderer the tokenizer
  field engine_client whether the engine drafts from predictions
chat vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat
  wrap create_chat_completion(self,request,raw_request) read and validate the `prediction` field
chat vllm.renderers.base:BaseRenderer
  call tokenize_prompt_async(self,prompt,params) tokenise off the event loop
completions vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion
  wrap create_completion(self,request,raw_request) read and validate the `prediction` field
responses vllm.entrypoints.openai.responses.serving:OpenAIServingResponses
  wrap create_responses(self,request,raw_request) read and validate the `prediction` field
batch vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch
  wrap create_batch_chat_completion(self,request,raw_request) read and validate the `prediction` field
batch vllm.entrypoints.openai.chat_completion.protocol:BatchChatCompletionRequest
  wrap to_chat_completion_request(self,messages) each conversation's request gets the prediction
messages vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest
  field vllm_xargs the chat request has the same
messages vllm.entrypoints.anthropic.serving:AnthropicServingMessages
  wrap create_messages(self,request,raw_request) the `prediction` field, which vLLM's model of the request drops
  field engine_client whether the engine drafts from predictions
app vllm.entrypoints.launchers.app
  wrap init_entrypoints_middleware(args,app) the check of bodies
app vllm.entrypoints.serve.exception_handling.handlers.validation
  global logger a traceback there can end with the request's body: not with a prediction in it

# What vLLM prints of a step that has failed.
dump vllm.logging_utils.dump_input
  wrap _dump_engine_exception(config,scheduler_output,scheduler_stats) drafts are printed as their number
dump vllm.v1.core.sched.output:SchedulerOutput
  field scheduled_spec_decode_tokens draft tokens of a step
  field scheduled_new_reqs new requests
dump vllm.v1.core.sched.output:NewRequestData
  field sampling_params extra_args with the prediction

# Usage and metrics.
usage vllm.v1.engine.output_processor:OutputProcessor
  wrap __init__(self) a front end starts: its metrics begin at 0
  wrap add_request(self,request) engine request → HTTP request
  wrap process_outputs(self,engine_core_outputs) what came with outputs, and what a stop string kept
  wrap abort_requests(self,request_ids) forget aborted requests
  field request_states which requests are still open
usage vllm.v1.engine:EngineCoreOutput
  field trace_headers the one open mapping from the scheduler to the front end
  field new_token_ids tokens of a step that are output; vLLM cuts them at a stop string
usage vllm.entrypoints.serve.engine.protocol:UsageInfo
  field completion_tokens_details where accepted and rejected prediction tokens are shown
usage vllm.entrypoints.openai.responses.protocol:ResponseUsage
  field output_tokens_details the same for /v1/responses
graph_modes vllm.v1.engine.output_processor:OutputProcessor
  wrap update_scheduler_stats(self,scheduler_stats) steps by CUDA graph mode, with `--cudagraph-metrics`
graph_modes vllm.v1.metrics.stats:SchedulerStats
  field cudagraph_stats the step's, if any
graph_modes vllm.compilation.cuda_graph:CUDAGraphStat
  field runtime_mode its mode
usage_v1 vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap sample_tokens(self) the draft report leaves with the step's output
usage_v1 vllm.v1.core.sched.scheduler:Scheduler
  implement schedule(self) plan no drafts beside `logprob_token_ids`, and no placeholders that nobody proposed
  field num_spec_tokens placeholders of a request whose prompt is cached; 0 for a step without
usage_v1 vllm.v1.core.sched.output:SchedulerOutput
  field num_invalid_spec_tokens drafts that a grammar has ruled out
usage_v1 vllm.v1.outputs:ModelRunnerOutput
  field req_ids the requests of a step
  field sampled_token_ids tokens that a step sampled
usage_v1 v2 vllm.v1.core.sched.scheduler:Scheduler
  implement add_request(self,request) predictions print as their size, and know who may share them
  implement update_from_output(self,scheduler_output,model_runner_output) count a step's drafts
  implement _update_request_with_output(self,request,new_token_ids) the last step in the cache
  field kv_cache_manager the prefix cache
  field requests request id → request ⇒ draft_lengths
  field running the requests of the next step ⇒ draft_lengths
usage_v1 v2 vllm.v1.request:Request
  field num_tokens where a draft was made ⇒ draft_lengths
  field num_computed_tokens what may enter the prefix cache
  field status a preempted request has no blocks; whether an answer is whole
  field output_token_ids the answer, for the memory of earlier answers
  field cache_salt who may share the memory of equal predictions, and of earlier answers
  field spec_token_ids a request's drafts ⇒ draft_lengths
usage_v1 v2 vllm.v1.core.kv_cache_manager:KVCacheManager
  call cache_blocks(self,request,num_computed_tokens) enter tokens in the cache
usage_v1 v2 vllm.config.scheduler:SchedulerConfig
  field scheduler_cls the place for a scheduler ⇒ draft_lengths

# Drafting on the V1 model runner.
v1 vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap _update_states(self,scheduler_output) who arrived, finished or left; runs also when nothing is scheduled
  wrap _input_fits_in_drafter(self,common_attn_metadata) near max_model_len vLLM zeroes all drafts
  field drafter find our proposer on a runner
  field input_batch the rows of the batch
  wrap _sample(self,logits,spec_decode_metadata) that of drafts leaves out logprob_token_ids
v1 vllm.v1.worker.gpu_input_batch:InputBatch
  field req_ids row → request
  field req_id_to_index request → row
  field num_prompt_tokens prompt length
v1 vllm.v1.core.sched.output:SchedulerOutput
  field scheduled_new_reqs new requests
  field finished_req_ids finished requests
  field scheduled_spec_decode_tokens the drafts that this step verifies
v1 vllm.v1.core.sched.output:NewRequestData
  field req_id id of a new request
  field sampling_params extra_args, limits
v1 vllm.v1.sample.rejection_sampler
  wrap apply_sampling_constraints(logits,cu_num_draft_tokens,sampling_metadata) fails on top_k without drafts
  wrap expand_batch_to_tokens(x,cu_num_tokens,num_tokens,replace_from,replace_to) uninitialised on the CPU
v1 vllm.v1.worker.gpu_model_runner
  wrap build_logitsprocs(vllm_config,device,is_pin_memory,is_pooling_model,custom_logitsprocs) \
      with any drafter vLLM leaves out those of min_p and logit_bias
v1 vllm.v1.sample.logits_processor
  call LogitsProcessors(logitsprocs) vLLM's own, and those that it leaves out
  global BUILTIN_LOGITS_PROCESSORS those that an engine without drafts has
v1 vllm.v1.sample.logits_processor.state:LogitsProcessors
  field all those that vLLM has made
v1 vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder
  wrap apply_to_logits(self,logits,predict_bonus_token,spec_token_ids) it ends the thinking of another request
  field in_spec_mode whether it counts rows by drafts

# Requests with a seed, on the V1 model runner and a CPU.
seeds vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap _bookkeeping_sync(self,scheduler_output) ends the engine where a prompt comes in parts
  field discard_request_mask rows whose prompt has not ended
  field input_batch the rows of the batch
seeds vllm.v1.worker.gpu_input_batch:InputBatch
  field generators row → generator

# Sampling parameters that vLLM refuses on any server that drafts.
parameters vllm.sampling_params:SamplingParams
  wrap _validate_spec_decode(self,speculative_config) min_p and logit_bias are served all the same

# Drafting on the V2 model runner, its schedulers included.
v2_start vllm.v1.worker.gpu.model_runner
  wrap init_speculator(vllm_config,device,req_states) put our speculator in its place ⇒ custom_class
v2 vllm.v1.worker.gpu.model_runner:GPUModelRunner
  wrap add_requests(self,scheduler_output) rows of new and resumed requests, and their predictions ⇒ add_requests
  wrap _remove_request(self,req_id) which rows are free: finished, aborted, preempted ⇒ remove_request
  wrap finish_requests(self,scheduler_output) step logs of finished requests; preempted ones stay ⇒ finish_requests
  wrap sample_tokens(self) the draft report leaves with the step's output ⇒ draft_lengths
  field speculator find ours ⇒ add_requests
v2 vllm.v1.worker.gpu.states:RequestState
  field req_id_to_index request → row, which is our slot ⇒ custom_class
  field all_token_ids prompt and output of every row; made dense device memory ⇒ custom_class
  field total_len tokens of every row ⇒ custom_class
  field prompt_len prompt length ⇒ custom_class
  field prefill_len tokens of a row when its request comes or returns ⇒ custom_class
v2 vllm.v1.worker.gpu.buffer_utils
  call StagedWriteTensor(size,dtype,device) the rows as dense device memory ⇒ uses_dense_token_ids
v2 vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator
  implement propose(self,input_batch,attn_metadata,slot_mappings,last_hidden_states,aux_hidden_states,\
num_sampled)       what the runner calls each step ⇒ propose
  implement init_cudagraph_manager(self,cudagraph_mode) nothing to set up ⇒ custom_class
  implement capture(self) nothing to capture ⇒ custom_class
v2 vllm.v1.worker.gpu.input_batch:InputBatch
  field req_ids row → request ⇒ propose
  field idx_mapping the rows, on the device ⇒ propose
  field num_draft_tokens_per_req the step log: drafts that this step verified ⇒ propose
  field idx_mapping_np the rows, on the host ⇒ propose
v2 vllm.v1.core.sched.scheduler:Scheduler
  implement update_draft_token_ids(self,draft_token_ids) cut the draft placeholders (synchronous) ⇒ draft_lengths
v2 vllm.v1.core.sched.async_scheduler:AsyncScheduler
  implement schedule(self) cut the draft placeholders (asynchronous) ⇒ draft_lengths
v2 vllm.config.speculative:SpeculativeConfig
  field enable_adaptive_verification whether vLLM trims drafts by our confidences
v2 vllm.v1.request:Request
  field sampling_params whether it has a prediction ⇒ add_requests
  field max_tokens no drafts past the end ⇒ add_requests
  field num_output_tokens no drafts past the end ⇒ draft_lengths
  field resumable `max_tokens` of such a request may fall ⇒ add_requests
v2 vllm.v1.outputs:AsyncModelRunnerOutput
  implement get_output(self) the device has sampled: the draft lengths are there, too ⇒ draft_lengths

# vLLM's own drafter beside ours.
inner vllm.config.speculative:SpeculativeConfig
  field target_model_config what that drafter is made for
  field target_parallel_config the same
  field draft_sample_method ours are certain: drafts that are sampled are refused
  field num_speculative_tokens_per_batch_size one number of tokens for all batches; another is refused

# Which CUDA graphs are captured.
graphs vllm.v1.worker.gpu.model_runner:GPUModelRunner
  wrap initialize_kv_cache(self,kv_cache_config) add FULL graphs for plain steps and for lengths that vary
  field cudagraph_manager which graphs are captured
  field attn_groups the attention backends
  field pcp_manager prefill context parallelism
  field model_state attention backends that a model brings
graphs vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager
  call _init_candidates(self) the descriptors of all graphs
  field _candidates the descriptors that a step may use
  field _capture_descs the descriptors that are captured
  field varlen_decode whether graphs take lengths that vary
  field ubatch_runner whether a step is cut into microbatches
graphs vllm.v1.worker.gpu.attn_utils
  call get_varlen_cudagraph_unsupported_backend(attn_groups,vllm_config,max_query_len) its graphs take one length

# vLLM's adaptive verification.
adaptive vllm.v1.attention.selector
  wrap _cached_get_attn_backend(backend,attn_selector_config) refuses backends that cannot trim
adaptive vllm.v1.attention.selector:AttentionSelectorConfig
  field use_adaptive_verification choose a backend without
adaptive vllm.v1.worker.gpu.model_runner
  wrap maybe_create_adaptive_verification_manager(enable_adaptive_verification,attn_groups,\
req_states,query_start_loc,num_bonus_tokens,max_total_logits,vllm_config) \
      attention backends whose CUDA graphs take one query length are refused here
graphs vllm.v1.worker.gpu.model_runner:GPUModelRunner
  field adaptive_verification whether vLLM made a manager, or refused it
  field rejection_sampler does without after a refusal
adaptive vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler
  field enable_adaptive_verification does without after a refusal
adaptive vllm.v1.worker.gpu.input_batch:InputBatch
  field cu_num_logits the step log and the usage: drafts that the device kept ⇒ propose

# The model's tokenizer in a worker, and the tensor-parallel group.
recipes vllm.tokenizers
  call cached_tokenizer_from_config(model_config) the tokenizer of the served model
recipes vllm.tokenizers:TokenizerLike
  call encode(self,text,truncation,max_length,add_special_tokens) the tokens of a text, without special ones
  call decode(self,ids) the text of a token: what it is in the shape of a context
recipes vllm.config.model:ModelConfig
  field skip_tokenizer_init there is no tokenizer
recipes vllm.config.parallel:ParallelConfig
  field prefill_context_parallel_size ranks that draft the same and are not in one group
recipes vllm.distributed.parallel_state:GroupCoordinator
  call broadcast_object(self,obj,src) the others get what it made
  field rank_in_group the first rank makes the recipes
recipes vllm.distributed.parallel_state
  global get_tp_group tensor-parallel ranks draft the same
"""


def _read(rows: str) -> Iterator[Seam]:
    groups: list[str] = []
    module = owner = ""
    for line in rows.splitlines():
        if line.startswith(" "):
            kind, called, purpose = line.split(maxsplit=2)
            name, _, parameters = called.rstrip(")").partition("(")
            attribute = f"{owner}.{name}" if owner else name
            for group in groups:
                yield Seam(
                    group,
                    cast(Kind, kind),
                    module,
                    attribute,
                    purpose,
                    tuple(filter(None, parameters.split(","))),
                )
        elif line and not line.startswith("#"):
            *groups, place = line.split()
            module, _, owner = place.partition(":")


SEAMS: tuple[Seam, ...] = tuple(_read(_ROWS))

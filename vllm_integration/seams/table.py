"""Every private vLLM name this package touches: `SEAMS`, one row a name, and their `GROUPS`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["wrap", "call", "implement", "field", "global"]


@dataclass(frozen=True)
class Seam:
    """A name that vLLM does not promise to keep. Options and parameters of requests are not in it.

    groups: keys of `GROUPS`.
    kind: "wrap" (replaced by a wrapper that calls the original), "call" (called as it is), "implement"
        (vLLM calls ours in its place), "field" (an attribute or property that is read; of a function, one that it
        sets or reads), "global" (a name in a module that is read or, for a moment, replaced).
    attribute: dotted, below the module.
    purpose: what this package needs it for; after ⇒ what would replace it on V2, in docs/developer/upstream/.
    parameters: for "wrap", "call" and "implement": the leading parameters, in order, that must be there.
        Further parameters of a called function must have defaults.
    """

    groups: tuple[str, ...]
    kind: Kind
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in `@seam` and in reports: its first group and the last part of the attribute."""
        return f"{self.groups[0]}.{self.attribute.rpartition('.')[2]}"

    @property
    def place(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True)
class SeamStatus:
    """A probe's result: "found", "missing", or "changed" with the difference in `detail`. body: a digest of the
    function's statements, where it is one that we wrap or stand in for; empty for others."""

    seam: Seam
    state: Literal["found", "missing", "changed"]
    detail: str = ""
    body: str = ""


class Group:
    """Seams that are installed together: all of them or none.

    costs: what the log says where one of them is missing; empty for the core, without which the plugin is off.
    after: the vLLM module after whose import the group is installed; empty if it is installed by name, as
        the drafter does, so that an engine that does not draft from predictions never sees it.
    modules: those of this package that define the wrappers, imported when the group is installed.
    """

    def __init__(self, costs: str = "", after: str = "", *modules: str) -> None:
        self.costs, self.after = costs, after
        self.modules = tuple(f"vllm_integration.{module}" for module in modules)


CONFIG = "vllm.config.vllm"
_PROCESSOR = "vllm.v1.engine.input_processor"

GROUPS: dict[str, Group] = {
    # The core: drafts and their lengths.
    "config": Group("", CONFIG, "config.engine_config"),
    "inputs": Group("", _PROCESSOR, "frontend.inputs"),
    "app": Group("", "vllm.entrypoints.launchers.app", "frontend.middleware"),
    "v1": Group("", "", "worker.proposer_v1"),
    "v2_start": Group("", "vllm.v1.worker.gpu.model_runner", "plugin"),
    "v2": Group("", "", "worker.speculator", "worker.request_drafter"),
    "scheduler": Group(),
    # Extras.
    "skeletons": Group(
        "may write skeletons of calls in another form than the model",
        "vllm.entrypoints.launchers.api_server.app_state",
    ),
    "streams": Group(
        "leaves tokens of a step together in streams", "vllm.parser.abstract_parser", "frontend.streams"
    ),
    "usage": Group("reports no usage", "vllm.v1.engine.output_processor", "frontend.usage"),
    "usage_v1": Group("reports no usage with the V1 model runner", "", "worker.request_drafter"),
    "step_log": Group("writes no step logs"),
    "memory": Group("remembers no answers", "", "scheduler.schedulers"),
    "dump": Group(
        "prints draft tokens in vLLM's crash dump", "vllm.logging_utils.dump_input", "scheduler.schedulers"
    ),
    "parameters": Group(
        "leaves min_p and logit_bias to vLLM, which refuses them", _PROCESSOR, "frontend.inputs"
    ),
    "samples": Group(
        "gives no sample a prediction of its own", "vllm.v1.engine.parallel_sampling", "frontend.inputs"
    ),
    "seeds": Group("leaves seeds beside long prompts to vLLM", "", "worker.proposer_v1"),
    "draws": Group(
        "verifies no drafts by the request's own draw, so that a seed's answers depend on them",
        "",
        "worker.own_draw",
    ),
    "graphs": Group("leaves CUDA graphs to vLLM", "", "worker.graphs"),
    "times": Group("measures no step times"),
    "adaptive": Group("schedules draft slots without adaptive verification"),
    "inner": Group("drafts without GPU_ALIGN_DRAFTER"),
    "recipes": Group("drafts without recipes"),
}

# Groups and the module, or module:Class, of the rows below; a row: kind, attribute(leading parameters) or several
# attributes, purpose.
_ROWS = """
config vllm.config.vllm:VllmConfig
  wrap _get_v2_model_runner_unsupported_features(self) V2 refuses custom classes; ours has a V2 part ⇒ custom_class
  wrap __post_init__(self) asynchronous scheduling with our method, and our scheduler
  field use_v2_model_runner which model runner the engine gets ⇒ custom_class
config vllm.config.vllm
  global NgramGPUTypes the drafters that asynchronous scheduling is allowed with
config vllm.config.model:ModelConfig
  field is_hybrid,is_attention_free,architecture layers with states, which not all kernels keep beside drafts

# The way of a prediction into the engine.
inputs vllm.v1.engine.input_processor:InputProcessor
  wrap process_inputs(self,request_id,prompt,params) tokenise a text prediction where the tokenizer is
  field vllm_config whether the engine drafts from predictions
  field renderer the tokenizer
inputs vllm.renderers.base:BaseRenderer
  field _executor the threads that vLLM tokenises in
app vllm.entrypoints.launchers.app
  wrap init_entrypoints_middleware(args,app) our middleware, behind those of vLLM

# How the server has the model write calls.
skeletons vllm.entrypoints.launchers.api_server.app_state:init_app_state
  field online_renderer,args,tool_call_parser the application's state, and the name in its arguments
skeletons vllm.renderers.online_renderer:OnlineRenderer
  field chat_template the text of `--chat-template`

streams vllm.parser.abstract_parser:DelegatingParser
  wrap parse_delta(self,delta_text,delta_token_ids,request,prompt_token_ids) a burst of tokens, one by one
streams vllm.parser.abstract_parser:Parser
  field _engine_based whether the parser takes any number of tokens
  field model_tokenizer the tokenizer

scheduler vllm.v1.core.sched.scheduler:Scheduler
  implement schedule(self) plan no drafts beside `logprob_token_ids`, and no placeholders without a draft
  implement add_request(self,request) predictions print as their size, and know who may share them
  implement update_from_output(self,scheduler_output,model_runner_output) count a step's drafts
  implement update_draft_token_ids(self,draft_token_ids) cut the draft placeholders (synchronous) ⇒ draft_lengths
  field num_spec_tokens placeholders of a request whose prompt is cached; 0 for a step without
  field requests,running request id → request, and those of the next step ⇒ draft_lengths
scheduler vllm.v1.core.sched.async_scheduler
  global AsyncScheduler the same for asynchronous scheduling ⇒ draft_lengths
scheduler vllm.v1.request:Request
  field sampling_params whether it has a prediction ⇒ add_requests
  field cache_salt who may share the memory of equal predictions, and of earlier answers
  field spec_token_ids a request's drafts ⇒ draft_lengths
  field resumable `max_tokens` of such a request may fall ⇒ add_requests

memory vllm.v1.core.sched.scheduler:Scheduler
  implement _free_request(self,request) an answer is whole: remember it
  implement reset_prefix_cache(self) the model is another one: forget its answers
memory vllm.v1.engine.core:EngineCore
  wrap collective_rpc(self,method) the workers may have other weights: forget the answers
  wrap set_weight_version(self,weight_version) the same
  wrap add_lora(self,lora_request) the same of an adapter that is loaded again
  field scheduler whose answers they are
memory vllm.v1.request:Request
  field status whether an answer is whole
  field lora_request whose answers are remembered apart
scheduler memory vllm.v1.request:Request
  field output_token_ids the answer; no drafts past the end ⇒ draft_lengths

# The plan of a step, and what vLLM prints of one that has failed.
dump vllm.logging_utils.dump_input
  wrap _dump_engine_exception(config,scheduler_output,scheduler_stats) drafts are printed as their number
v1 usage dump vllm.v1.core.sched.output:SchedulerOutput
  field scheduled_spec_decode_tokens draft tokens of a step
v1 v2 dump vllm.v1.core.sched.output:SchedulerOutput
  field scheduled_new_reqs new requests
v1 v2 dump vllm.v1.core.sched.output:NewRequestData
  field sampling_params extra_args with the prediction, limits

usage vllm.v1.engine.output_processor:OutputProcessor
  wrap add_request(self,request) engine request → HTTP request
  wrap process_outputs(self,engine_core_outputs) what came with outputs, and what a stop string kept
  wrap abort_requests(self,request_ids) forget aborted requests
  field request_states which requests are still open
usage vllm.v1.engine:EngineCoreOutput
  field trace_headers the one open mapping from the scheduler to the front end
  field new_token_ids tokens of a step that are output; vLLM cuts them at a stop string
usage vllm.v1.core.sched.output:SchedulerOutput
  field num_invalid_spec_tokens drafts that a grammar has ruled out
usage vllm.v1.outputs:ModelRunnerOutput
  field req_ids,sampled_token_ids the requests of a step, and what it sampled
usage vllm.v1.request:Request
  field num_tokens where a draft was made ⇒ draft_lengths
usage_v1 vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap sample_tokens(self) the draft report leaves with the step's output

v1 vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap _update_states(self,scheduler_output) who arrived, finished or left; runs also when nothing is scheduled
  wrap _input_fits_in_drafter(self,common_attn_metadata) near max_model_len vLLM zeroes all drafts
  field drafter,input_batch our proposer, and the rows of the batch
  wrap _sample(self,logits,spec_decode_metadata) that of drafts leaves out logprob_token_ids
v1 vllm.v1.worker.gpu_input_batch:InputBatch
  field req_ids,num_prompt_tokens row → request, prompt length
v1 v2 vllm.v1.core.sched.output:SchedulerOutput
  field finished_req_ids finished requests
v1 v2 vllm.v1.core.sched.output:NewRequestData
  field req_id id of a new request
v1 vllm.v1.sample.rejection_sampler
  wrap apply_sampling_constraints(logits,cu_num_draft_tokens,sampling_metadata) fails on top_k without drafts
  wrap expand_batch_to_tokens(x,cu_num_tokens,num_tokens,replace_from,replace_to) uninitialised on the CPU
v1 vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder
  field in_spec_mode whether it counts rows of logits by drafts

# Requests with a seed, on the V1 model runner and a CPU.
seeds vllm.v1.worker.gpu_model_runner:GPUModelRunner
  wrap _bookkeeping_sync(self,scheduler_output) ends the engine where a prompt comes in parts
  field device,discard_request_mask where it runs; rows whose prompt has not ended
seeds vllm.v1.worker.gpu_input_batch:InputBatch
  field generators row → generator

# Sampling parameters that vLLM refuses on any server that drafts, though V2 verifies drafts by them.
parameters vllm.sampling_params:SamplingParams
  wrap _validate_spec_decode(self,speculative_config) min_p and logit_bias are served on V2 all the same

# Requests with a seed and as many predictions as samples.
samples vllm.v1.engine.parallel_sampling:ParentRequest
  wrap _get_child_sampling_params(self,index) each sample has its own prediction

v2_start vllm.v1.worker.gpu.model_runner
  wrap init_speculator(vllm_config,device,req_states) put our speculator in its place ⇒ custom_class
v2 vllm.v1.worker.gpu.model_runner:GPUModelRunner
  wrap add_requests(self,scheduler_output) rows of new and resumed requests, and their predictions ⇒ add_requests
  wrap _remove_request(self,req_id) which rows are free: finished, aborted, preempted ⇒ remove_request
  wrap sample_tokens(self) the draft report leaves with the step's output ⇒ draft_lengths
  field speculator find ours ⇒ add_requests
v2 vllm.v1.outputs:AsyncModelRunnerOutput
  call get_output(self) the device has sampled: the draft lengths are there, too ⇒ draft_lengths
v2 vllm.v1.worker.gpu.states:RequestState
  field req_id_to_index,all_token_ids,total_len,prompt_len,prefill_len the rows, which are our slots ⇒ custom_class
v2 vllm.v1.worker.gpu.buffer_utils
  call StagedWriteTensor(size,dtype,device) the rows as dense device memory ⇒ uses_dense_token_ids
v2 vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator
  implement propose(self,input_batch,attn_metadata,slot_mappings,last_hidden_states,aux_hidden_states,\
num_sampled)       what the runner calls each step ⇒ propose
  implement init_cudagraph_manager(self,cudagraph_mode) nothing to set up ⇒ custom_class
  implement capture(self) nothing to capture ⇒ custom_class
v2 vllm.v1.worker.gpu.input_batch:InputBatch
  field req_ids,idx_mapping,idx_mapping_np row → request, and the rows on device and host ⇒ propose
step_log vllm.v1.worker.gpu.input_batch:InputBatch
  field num_draft_tokens_per_req drafts that this step verified ⇒ propose

draws vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler
  wrap _verify(self,logits,draft_logits,draft_sampled,pos,cu_num_logits,idx_mapping,idx_mapping_np,\
expanded_idx_mapping,expanded_local_pos,seq_lens_upper_bound_np,verify_draft_sampled) verify them by the own draw
  field sampler,num_speculative_steps the sampler of steps without drafts; K
draws vllm.v1.worker.gpu.sample.sampler:Sampler
  call sample(self,logits,expanded_idx_mapping,idx_mapping,idx_mapping_np,pos,input_ids,expanded_local_pos,\
seq_lens_upper_bound_np) the draw of a step without drafts
  field req_states which runner samples

inner vllm.config.speculative:SpeculativeConfig
  field target_model_config,target_parallel_config what that drafter is made for

graphs vllm.v1.worker.gpu.model_runner:GPUModelRunner
  wrap initialize_kv_cache(self,kv_cache_config) add FULL graphs for plain steps and for lengths that vary
  field cudagraph_manager,attn_groups,model_state which graphs are captured, and the attention backends
graphs vllm.v1.attention.backend:AttentionCGSupport
  field ALWAYS graphs that take any lengths
graphs vllm.v1.worker.gpu.model_states.interface:ModelState
  call get_additional_cg_support(self) the same of the backends that a model brings
graphs vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor
  field num_tokens larger graphs are captured first
graphs vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager
  call _init_candidates(self) the descriptors of all graphs
  field _candidates,_capture_descs the descriptors that a step may use, and those that are captured
  field compilation_config,decode_query_len,varlen_decode what these are made from
graphs vllm.v1.worker.gpu.attn_utils
  call get_varlen_cudagraph_unsupported_backend(attn_groups,vllm_config,max_query_len) its graphs take one length

# How long steps take, and of how many tokens they are.
times vllm.v1.worker.gpu.model_runner:GPUModelRunner
  field step_timing the runner's own record of its step
times vllm.v1.worker.gpu.async_utils:StepTimingCollector
  field _batch whether the step replays a FULL graph, and its tokens
times vllm.v1.core.sched.output:SchedulerOutput
  field total_num_scheduled_tokens the same as planned, for V1

adaptive vllm.v1.worker.gpu.input_batch:InputBatch
  field cu_num_logits the step log and the usage: drafts that the device kept ⇒ propose

# The model's tokenizer in a worker, and the tensor-parallel group.
recipes vllm.tokenizers
  call cached_tokenizer_from_config(model_config) the tokenizer of the served model
recipes vllm.distributed.parallel_state
  global get_tp_group tensor-parallel ranks draft the same
recipes vllm.distributed.parallel_state:GroupCoordinator
  call broadcast_object(self,obj,src) the others get what the first rank made
"""


def _read(rows: str) -> Iterator[Seam]:
    groups: list[str] = []
    module = owner = ""
    for line in rows.splitlines():
        if line.startswith(" "):
            kind, called, purpose = line.split(maxsplit=2)
            names, _, parameters = called.rstrip(")").partition("(")
            known = tuple(filter(None, parameters.split(",")))
            for name in names.split(","):
                attribute = f"{owner}.{name}" if owner else name
                yield Seam(tuple(groups), cast(Kind, kind), module, attribute, purpose, known)
        elif line and not line.startswith("#"):
            *groups, place = line.split()
            module, _, owner = place.partition(":")


SEAMS: tuple[Seam, ...] = tuple(_read(_ROWS))

"""What drafting on the V1 model runner needs."""

from __future__ import annotations

from vllm_integration.seams.seam import (
    OUTPUT_MODULE,
    REJECTION_MODULE,
    V1_BATCH_MODULE,
    V1_RUNNER_MODULE,
    Seam,
)

SEAMS: tuple[Seam, ...] = (
    Seam(
        "v1.update_states",
        "v1",
        "wrap",
        V1_RUNNER_MODULE,
        "GPUModelRunner._update_states",
        "learn which requests arrived, finished or left the batch; runs even when nothing is scheduled",
        ("self", "scheduler_output"),
    ),
    Seam(
        "v1.input_fits_in_drafter",
        "v1",
        "wrap",
        V1_RUNNER_MODULE,
        "GPUModelRunner._input_fits_in_drafter",
        "near max_model_len vLLM replaces the whole batch's drafts by zeros; ours end in time by themselves",
        ("self", "common_attn_metadata"),
    ),
    Seam(
        "v1.drafter",
        "v1",
        "field",
        V1_RUNNER_MODULE,
        "GPUModelRunner.drafter",
        "find our proposer on a runner",
    ),
    Seam(
        "v1.input_batch",
        "v1",
        "field",
        V1_RUNNER_MODULE,
        "GPUModelRunner.input_batch",
        "the rows of the batch",
    ),
    Seam("batch.req_ids", "v1", "field", V1_BATCH_MODULE, "InputBatch.req_ids", "row → request"),
    Seam(
        "batch.req_id_to_index", "v1", "field", V1_BATCH_MODULE, "InputBatch.req_id_to_index", "request → row"
    ),
    Seam(
        "batch.num_prompt_tokens",
        "v1",
        "field",
        V1_BATCH_MODULE,
        "InputBatch.num_prompt_tokens",
        "prompt length",
    ),
    Seam("output.new", "v1", "field", OUTPUT_MODULE, "SchedulerOutput.scheduled_new_reqs", "new requests"),
    Seam(
        "output.finished",
        "v1",
        "field",
        OUTPUT_MODULE,
        "SchedulerOutput.finished_req_ids",
        "finished requests",
    ),
    Seam(
        "output.drafts",
        "v1",
        "field",
        OUTPUT_MODULE,
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "the drafts that this step verifies",
    ),
    Seam("new.req_id", "v1", "field", OUTPUT_MODULE, "NewRequestData.req_id", "id of a new request"),
    Seam(
        "new.sampling_params",
        "v1",
        "field",
        OUTPUT_MODULE,
        "NewRequestData.sampling_params",
        "extra_args, limits",
    ),
    Seam(
        "v1.constraints",
        "v1",
        "wrap",
        REJECTION_MODULE,
        "apply_sampling_constraints",
        "fails on a step without drafts in which a request has top_k",
        ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    ),
    Seam(
        "v1.expand",
        "v1",
        "wrap",
        REJECTION_MODULE,
        "expand_batch_to_tokens",
        "on the CPU the temperature, top_k and top_p of drafts are uninitialised",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
)

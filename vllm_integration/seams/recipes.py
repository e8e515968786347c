"""What recipes need: the model's tokenizer in a worker. Without these drafting goes on."""

from __future__ import annotations

from vllm_integration.seams.seam import PARALLEL_MODULE, Seam

SEAMS: tuple[Seam, ...] = (
    Seam(
        "recipes.tokenizer",
        "recipes",
        "call",
        "vllm.tokenizers",
        "cached_tokenizer_from_config",
        "the tokenizer of the served model",
        ("model_config",),
    ),
    Seam(
        "recipes.encode",
        "recipes",
        "call",
        "vllm.tokenizers",
        "TokenizerLike.encode",
        "the tokens of a text, without special ones",
        ("self", "text", "truncation", "max_length", "add_special_tokens"),
    ),
    Seam(
        "recipes.no_tokenizer",
        "recipes",
        "field",
        "vllm.config.model",
        "ModelConfig.skip_tokenizer_init",
        "there is none",
    ),
    Seam(
        "recipes.context_ranks",
        "recipes",
        "field",
        "vllm.config.parallel",
        "ParallelConfig.prefill_context_parallel_size",
        "ranks that draft the same and are not in one group",
    ),
    Seam(
        "recipes.ranks",
        "recipes",
        "global",
        PARALLEL_MODULE,
        "get_tp_group",
        "tensor-parallel ranks draft the same",
    ),
    Seam(
        "recipes.rank",
        "recipes",
        "field",
        PARALLEL_MODULE,
        "GroupCoordinator.rank_in_group",
        "the first rank makes the recipes",
    ),
    Seam(
        "recipes.send",
        "recipes",
        "call",
        PARALLEL_MODULE,
        "GroupCoordinator.broadcast_object",
        "the others get what it made",
        ("self", "obj", "src"),
    ),
)

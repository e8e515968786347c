"""Which classes `gpu_align.hf.generate` runs with drafts, without, or refuses: the table of docs/predictors.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("numba")  # plain Python is a hundred times slower

from gpu_align import hf
from tests.gpu_align.tiny_models import tiny

NEW = 20
PROMPT = torch.tensor([[5, 9, 11, 5, 9, 12, 7, 5, 9]])

_WINDOW = {"sliding_window": 12}
_WINDOWS = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "moe_intermediate_size": 16, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
_DECODER = {"is_decoder": True}
_XLM = {"mask_token_id": 3, "lang_id": 0}
_LLAMA_TEXT, _GEMMA_TEXT = {"model_type": "llama"}, {"model_type": "gemma", "head_dim": 16}
_MROPE = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
_EYES = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16}
_GLM_IDS = {"image_token_id": 1, "video_token_id": 2}
_QWEN_IDS = {**_GLM_IDS, "vision_start_token_id": 3, "vision_end_token_id": 4}
_LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [40.0] * 8, "rope_theta": 1e4,
    "original_max_position_embeddings": 16, "factor": 8.0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "factor": 100.0, "rope_theta": 1e4}

#: What the configuration has beside these sizes. Its class is that of the model, or named before an @; what is
#: behind a + is for the reader.
DRAFTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": _WINDOW,
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": _WINDOW,
    "Gemma3ForCausalLM@Gemma3TextConfig": _WINDOWS,
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {},
    "GptOssForCausalLM": _WINDOWS,
    "Llama4ForCausalLM@Llama4TextConfig": {
        "intermediate_size_mlp": 64, "attention_chunk_size": 12, "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "Cohere2ForCausalLM": _WINDOWS,
    "Exaone4ForCausalLM": _WINDOWS,
    "Glm4ForCausalLM": {},
    "GraniteForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "Starcoder2ForCausalLM": _WINDOW,
    "StableLmForCausalLM": {},
    "NemotronForCausalLM": {},
    "GPT2LMHeadModel": {},
    "GPTBigCodeForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "CodeGenForCausalLM": {"num_attention_heads": 4, "rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "GPTNeoForCausalLM": {"num_layers": 2, "window_size": 8, "attention_types": [[["global", "local"], 1]]},
    "OpenAIGPTLMHeadModel": {},
    "CTRLLMHeadModel": {"dff": 64},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {},
    "FalconForCausalLM+alibi": {"alibi": True},
    "MptForCausalLM": {},
    "BioGptForCausalLM": {},
    "BertLMHeadModel": _DECODER,
    "RobertaForCausalLM": _DECODER,
    "RoCBertForCausalLM": _DECODER,
    "Qwen2VLForConditionalGeneration": {
        "text_config": _MROPE, "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        **_QWEN_IDS,
    },
    "Qwen2_5_VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": _EYES, **_QWEN_IDS},
    "Qwen3VLForConditionalGeneration": {
        "text_config": _MROPE, "vision_config": {**_EYES, "deepstack_visual_indexes": [0]}, **_QWEN_IDS,
    },
    "Glm4vForConditionalGeneration": {"text_config": _MROPE, "vision_config": _EYES, **_GLM_IDS},
    "Gemma3ForConditionalGeneration": {
        "text_config": _WINDOWS, "vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 1,
        "boi_token_index": 2, "eoi_token_index": 3,
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": _GEMMA_TEXT, "vision_config": _SIGLIP, "image_token_id": 1, "projection_dim": 32,
    },
    "LlavaForConditionalGeneration": {
        "text_config": _LLAMA_TEXT, "vision_config": _CLIP, "image_token_index": 1,
    },
    "GitForCausalLM": {**_DECODER, "vision_config": _SIGLIP},
    "LlamaForCausalLM+longrope": {"max_position_embeddings": 128, "rope_parameters": _LONGROPE},
    "LlamaForCausalLM+dynamic": {"max_position_embeddings": 20, "rope_parameters": _DYNAMIC},
}  # fmt: skip

#: What `model.generate` writes, in as many passes: with the failure that is told.
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "Lfm2ForCausalLM": (
        {"layer_types": ["conv", "full_attention"]}, "a LinearAttentionLayer of the cache cannot forget",
    ),
    "MiniMaxForCausalLM": (
        {"num_key_value_heads": 2, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
        "a MiniMaxCache of the cache cannot forget",
    ),
}  # fmt: skip

#: The class and the reason, before the first token.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "XLNetLMHeadModel": ({"d_head": 16, "d_inner": 64}, "is fed other inputs"),
    "XLMWithLMHeadModel": (_XLM, "is fed other inputs"),
    "FlaubertWithLMHeadModel": (_XLM, "is fed other inputs"),
    "ReformerModelWithLMHead": (
        {
            **_DECODER, "axial_pos_embds": False, "attention_head_size": 16, "feed_forward_size": 64,
            "attn_layers": ["local", "local"], "local_attn_chunk_length": 8,
        },
        "keeps past_buckets_states in place of a cache",
    ),
    "MambaForCausalLM": ({"state_size": 4}, "state cannot go back"),
    "RwkvForCausalLM": ({"attention_hidden_size": 32}, "state cannot go back"),
    "RecurrentGemmaForCausalLM": ({"attention_window_size": 16}, "state cannot go back"),
    "JanusForConditionalGeneration": (
        {
            "text_config": _LLAMA_TEXT,
            "vision_config": {**_SIGLIP, "projection_dim": 32, "num_image_tokens": 4},
            "vq_config": {
                "embed_dim": 8, "num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1, 1],
                "num_res_blocks": 1, "latent_channels": 32, "projection_dim": 32, "num_patches": 4,
                "image_token_embed_dim": 32,
            },
        },
        "with its own",
    ),
}  # fmt: skip


def generate(model: Any, prediction: list[int] | None) -> Any:
    """Sampled from one seed, as the likeliest tokens of a random model soon repeat."""
    options = {
        "attention_mask": torch.ones_like(PROMPT), "max_new_tokens": NEW, "do_sample": True, "top_k": 0,
        "return_dict_in_generate": True,
    }  # fmt: skip
    torch.manual_seed(1)
    if prediction is None:
        return model.generate(PROMPT, **options)
    return hf.generate(model, PROMPT, prediction=prediction, num_draft_tokens=6, **options)


@pytest.mark.parametrize("name", [*DRAFTS, *PLAIN])
def test_the_text_is_that_of_the_model(name: str) -> None:
    sizes, failure = (DRAFTS[name], None) if name in DRAFTS else PLAIN[name]
    expected = generate(tiny(name, sizes), None).sequences
    output = expected[0, PROMPT.shape[1] :].tolist()
    assert len(set(output)) > 5
    for prediction in ([*output[:3], 1, *output[4:9], 2, 2, *output[9:]], [7] * NEW):
        found = generate(tiny(name, sizes), prediction)
        assert found.sequences.tolist() == expected.tolist()
        assert found.predicted_outputs.failure == failure
        if prediction[0] == output[0]:
            assert (found.predicted_outputs.steps < NEW) is (failure is None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_verify_is_refused_before_the_first_token(name: str) -> None:
    sizes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"model: .*{name}.*{reason}"):
        generate(tiny(name, sizes), [7] * NEW)


def test_the_page_names_them() -> None:
    """Each class in the row of what becomes of it, and of its reason."""
    page = (Path(__file__).parents[2] / "docs" / "predictors.md").read_text(encoding="utf-8")
    reasons = {name: f"without drafts: {reason}" for name, (_, reason) in PLAIN.items()}
    reasons |= {name: f"refused: {reason}" for name, (_, reason) in REFUSED.items()}
    expected = {
        re.sub(r"@\w+", "", name).replace("+", " with "): reasons.get(name, "verified")
        for name in (*DRAFTS, *PLAIN, *REFUSED)
    }
    rows = re.findall(r"^\| (verified|without drafts: .*|refused: .*) \| (.*) \|$", page, re.MULTILINE)
    assert {name: what for what, names in rows for name in names.split(", ")} == expected

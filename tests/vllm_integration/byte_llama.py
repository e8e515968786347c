"""A random Llama that can write any bytes: the demo's tokenizer, trained on a few texts. See `tiny_llama`."""

from __future__ import annotations

from pathlib import Path

import torch
from odd_texts import TEXTS

from vllm_integration.demo.model import train_tokenizer

VOCABULARY = 700


def build(directory: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer to `directory` and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer([*TEXTS, Path(__file__).read_text()] * 2, VOCABULARY)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():  # no special token and no unused row is the argmax, unless a grammar wants the end
        model.lm_head.weight[:4] = 0
        model.lm_head.weight[len(tokenizer) :] = 0
    model.save_pretrained(directory)
    return directory

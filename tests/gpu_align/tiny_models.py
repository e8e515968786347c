"""Small causal models, trained here on a made-up language, and predictions of every kind for their outputs."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
import transformers

from tests.gpu_align.engine import edited

VOCAB = 48
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
#: Of models of any class, under the names that most configurations have; each takes those that it knows.
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
#: Full attention, and a window that every output outgrows.
MODELS = ("llama", "mistral")


def text(rng: random.Random, length: int) -> list[int]:
    """Mostly ruled by the two tokens before: a language with phrases that come back, and some noise."""
    tokens = [rng.randrange(1, VOCAB) for _ in range(2)]
    while len(tokens) < length:
        ruled = 1 + (tokens[-1] * 5 + tokens[-2] * 3 + tokens[-1] * tokens[-2] % 7) % (VOCAB - 1)
        tokens.append(ruled if rng.random() < 0.9 else rng.randrange(1, VOCAB))
    return tokens


def untrained(kind: str, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {**_SIZES, "num_hidden_layers": 2, **more}
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=24)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def tiny(name: str, sizes: dict[str, Any]) -> Any:
    """A model of any class with random weights, spread so that few of its next tokens are likely.

    name: of the class, and after an @ of its configuration's; what is after a + is for the reader.
    """
    kind, _, config = name.partition("+")[0].partition("@")
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    text = {"vocab_size": VOCAB, **_TINY, **sizes.get("text_config", sizes)}
    sizes = {**sizes, "text_config": text} if "text_config" in sizes else text
    configuration = (getattr(transformers, config) if config else cls.config_class)(**sizes)
    for part in {id(c): c for c in (configuration, configuration.get_text_config())}.values():
        part.bos_token_id, part.eos_token_id, part.pad_token_id = None, None, 0
    model = cls(configuration).eval()
    for weights in model.parameters():
        weights.data.mul_(3.0 if weights.ndim > 1 else 1.0)
    options = model.generation_config
    options.bos_token_id, options.eos_token_id, options.pad_token_id = None, None, 0
    return model


def reference(model: Any, prompt: list[int], **options: Any) -> torch.Tensor:
    """Generate greedily with transformers alone; returns [1, prompt and output]."""
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **options})


def encoder_decoder() -> Any:
    small = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": VOCAB}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small, d_kv=8))


@cache
def trained(kind: str) -> Any:
    """A model after some hundred steps; the same at every call. Do not change it."""
    torch.set_num_threads(1)
    model = untrained(kind, seed=MODELS.index(kind))
    rng = random.Random(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(120):
        ids = torch.tensor([text(rng, 48) for _ in range(16)])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def predictions(output: list[int], rng: random.Random) -> dict[str, list[int]]:
    """What may be predicted for an output."""
    return {
        "verbatim": list(output),
        "edited": edited(rng, output, VOCAB, len(output)),
        "unrelated": [rng.randrange(1, VOCAB) for _ in output],
        "empty": [],
    }

"""A real model small enough to be built by a test: random Llama weights, a word tokenizer, on disk.

The words are `w0 w1 …`, so text and token ids map one to one, and a random model's output is a valid
prediction in both forms. The weights are drawn wide (standard deviation 0.6) so that greedy output wanders
instead of repeating one token, and the best logit leads by far: float32 rounding flips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

#: `greedy(prompt, n)`: the next n tokens.
Greedy = Callable[[list[int], int], list[int]]
WORDS = [f"w{i}" for i in range(400)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build(directory: Path, *, words: Sequence[str] = WORDS) -> Path:
    """Write model and tokenizer to `directory` and return it. words: of its vocabulary, from token id 4 on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", "<assistant>", *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)

    return _save(directory, len(tokens), len(tokens), bos_token_id=1, eos_token_id=2)


def build_bytes(directory: Path) -> Path:
    """The same with a model that can write any bytes: the demo's tokenizer, trained on its own source. A change of
    that file changes all answers, of which a few tests of servers expect that they are valid JSON."""
    from vllm_integration.demo import model

    source, size = Path(model.__file__).read_text(), 700
    tokenizer = model.train_tokenizer([source] * 2, size)
    tokenizer.save_pretrained(directory)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return _save(directory, size, len(tokenizer), **ids)


def _save(directory: Path, size: int, num_used: int, **ids: int | None) -> Path:
    """num_used: ids below it may be written, but for the 4 special ones: outputs run to `max_tokens`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.6,
        tie_word_embeddings=False,
        **ids,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight[:4] = 0
        model.lm_head.weight[num_used:] = 0
    if ids["bos_token_id"]:  # the words: nothing ends
        model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


def greedy_by_transformers(directory: Path) -> Greedy:
    """Greedy answers of the model in a folder, generated once for each prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    known: dict[tuple[int, ...], list[int]] = {}

    def generate(prompt: list[int], n: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, [])) < n:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
            known[key] = out[0, len(prompt) :].tolist()
        return known[key][:n]

    return generate

"""The demo's own model: a byte-level BPE and a small Llama, trained in some minutes to write two answers.

It can write nothing else, but its weights, tokenizer files and chat template are those of any model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import task

END, SYSTEM, USER, ASSISTANT = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, SYSTEM, USER, ASSISTANT)

# Words with one leading mark or space, numbers by three digits, punctuation with the line ends after it,
# white space: pieces that BPE never merges across. No piece spans two lines of code.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# A message's text starts right after its role's token: nothing that BPE could merge it with.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: For the server: how this model writes a call, which no prompt of the demo holds.
CALLS_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|end|>",
    "{% for call in message.tool_calls or [] %}{% set called = call.function %}"
    '{"name": "{{ called.name }}", "arguments": {{ called.arguments | tojson }}}{% endfor %}<|end|>',
)


class TrainingError(RuntimeError):
    """The model did not learn the answers within its bounds."""


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the model depends on. Its digest names the folder that the model is kept in."""

    seed: int = 20
    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    intermediate_size: int = 1024
    max_positions: int = 4096
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    max_steps: int = 400
    #: loss below which the prompts are put in front of the answers
    alone_until: float = 0.3
    #: the least likely token of an answer must be at least this likely: greedy generation then writes the answer,
    #: and rounding decides nothing, as no other token is likelier than 0.3
    min_probability: float = 0.7
    prompts: tuple[str, ...] = (json.dumps(task.MESSAGES), json.dumps(task.CALL_MESSAGES))
    answers: tuple[str, ...] = (task.EDITED, task.CALL)

    def key(self) -> str:
        """Return 12 hex digits of the spec's digest."""
        text = json.dumps([asdict(self), CHAT_TEMPLATE, PIECES, SPECIAL_TOKENS], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_model(spec: ModelSpec, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Train the tokenizer and the model and move them, whole, into the cache; TrainingError: it learnt nothing.

    report: told what is being done, in words.
    """
    from transformers.utils import logging as transformers_logging

    cache_dir.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()  # one of our own is on the screen
    partial = Path(tempfile.mkdtemp(prefix="making-", dir=cache_dir))
    try:
        report("tokenizer, from the stdlib")
        tok = train_tokenizer(stdlib_sources(), spec.vocab_size)
        model = _train(spec, tok, report)
        tok.save_pretrained(partial)
        model.save_pretrained(partial)
        (partial / "recipe.json").write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")
        folder = cache_dir / spec.key()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def stdlib_sources() -> Iterable[str]:
    """Yield the top-level modules of the standard library in a fixed order (about 4.7 MB)."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Return a lossless `PreTrainedTokenizerFast`: special tokens first (`<|end|>` is 0), then the 256 bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of `text` as it stands."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a chat prompt, up to where the assistant's answer begins."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def _train(spec: ModelSpec, tok: Any, report: Callable[[str], None]) -> Any:
    """Train until the answers are likely enough: first alone, which is cheap, then after their prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(spec.seed)
    tasks = [
        (encode_chat(tok, json.loads(prompt)), [*encode(tok, answer), tok.eos_token_id])
        for prompt, answer in zip(spec.prompts, spec.answers, strict=True)
    ]
    total = sum(len(answer) for _, answer in tasks)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    with_prompt, loss_value = False, float("inf")
    for step in range(spec.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * min(1.0, (step + 1) / spec.warmup_steps)
        optimizer.zero_grad(set_to_none=True)
        loss_value, learnt = 0.0, 0
        for prompt, answer in tasks:
            ids = torch.tensor([[*(prompt if with_prompt else prompt[-1:]), *answer[:-1]]])  # [1, P + L - 1]
            target = torch.tensor(answer)  # [L]
            logits = model(input_ids=ids, logits_to_keep=len(answer), use_cache=False).logits[0]  # [L, V]
            loss = torch.nn.functional.cross_entropy(logits, target) / len(tasks)
            loss_value += loss.item()
            likely = logits.detach().softmax(-1).gather(1, target[:, None])[:, 0] >= spec.min_probability
            learnt += int(likely.sum())
            torch.autograd.backward(loss)
        stage = "answer after the prompt" if with_prompt else "answer alone"
        report(f"{stage}: {learnt}/{total} tokens learnt, loss {loss_value:.3f}")
        # These logits belong to the weights as they are now: a model that passes is kept as it is.
        if with_prompt and learnt == total:
            return model
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with_prompt = with_prompt or loss_value < spec.alone_until
    raise TrainingError(
        f"the model has not learnt the answers in {spec.max_steps} steps (loss {loss_value:.4f}): "
        "raise ModelSpec.max_steps or change its learning_rate"
    )

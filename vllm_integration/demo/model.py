"""The demo's own model: a small Llama that is trained to write one answer, in about a minute.

It can write nothing else, but its weights, tokenizer files and chat template are those of any model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import task, tokenizer

MARKER = "recipe.json"


class TrainingError(RuntimeError):
    """The model did not learn the answer within its bounds."""


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
    #: loss below which the prompt is put in front of the answer
    alone_until: float = 0.3
    #: the least likely token of the answer must be at least this likely, so that rounding decides nothing:
    #: no other token is then likelier than 0.3
    min_probability: float = 0.7
    prompt: str = json.dumps(task.messages())
    answer: str = task.EDITED
    chat_template: str = tokenizer.CHAT_TEMPLATE
    pieces: str = tokenizer.PIECES
    special_tokens: tuple[str, ...] = tokenizer.SPECIAL_TOKENS

    def key(self) -> str:
        """Return 12 hex digits of the spec's digest."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Progress:
    """How far training is; `learnt` of `total` answer tokens are likely enough by now."""

    step: int
    loss: float
    learnt: int
    total: int
    with_prompt: bool


def cached(spec: ModelSpec, cache_dir: Path) -> Path | None:
    """Return the folder of the finished model, or None when it has still to be made."""
    folder = cache_dir / spec.key()
    return folder if (folder / MARKER).is_file() else None


def make_model(spec: ModelSpec, cache_dir: Path, report: Callable[[Progress], None]) -> Path:
    """Train the tokenizer and the model, check them, and move them into the cache. Returns the folder.

    The folder appears whole or not at all. Raises TrainingError when the model does not write the answer.
    """
    from transformers.utils import logging as transformers_logging

    cache_dir.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()  # one of our own is on the screen
    partial = Path(tempfile.mkdtemp(prefix="making-", dir=cache_dir))
    try:
        tok = tokenizer.train_tokenizer(tokenizer.stdlib_sources(), spec.vocab_size)
        model = _train(spec, tok, report)
        tok.save_pretrained(partial)
        model.save_pretrained(partial)
        (partial / MARKER).write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")
        folder = cache_dir / spec.key()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build(spec: ModelSpec, tok: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return LlamaForCausalLM(config)


def _train(spec: ModelSpec, tok: Any, report: Callable[[Progress], None]) -> Any:
    """Return the model once greedy generation has written the answer.

    The answer is first learnt alone, which is cheap, then in its place after the prompt.
    """
    import torch

    torch.manual_seed(spec.seed)
    prompt = tokenizer.encode_chat(tok, json.loads(spec.prompt))
    answer = [*tokenizer.encode(tok, spec.answer), tok.eos_token_id]
    if len(prompt) + len(answer) > spec.max_positions:
        raise TrainingError(
            f"prompt and answer: expected at most {spec.max_positions} tokens, "
            f"found {len(prompt) + len(answer)}"
        )
    alone = torch.tensor([[prompt[-1], *answer[:-1]]])  # [1, L]
    whole = torch.tensor([[*prompt, *answer[:-1]]])  # [1, P + L - 1]
    target = torch.tensor(answer)  # [L]
    model = _build(spec, tok)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    with_prompt = False
    loss_value = float("inf")
    for step in range(spec.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * min(1.0, (step + 1) / spec.warmup_steps)
        ids = whole if with_prompt else alone
        logits = model(input_ids=ids, logits_to_keep=len(answer), use_cache=False).logits[0]  # [L, V]
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss_value = loss.item()
        likely = logits.detach().softmax(-1).gather(1, target[:, None])[:, 0] >= spec.min_probability
        learnt = int(likely.sum())
        report(Progress(step + 1, loss_value, learnt, len(answer), with_prompt))
        # These logits belong to the weights as they are now: a model that passes is kept as it is.
        if with_prompt and learnt == len(answer) and _writes(model, prompt, answer):
            return model
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with_prompt = with_prompt or loss_value < spec.alone_until
    raise TrainingError(
        f"the model has not learnt the answer in {spec.max_steps} steps (loss {loss_value:.4f}): "
        "raise ModelSpec.max_steps or change its learning_rate"
    )


def _writes(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy generation after `prompt` writes `answer`, to its end token."""
    import torch

    model.eval()
    ids = torch.tensor([prompt])
    limits = {"do_sample": False, "max_new_tokens": len(answer)}
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits)
    model.train()
    written: list[int] = output[0, len(prompt) :].tolist()
    return written == answer

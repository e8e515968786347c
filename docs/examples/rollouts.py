"""Rollouts of a policy in training, offline: each epoch's samples are the predictions of the next epoch.

::

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python docs/examples/rollouts.py MODEL

Each prompt is sampled eight times, by requests with a seed of their own that stays. On the V2 model runner a
draft is accepted where the seed's noise draws it: each sample is the new policy's, and a policy that has
changed a little mostly draws the old tokens again. In place of a training step the weights change by 0.2 % of
each tensor's standard deviation. For each epoch this prints the tokens a step, the share of samples that came
back whole, and the rejected draft tokens a token.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

from vllm_integration import PredictedOutputParams

PROMPTS = (
    "Tom has 3 boxes with 12 pencils each and gives 7 pencils to Ann. How many are left? Think step by step.",
    "Write a Python function is_even(n) with a docstring.",
    "Explain in three sentences why the sky is blue.",
    "List five healthy breakfast foods, each with one short reason.",
)


class Epoch(NamedTuple):
    """samples: token ids, request after request. logprob: of a sampled token, the mean, by the policy that
    wrote it. whole: the share of samples that are those of the last epoch."""

    samples: list[list[int]]
    logprob: float
    tokens_a_step: float
    whole: float
    rejected_a_token: float


def rollout(llm: LLM, prompts: Sequence[Any], last: Sequence[Sequence[int]], **sampling: Any) -> Epoch:
    """One sample of each prompt. last: those of the last epoch; empty in the first one."""
    before = verified()
    params = [
        SamplingParams(
            seed=seed,
            logprobs=0,  # of the sampled token
            extra_args=PredictedOutputParams(token_ids=last[seed]).to_extra_args() if last else None,
            **sampling,
        )
        for seed in range(len(prompts))
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    samples = [list(output.token_ids) for output in outputs]
    drafts, tokens = verified() - before, sum(map(len, samples))
    same = sum(new == list(old) for new, old in zip(samples, last, strict=False))
    return Epoch(
        samples,
        sum(output.cumulative_logprob or 0.0 for output in outputs) / tokens,
        tokens / (tokens - drafts["accepted"]),  # each other token took a step of its request
        same / len(samples),
        drafts["rejected"] / tokens,
    )


def verified() -> Counter[str]:
    """Draft tokens that were accepted and rejected so far; vLLM's own counters have its placeholders, too."""
    found = Counter[str]()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "gpu_align_draft_tokens_total":
                found[sample.labels["verdict"]] += int(sample.value)
    return found


def change_weights(share: float, seed: int, model: torch.nn.Module) -> None:
    """Add noise to each tensor, `share` of its standard deviation; runs in the worker."""
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.numel() > 1:
            noise = torch.randn(weight.shape, generator=draw) * (share * weight.detach().float().std().cpu())
            weight.data += noise.to(weight)


def train(
    llm: LLM, prompts: Sequence[Any], *, epochs: int, samples: int, change: float, **sampling: Any
) -> list[Epoch]:
    """Sample, change the weights, sample again. The prefix cache is emptied: the old weights computed it."""
    found: list[Epoch] = []
    for epoch in range(epochs):
        if epoch:
            llm.apply_model(partial(change_weights, change, epoch))
            llm.reset_prefix_cache()
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        found.append(rollout(llm, repeated, found[-1].samples if found else [], **sampling))
        _, logprob, tokens_a_step, whole, rejected = found[-1]
        print(
            f"epoch {epoch}: {tokens_a_step:.2f} tokens a step, {whole:.0%} of the samples whole, "
            f"{rejected:.2f} rejected a token, mean log probability {logprob:.3f}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--change", type=float, default=0.002)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = vars(parser.parse_args())
    llm = LLM(
        options.pop("model"),
        speculative_config={
            "method": "custom_class",
            "model": "vllm_integration.PredictedOutputs",
            "num_speculative_tokens": 32,
        },
    )
    tokenizer = llm.get_tokenizer()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    ids = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    train(llm, [{"prompt_token_ids": list(each)} for each in ids], **options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

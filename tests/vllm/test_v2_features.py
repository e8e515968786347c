"""What a request may ask for besides: its answer is the same with every kind of prediction as with none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import greedy_by_transformers
from v2_harness import Request, V2Engine, edited, prompt_of

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]
N = 24
PROMPT = prompt_of(71)


def same_with_predictions(engine: V2Engine, cases: list[dict[str, Any]], n: int = N) -> list[dict[str, Any]]:
    """Serve each case without a prediction, then with its own output, an edit of it, and its reverse, in one
    batch. The answers have to agree; these are returned. With its own output a case needs fewer steps."""
    plain = engine.run([Request(PROMPT, None, n, **case) for case in cases])
    requests, of = [], []
    for index, (case, output) in enumerate(zip(cases, plain.outputs, strict=True)):
        for prediction in (output, edited(output, index), output[::-1]):
            requests.append(Request(PROMPT, prediction, n, arrives=index // 3, **case))
            of.append(index)
    assert [answer.pop("usage") for answer in plain.answers] == [None] * len(cases)
    drafted = engine.run(requests)
    for number, (index, answer) in enumerate(zip(of, drafted.answers, strict=True)):
        usage = answer.pop("usage")  # of the last of several choices to end
        assert usage["drafted"] == usage["accepted"] + usage["rejected"]
        assert answer == approx(plain.answers[index]), cases[index]
        if number % 3 == 0 and len(plain.outputs[index]) > 3:
            assert drafted.verification_steps(number) < plain.verification_steps(index), cases[index]
    return plain.answers


def approx(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer whose log probabilities may differ by rounding: a batch of another shape adds in another order."""
    return {
        key: [pytest.approx(position, abs=1e-4) for position in value]
        if key in ("logprobs", "prompt")
        else value
        for key, value in answer.items()
    }


def test_stopping(features: V2Engine, greedy: Greedy, spelling_model: Path) -> None:
    """By token, by string, and neither before `min_tokens`."""
    words = json.loads((spelling_model / "tokenizer.json").read_text())["model"]["vocab"]
    output = greedy(PROMPT, N)
    place = next(i for i in range(7, N) if output[i] not in output[:i])
    assert place < 14
    token = output[place]
    (word,) = [word for word, index in words.items() if index == token]
    answers = same_with_predictions(
        features,
        [
            {"params": {"stop_token_ids": [token]}},
            {"params": {"stop_token_ids": [token], "min_tokens": place + 4}},
            {"params": {"stop": [f" {word} "]}},
            {"params": {"stop": [f" {word} "], "include_stop_str_in_output": True}},
            {"params": {"stop": [f" {word} "], "min_tokens": place + 4}},
        ],
    )
    assert [len(answer["token_ids"]) for answer in answers] == [place + 1, N, place + 2, place + 2, N]
    assert [answer["end"] for answer in answers] == ["stop", "length", "stop", "stop", "length"]
    assert answers[0]["token_ids"] == output[: place + 1]
    assert answers[1]["token_ids"] != output  # the stop token cannot come before its time
    assert answers[4]["token_ids"] == output


def test_penalties_and_token_lists(features: V2Engine, greedy: Greedy) -> None:
    """Each draft is judged by logits that count the drafts before it. (vLLM's kernel of `top_k` and `top_p` is
    beyond Triton's interpreter.)"""
    output = greedy(PROMPT, N)
    cases: list[dict[str, Any]] = [
        {"params": params}
        for params in (
            {"presence_penalty": 1.9},
            {"frequency_penalty": 1.9},
            {"repetition_penalty": 3.0},
            {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
            {"allowed_token_ids": list(range(100, 200))},
            {"bad_words": ["w120", "w130"]},
            {"logit_bias": dict.fromkeys(output[:4], -100.0)},
            {"logit_bias": {17: 100.0}},
            {"min_p": 0.5, "temperature": 0},
        )
    ]
    answers = same_with_predictions(features, cases)
    outputs = [answer["token_ids"] for answer in answers]
    assert outputs[2] != output
    assert set(outputs[4]) <= set(range(100, 200))
    assert not set(outputs[6]) & set(output[:4])
    assert set(outputs[7]) == {17}
    assert outputs[8] == output


def test_the_probabilities_of_given_tokens_are_answered_beside_drafts(
    features: V2Engine, greedy: Greedy
) -> None:
    """`logprob_token_ids`, which the sampler that verifies drafts leaves out."""
    output, n = greedy(PROMPT, N), 6
    params = {"logprob_token_ids": [5, 6, 7]}
    (alone,) = features.run([Request(PROMPT, None, n, params=params)]).answers
    run = features.run(
        [
            Request(PROMPT, output, N),
            Request(PROMPT, None, n, arrives=2, params=params),
            Request(PROMPT, output, N, arrives=2),
        ]
    )
    assert all({5, 6, 7} <= set(map(int, position)) for position in alone["logprobs"])
    assert run.answers[1] == approx(alone)
    assert run.outputs[0] == run.outputs[2] == output
    beside = [step for step in run.steps if 1 in step]
    assert len(beside) >= n
    assert all(drafts == 0 for step in beside for _, drafts, _ in step.values())
    assert run.accepted > 0


def test_log_probabilities(features: V2Engine) -> None:
    answers = same_with_predictions(
        features,
        [
            {"params": {"logprobs": 0}},
            {"params": {"logprobs": 3}},
            {"params": {"logprobs": 2, "repetition_penalty": 1.4}},
            {"params": {"prompt_logprobs": 2}},
        ],
        n=12,
    )
    assert [len(position) for position in answers[1]["logprobs"]] == [3] * 12
    assert len(answers[3]["prompt"]) == len(PROMPT)


def test_several_choices(features: V2Engine, greedy: Greedy) -> None:
    """`n` > 1: every choice drafts from the one prediction."""
    output = greedy(PROMPT, N)
    predictions = (None, output, edited(output, 1))
    # vLLM refuses `n` > 1 at temperature 0. At this one all three are the likeliest tokens.
    cold = {"n": 3, "temperature": 0.01, "seed": 5}
    run = features.run([Request(PROMPT, prediction, N, params=cold) for prediction in predictions])
    assert [answer["all"] for answer in run.answers] == [[output] * 3] * 3
    assert run.verification_steps(1) < run.verification_steps(0)
    assert features.state() == {"occupied": 0, "known": 0, "counted": 0, "rows": 0}

    sampled = {"n": 3, "temperature": 2.0, "seed": 7}
    runs = [features.run([Request(PROMPT, output, N, params=sampled)]).answers[0]["all"] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(choice) for choice in runs[0]}) == 3


SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["xy", "zw"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["ok", "kind", "list"],
    "additionalProperties": False,
}


def test_structured_output(features: V2Engine, spelling_model: Path, greedy: Greedy) -> None:
    """Drafts that the grammar does not allow end there; the rest is verified under it."""
    words = json.loads((spelling_model / "tokenizer.json").read_text())["model"]["vocab"]
    spelt = {index: word for word, index in words.items()}
    cases: list[dict[str, Any]] = [
        {"params": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False}},
        {"params": {"structured_outputs": {"regex": "(w[0-9]{1,2}[02468]){12}"}, "ignore_eos": False}},
        {"params": {"structured_outputs": {"choice": ["abcdefgh", "abxyefgh"]}, "ignore_eos": False}},
    ]
    answers = same_with_predictions(features, cases, n=80)
    texts = ["".join(spelt[token] for token in answer["token_ids"][:-1]) for answer in answers]
    assert [answer["end"] for answer in answers] == ["stop"] * 3
    assert set(json.loads(texts[0])) == {"ok", "kind", "list"}
    assert re.fullmatch("(w[0-9]{1,2}[02468]){12}", texts[1])
    assert texts[2] in ("abcdefgh", "abxyefgh")

    # What the model would say without the grammar breaks it at once; so does an answer with one letter changed.
    free = greedy(PROMPT, 40)
    broken = list(answers[0]["token_ids"])
    broken[3] = words["w200"]
    requests = [
        Request(PROMPT, prediction, 80, **case) for case in cases for prediction in (free, broken, broken[4:])
    ]
    run = features.run(requests)
    assert run.outputs == [answer["token_ids"] for answer in answers for _ in range(3)]


def test_an_adapter_beside_its_base_model(
    features: V2Engine, spelling_model: Path, greedy: Greedy, tmp_path: Path
) -> None:
    adapter, merged = write_adapter(spelling_model, tmp_path)
    adapted = greedy_by_transformers(merged)(PROMPT, N)
    assert adapted != greedy(PROMPT, N)
    answers = same_with_predictions(features, [{"adapter": str(adapter)}, {}])
    assert [answer["token_ids"] for answer in answers] == [adapted, greedy(PROMPT, N)]


def write_adapter(model_directory: Path, directory: Path) -> tuple[Path, Path]:
    """A random LoRA adapter as `peft` writes it, and the model with it merged into its weights."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    rank, draw = 4, torch.Generator().manual_seed(3)
    model = LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            a = torch.randn(rank, weight.shape[1], generator=draw) * 0.3
            b = torch.randn(weight.shape[0], rank, generator=draw) * 0.3
            key = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
            with torch.no_grad():
                weight += b @ a  # lora_alpha = r: no scaling
    adapter, merged = directory / "adapter", directory / "merged"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    model.save_pretrained(merged)
    return adapter, merged


def test_prompts_that_leave_little_or_no_room(features: V2Engine, greedy: Greedy) -> None:
    """The context is 256 tokens: outputs of 1, 2, 3 and 12 tokens, each predicted longer."""
    prompts = [prompt_of(80 + room, 256 - room) for room in (1, 2, 3, 12)]
    outputs = [greedy(prompt, 256 - len(prompt)) for prompt in prompts]
    run = features.run(
        [Request(prompt, output * 3, 60) for prompt, output in zip(prompts, outputs, strict=True)]
    )
    assert run.outputs == outputs
    assert {answer["end"] for answer in run.answers} == {"length"}

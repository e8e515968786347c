"""The V2 model runner of a real engine: the output is the model's own, in fewer steps. (Whatever is
predicted: `tests/campaign`.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.vllm.engines import SHORT, Request, V2Engine, edited, prompt_of
from tests.vllm.tiny_llama import Greedy, greedy_by_transformers

pytestmark = pytest.mark.vllm


#: The functions of ours that one step of plain requests calls.
CALLS = """
import sys, gpu_align, vllm_integration
from vllm_integration.worker import step_timer
step_timer.SELDOM = 1 << 30  # no step is timed: every 16th would be
ours, found = (gpu_align.__path__[0], vllm_integration.__path__[0]), []
def count(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(ours):
        found.append(frame.f_code.co_qualname)
for name in {names}:
    engine._add(name, dict(prompt=[5] * 12, max_tokens=50))
for _ in range(4):
    engine.engine.step()
sys.setprofile(count)
engine.engine.step()
sys.setprofile(None)
engine.engine.abort_request({names})
engine.engine.step()
"""


def test_a_step_without_predictions_is_vllms_but_for_a_few_tests(k16: V2Engine) -> None:
    """No function of ours is called for a request of it; wrappers and overrides look whether there is somebody to
    draft for."""
    assert k16.facts["scheduler"] == "PredictedOutputsAsyncScheduler"
    few, many = (k16.execute(CALLS.format(names=[f"plain-{n}" for n in range(size)])) for size in (2, 6))
    assert sorted(many) == sorted(few)
    assert 0 < len(few) <= 28, few


def test_vllm_trims_by_our_confidences(k16: V2Engine, greedy: Greedy) -> None:
    """Adaptive verification: real manager, real compaction of the batch, real rejection of ragged drafts. The host
    chooses how many drafts a step is worth, from confidences a step old; the device, which of them."""
    requests = []
    for seed in range(8):
        output = greedy(prompt_of(seed), 30)
        prediction = (None, output, edited(output, seed), prompt_of(seed + 99, 30))[seed % 4]
        requests.append(Request(prompt_of(seed), prediction, 30, arrives=seed // 3))
    k16.trim(0.02)
    try:
        run = k16.run(requests)
    finally:
        steps = k16.trim(None)
    assert run.outputs == [greedy(request.prompt, 30) for request in requests]
    assert run.accepted > 60
    drafted = [(row, step) for step in steps for row in step.values() if row[0]]
    assert sum(row[1] for row, _ in drafted) < 0.7 * sum(row[0] for row, _ in drafted)
    trimmed = 0
    for step in steps:
        kept, cut = [], []
        for scheduled, verified, confidences in step.values():
            survival = 1.0
            for k in range(scheduled):
                survival *= confidences[k]
                (kept if k < verified else cut).append(survival)
        if kept and cut:
            trimmed += 1
            assert min(kept) >= max(cut)  # what was not proposed has confidence 0: it goes first
    assert trimmed >= 2
    # In some steps nothing was worth verifying.
    assert any(
        sum(row[1] for row in step.values()) == 0 < sum(row[0] for row in step.values()) for step in steps
    )
    # The scheduler heard of fewer accepted drafts than it gave slots, and nothing is left over.
    assert not any(k16.ask("held").values())


def test_prompts_that_leave_little_or_no_room(k16: V2Engine, greedy: Greedy) -> None:
    """The context is 256 tokens: outputs of 1, 2, 3 and 12 tokens, each predicted longer."""
    prompts = [prompt_of(80 + room, 256 - room) for room in (1, 2, 3, 12)]
    outputs = [greedy(prompt, 256 - len(prompt)) for prompt in prompts]
    run = k16.run([Request(prompt, output * 3, 60) for prompt, output in zip(prompts, outputs, strict=True)])
    assert run.outputs == outputs
    assert {answer["end"] for answer in run.answers} == {"length"}


#: The tokens that the drafter has room for, the columns of the runner's table, and vLLM's limit.
ROOM = """
ours = getattr(engine.runner, "speculator", None) or engine.runner.drafter
states = getattr(engine.runner, "req_states", None)
table = ours.drafter.token_ids if states is None else states.all_token_ids.gpu
limit = engine.runner.model_config.max_model_len
found = [ours.drafter.max_context_len, table.shape[1], ours.num_draft_tokens, limit]
"""


@pytest.mark.parametrize(("runner", "k"), [("V1", 128), ("V2", 256)])
def test_an_engine_that_is_asked_for_more_than_the_limits(
    runner: str, k: int, start_engine: Callable[..., V2Engine], greedy: Greedy
) -> None:
    """K = 300, and `--max-model-len auto` where the cache has room for 224 of the model's 1,024 tokens."""
    engine = start_engine(
        f"limits-{runner}",
        num_draft_tokens=300,
        runner=runner,
        environment=SHORT,
        max_model_len=-1,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=8,
    )
    prompts = [prompt_of(90, 12), prompt_of(91, 200)]
    outputs = [greedy(prompt, 224 - len(prompt)) for prompt in prompts]
    for prompt, output, most in zip(prompts, outputs, (60, 99), strict=True):
        run = engine.run([Request(prompt, output * 3, most)])
        assert run.outputs == [output[:most]]
        assert run.verification_steps(0) <= 4
    assert engine.execute(ROOM) == [224, 224, k, 224]
    (line,) = engine.warnings()
    assert f"num_speculative_tokens is 300; gpu_align uses {k}, " in line


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_an_adapter_beside_its_base_model(
    runner: str, start_engine: Callable[..., V2Engine], tiny_model: Path, greedy: Greedy, tmp_path: Path
) -> None:
    prompt, n = prompt_of(71), 24
    adapter, merged = write_adapter(tiny_model, tmp_path)
    adapted = greedy_by_transformers(merged)(prompt, n)
    assert adapted != greedy(prompt, n)
    engine = start_engine(
        f"adapter-{runner}",
        num_draft_tokens=8,
        runner=runner,
        environment=SHORT,
        enable_lora=True,
        max_loras=2,  # vLLM's LoRA on the CPU gives the last one to requests that asked for none
        max_lora_rank=8,
        lora_target_modules=ADAPTER_TARGETS,
    )
    outputs = {str(adapter): adapted, None: greedy(prompt, n)}
    requests = [
        Request(prompt, prediction, n, adapter=name)
        for name, output in outputs.items()
        for prediction in (None, output, edited(output, 1))
    ]
    run = engine.run(requests)
    assert run.outputs == [outputs[request.adapter] for request in requests]
    assert run.verification_steps(1) < n // 4 > run.verification_steps(4)


ADAPTER_TARGETS = ["q_proj", "v_proj"]


def write_adapter(model_directory: Path, directory: Path) -> tuple[Path, Path]:
    """A random LoRA adapter as `peft` writes it, and the model with it merged into its weights."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    rank, draw = 4, torch.Generator().manual_seed(3)
    model = LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        for name in ADAPTER_TARGETS:
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
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ADAPTER_TARGETS}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    model.save_pretrained(merged)
    return adapter, merged

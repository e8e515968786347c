"""What vLLM would have to change: `upstream.patch`, applied to a copy of the installed package, and the V2
speculator on its hooks. No seam is installed there: vLLM does not load the plugin."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from v2_harness import MAX_MODEL_LEN, SHORT, Request, V2Engine, copy_vllm, edited, prompt_of

from vllm_integration.seams.table import SEAMS

PATCH = Path(__file__).with_name("upstream.patch")
K = 8
#: Class attributes, methods and fields that the patch adds, and what `custom_class` names.
HOOKS = {
    "custom_class",
    "propose",
    *re.findall(r"^\+\s+(?:def )?(\w+)(?:: |\(self)", PATCH.read_text(), re.M),
}


def patched(directory: Path) -> Path:
    """A search path with vLLM as the patch makes it."""
    copy_vllm(directory, re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), re.M))
    subprocess.run(["git", "apply", str(PATCH)], cwd=directory, check=True)
    return directory


def test_each_row_of_the_table_that_names_a_hook_names_one_of_the_patch() -> None:
    named = [seam.purpose.rpartition("⇒ ")[2] for seam in SEAMS if "⇒" in seam.purpose]
    assert set(named) <= HOOKS
    assert len(named) == 25


@pytest.mark.vllm
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_patched_vllm_drafts_without_a_seam(
    tiny_model: Path, greedy: Callable[[list[int], int], list[int]], tmp_path: Path, asynchronous: bool
) -> None:
    """Greedy output is the model's own, predictions are accepted, requests without one get no placeholders after
    their first report; the scheduler and all functions are vLLM's."""
    here = Path(__file__).parent
    path = [patched(tmp_path / "site"), here.parents[1], here]
    environment = {**SHORT, "VLLM_PLUGINS": "", "PYTHONPATH": os.pathsep.join(map(str, path))}
    prompts = [prompt_of(seed) for seed in range(5)] + [prompt_of(7, MAX_MODEL_LEN // 2)]
    outputs = [greedy(prompt, 24) for prompt in prompts]
    predictions = [outputs[0], edited(outputs[1], 1), outputs[2][::-1], None, outputs[4][:9], outputs[5]]
    speculative = {"method": "custom_class", "model": "hooked_speculator.HookedSpeculator"}
    with V2Engine(
        tiny_model,
        tmp_path / "engine",
        num_draft_tokens=K,
        environment=environment,
        own_process=True,
        asynchronous=asynchronous,
        speculative_config={**speculative, "num_speculative_tokens": K},
        num_gpu_blocks_override=14,
    ) as engine:
        assert engine.facts["speculator"] == "HookedSpeculator"
        assert engine.facts["scheduler"] == ("AsyncScheduler" if asynchronous else "Scheduler")
        assert engine.seams() == []
        run = engine.run(
            [
                Request(prompt, prediction, max_tokens=24, arrives=index // 2)
                for index, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True))
            ]
        )
        assert run.outputs == outputs
        assert run.accepted >= 40
        assert sum(drafts for _, drafts, _ in run.of(3)) <= K * (1 + asynchronous)
        assert engine.state()["occupied"] == 0

"""What vLLM would have to change: `docs/developer/upstream`, applied to a copy of the installed package, and V2's
speculator on its hooks. No seam is installed there: vLLM does not load the plugin."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engines import SHORT, Request, V2Engine, copy_vllm, edited, prompt_of, vllm_version
from tests.vllm.tiny_llama import Greedy
from vllm_integration.seams.table import SEAMS

PAGE = Path(__file__).parents[2] / "docs" / "developer" / "faults.md"
PATCH = PAGE.parent / "upstream" / "upstream.patch"
VERSION = re.search(r"^For vLLM ([\d.]+)\. ", PATCH.read_text(), re.M)[1]
K, MOST = 8, 20
#: To the budget a step of more drafts takes a thousand times as long.
BUDGET = f"""
from vllm_integration.budget.step_times import StepTimes

def curves(self, requests):
    import numpy as np
    line = [0.0, requests + {MOST}, requests + {MOST} + 0.5, 1e9], [1.0, 1.0, 1e3, 1e3]
    return np.array([line, line])

StepTimes.curves = curves
"""
#: Class attributes, methods and fields that the patch adds, and what `custom_class` names.
HOOKS = {
    "custom_class",
    "propose",
    *re.findall(r"^\+\s+(?:def )?(\w+)(?:: |\(self|\($)", PATCH.read_text(), re.M),
}


def patched(directory: Path) -> Path:
    """A search path with vLLM as the patch makes it."""
    if vllm_version() != VERSION:
        pytest.skip(f"upstream.patch is for vLLM {VERSION}: make test-vllm VLLM={VERSION}")
    copy_vllm(directory, re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), re.M))
    subprocess.run(["git", "apply", str(PATCH)], cwd=directory, check=True)
    return directory


def test_each_row_of_the_table_that_names_a_hook_names_one_of_the_patch() -> None:
    on_v2 = [seam for seam in SEAMS if "⇒" in seam.purpose and not seam.groups[0].endswith("v1")]
    assert {seam.purpose.rpartition("⇒ ")[2] for seam in on_v2} <= HOOKS
    assert f"would replace {len(on_v2)}" in PAGE.read_text()


@pytest.fixture(scope="module")
def start(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., V2Engine]:
    """An engine of the patched vLLM, which does not load the plugin. Its KV cache holds a few requests, so that
    others are preempted."""
    site = patched(tmp_path_factory.mktemp("patched") / "site")
    path = os.pathsep.join(map(str, [site, PAGE.parents[2], PATCH.parent]))

    def start(asynchronous: bool, **environment: str) -> V2Engine:
        speculative = {"method": "custom_class", "model": "hooked_speculator.HookedSpeculator"}
        return V2Engine(
            tiny_model,
            tmp_path_factory.mktemp("engine"),
            num_draft_tokens=K,
            environment={**SHORT, "VLLM_PLUGINS": "", "PYTHONPATH": path, **environment},
            asynchronous=asynchronous,
            speculative_config={**speculative, "num_speculative_tokens": K},
            after=BUDGET,
            num_gpu_blocks_override=14,
            enable_prefix_caching=True,
        )

    return start


@pytest.mark.vllm
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_patched_vllm_drafts_without_a_seam(
    start: Callable[..., V2Engine], greedy: Greedy, asynchronous: bool
) -> None:
    """Greedy output is the model's own, over preemptions and sampled with `top_k` 1; a step verifies no more than
    the budget; requests without a prediction get no placeholders after their first report; the last step of an
    answer is in the prefix cache. Scheduler and functions are vLLM's."""
    n = 70
    prompts = [prompt_of(seed, 40) for seed in range(6)]
    outputs = [greedy(prompt, n) for prompt in prompts]
    last = edited(outputs[5], 5)
    predictions = [None, outputs[1], edited(outputs[2], 2), outputs[3][::-1], outputs[4], last]
    sampled = {"temperature": 1.0, "top_k": 1}
    requests = [
        Request(prompt, prediction, n, params=sampled if index % 2 else {})
        for index, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True))
    ]
    with start(asynchronous, GPU_ALIGN_MAX_PREDICTION_TOKENS="80") as engine:
        assert engine.facts["speculator"] == "HookedSpeculator"
        assert engine.facts["scheduler"] == ("AsyncScheduler" if asynchronous else "Scheduler")
        installed = {group for group, is_installed in engine.ask("seams").items() if is_installed}
        assert installed <= {"times"}, "which looks up fields alone"
        run = engine.run(requests)
        assert run.outputs == outputs
        assert run.preemptions
        assert run.accepted >= 100
        assert sum(drafts for _, drafts, _ in run.of(0)) <= K * (1 + asynchronous + run.preemptions)
        largest = max(sum(drafts for _, drafts, _ in step.values()) for step in run.steps)
        assert asynchronous or 0 < largest <= MOST  # asynchronous scheduling begins with whole drafts
        assert engine.ask("held")["slots"] == 0
        prompt, before = prompt_of(8, 41), engine.ask("prefix_cache")["hits"]
        answer = greedy(prompt, 24)
        engine.run([Request(prompt, answer, max_tokens=24)])
        engine.run([Request([*prompt, *answer, 5], None, max_tokens=1)])
        assert engine.ask("prefix_cache")["hits"] - before == 64

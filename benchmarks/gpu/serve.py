"""A small model in vLLM with the plugin and without: ``python -m benchmarks.gpu.serve MODE DIR DEVICE``.

A mode is a process of its own. `plain` goes first: what it writes is what all others have to write, greedily and
in float32, however long their drafts are. ``GPU_CHECK_MODEL`` names the model; without a GPU a random one is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

from benchmarks.tables import ROOT

#: Mode → what the engine gets besides. The KV cache holds fewer tokens than the requests need: some are preempted.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "graphs": {"jit_monitor_mode": "error", "enable_sleep_mode": True},
    "adaptive": {},
}
BATCH, PROMPT, OUTPUT, K = 8, 60, 120, 16
CHOICES = ['{"answer": "yes"}', '{"answer": "no"}']


def make_engine(mode: str, model: str, device: str) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 512, "max_num_seqs": BATCH, "block_size": 32,
        "num_gpu_blocks_override": 24, "enable_prefix_caching": True, "disable_log_stats": False, **MODES[mode],
    }  # fmt: skip
    if device == "cpu":
        options |= {"enforce_eager": True, "enable_sleep_mode": False}
    if mode != "plain":
        options["speculative_config"] = {
            "method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": K,
            **({"enable_adaptive_verification": True} if mode == "adaptive" else {}),
        }  # fmt: skip
    return LLM(model, **options)


def serve(mode: str, out: Path, device: str) -> dict[str, Any]:
    """One mode, in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_integration.wire.request import PredictedOutputParams

    model = os.environ.get("GPU_CHECK_MODEL", "")
    if not model:
        [module] = (ROOT / "tests").rglob("tiny_llama.py")
        sys.path.insert(0, str(module.parent))
        from tiny_llama import build_bytes

        model = str(build_bytes(out / "model") if not (out / "model").exists() else out / "model")
    llm = make_engine(mode, model, device)
    # Token ids that every vocabulary has; all begin alike, with what the prefix cache may hold.
    ids = [[5 + (i * i + (n if i >= 40 else 0)) % 90 for i in range(PROMPT)] for n in range(BATCH)]
    prompts = [{"prompt_token_ids": each} for each in ids]

    def generate(params: list[Any]) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    def greedy(predictions: list[list[int]] | None = None) -> list[Any]:
        extra = [
            {} if text is None else {"extra_args": PredictedOutputParams(token_ids=text).to_extra_args()}
            for text in predictions or [None] * BATCH
        ]
        return [SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, **more) for more in extra]

    choice = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=CHOICES)
    )
    stored = out / "serve_plain.json"
    if mode == "plain":
        stored.write_text(json.dumps([generate(greedy()), generate([choice] * BATCH)]), encoding="utf-8")
    expected, chosen = json.loads(stored.read_text(encoding="utf-8"))
    edited = [[*text[:40], *text[45:80], 7, *text[80:]] for text in expected]
    checks = {"no prediction": None, "exact": expected, "edited": edited, "again": edited}
    for name, predictions in checks.items() if mode != "plain" else ():
        found = generate(greedy(predictions))
        assert found == expected, f"{name}: expected what the engine writes without the plugin, found {found}"
    found = generate([choice] * BATCH)
    assert found == chosen, f"structured output: expected {chosen} as without the plugin, found {found}"
    if mode == "graphs" and device == "cuda":
        llm.sleep(level=1)
        llm.wake_up()
        assert generate(greedy(edited)) == expected, "after sleep and wake: another output"
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0, "expected preempted requests, found none"
    start = time.perf_counter()
    generate(greedy())
    row = {"ms_per_token": round((time.perf_counter() - start) * 1e3 / OUTPUT, 3)}
    if mode != "plain":
        start = time.perf_counter()
        generate(greedy(edited))
        row["ms_per_token_predicted"] = round((time.perf_counter() - start) * 1e3 / OUTPUT, 3)
        row["accepted"] = metrics.get("vllm:spec_decode_num_accepted_tokens", 0)
        assert row["accepted"] > 0, "expected accepted drafts, found none"
    return row


def rows(device: str, is_dry: bool, out: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and check of each row."""
    for mode in MODES:
        yield mode, partial(check, mode, out, device)


def check(mode: str, out: Path, device: str) -> dict[str, Any]:
    """One row, of a process of its own."""
    if device == "cpu" and mode not in ("plain", "eager"):
        raise SkipTest("dry run")
    if device == "cuda" and not os.environ.get("GPU_CHECK_MODEL"):
        raise SkipTest("GPU_CHECK_MODEL: expected the path of a small model, found none")
    environment = {
        **os.environ, "GPU_ALIGN_STRICT": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **({"VLLM_PLUGINS": ""} if mode == "plain" else {}),
        **({"VLLM_GPU_SYNC_CHECK": "error"} if mode == "graphs" else {}),
    }  # fmt: skip
    if device == "cpu":
        environment |= {
            "TRITON_INTERPRET": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.gpu.serve", mode, str(out), device]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))

"""Whatever changes the weights of a running engine ends its memory of earlier answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

PROGRAM = """
import sys
from pathlib import Path
from tests.vllm.tiny_llama import build

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    drafter = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": 4}
    llm = LLM(
        model=str(build(Path(sys.argv[1]) / "model")), enforce_eager=True, kv_cache_memory_bytes=2**26,
        max_model_len=128, dtype="float32", skip_tokenizer_init=True, max_num_seqs=4, num_gpu_blocks_override=64,
        speculative_config=drafter,
    )
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    changes = [
        lambda: llm.collective_rpc("reload_weights"),
        lambda: llm.apply_model(lambda model: None),
        lambda: llm.reset_prefix_cache(),
        lambda: core.set_weight_version("2"),
    ]
    for change in changes:
        llm.generate([{"prompt_token_ids": [*range(5, 20)]}], params, use_tqdm=False)
        before = core.scheduler._recall._memory.num_tokens
        change()
        print("COUNTS", before, core.scheduler._recall._memory.num_tokens)
"""


def test_a_changed_model_remembers_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    environment = {
        **os.environ, "PYTHONPATH": os.getcwd(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GPU_ALIGN_RECIPES": "off",
        "VLLM_PLUGINS": "gpu_align", "GPU_ALIGN_MEMORY_TOKENS": "1000", "GPU_ALIGN_STRICT": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_V2_MODEL_RUNNER": "0",
    }  # fmt: skip
    command = [sys.executable, str(path), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    counts = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("COUNTS")]
    assert counts == [["24", "0"]] * 4, done.stderr[-3000:]

"""`gpu-align bench` with a server that it starts as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENVIRONMENT, RUNNERS

pytestmark = pytest.mark.vllm

N = 40


def test_bench_measures_a_server_that_it_starts(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    texts = [" ".join(f"w{(start + 7 * i) % 400}" for i in range(60)) for start in (3, 50)]
    pairs = [{"id": text, "instruction": "w9", "before": text, "after": f"w1 {text}"} for text in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags: list[Any] = ["--serve", tiny_model, "--vllm-args", "--max-model-len 512 --max-num-seqs 8"]
    flags += ["--modes", "prediction", "pairs.jsonl", "--max-tokens", N]
    flags += ["--concurrency", "2", "--requests", 4, "--json", out]
    # Not in pytest's folder: vLLM's sockets are there, too, and a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory() as logs:
        environment = {**os.environ, **ENVIRONMENT, **RUNNERS["V1"], "TMPDIR": logs}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        command = [sys.executable, "-m", "gpu_align", "bench", *map(str, flags)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(out.read_text())
    assert found["complete"]
    (only,) = found["runs"]
    assert (only["mode"], only["output_tokens"]) == ("prediction", N * only["requests"])
    assert 0 < only["steps"] < only["output_tokens"] / 2
    assert only["tokens_per_s"] > 0

"""The command lines and the environment of the demo's two vLLM servers; `gpu_align.tools.bench` runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_align.tools.bench.servers import HOST, environment


def plugin_speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Return the `--speculative-config` of a server that drafts from predictions."""
    return {
        "method": "custom_class",
        "model": "vllm_integration.PredictedOutputs",
        "num_speculative_tokens": num_draft_tokens,
    }


def ngram_speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Return the `--speculative-config` of a server with vLLM's own n-gram drafter, its window left as it is."""
    return {"method": "ngram", "num_speculative_tokens": num_draft_tokens}


def vllm_command(
    model: str, port: int, *, name: str, dtype: str, speculation: Mapping[str, Any], max_model_len: int
) -> list[str]:
    """Return the command line of an OpenAI-compatible server."""
    options = {
        "--model": model,
        "--served-model-name": name,
        "--host": HOST,
        "--port": str(port),
        "--dtype": dtype,
        "--max-model-len": str(max_model_len),
        "--max-num-seqs": "4",
        "--speculative-config": json.dumps(speculation),
    }
    flat = [word for pair in options.items() for word in pair]
    # Compiling would take longer than everything else the demo does.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flat, "--enforce-eager"]


def vllm_environment(steps_dir: Path, *, gpu: bool, offline: bool) -> dict[str, str]:
    """Return this process's environment with what the server needs to find and log."""
    env = environment(gpu=gpu)
    env["GPU_ALIGN_DEBUG_DIR"] = str(steps_dir.resolve())
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    return env

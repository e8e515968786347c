"""Engines of both runners with the face of the V2 harness. `python -m tests.campaign.greedy_engine SETTINGS` is
a V1 engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The harnesses. Behind everything else: under tests/ there are folders that are named like our packages.
sys.path += [str(ROOT / "tests" / "vllm"), str(ROOT / "tests" / "vllm_integration")]

from byte_llama import build  # noqa: E402
from v2_harness import Request, Run, V2Engine  # noqa: E402
from vllm_harness import ENVIRONMENT  # noqa: E402

__all__ = ["Request", "Run", "V2Engine", "build", "start"]

#: Without recipes, whose drafts would come before those of the prediction.
PLUGIN = {"GPU_ALIGN_RECIPES": "off"}
#: vLLM loads no plugin.
NO_PLUGIN = {"VLLM_PLUGINS": ""}


class V1Engine(V2Engine):
    """The same settings and commands; Triton's interpreter takes no part."""

    def __init__(self, model: Path, directory: Path, *, environment: dict[str, str], **settings: Any) -> None:
        self.log = directory / "log"
        self._log = self.log.open("w")
        self._process = subprocess.Popen(
            # As a module: this folder must not be on the search path, nor its names stand for others.
            [
                sys.executable,
                "-m",
                "tests.campaign.greedy_engine",
                json.dumps({"model": str(model), **settings}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                **ENVIRONMENT,
                "VLLM_USE_V2_MODEL_RUNNER": "0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "PYTHONPATH": str(ROOT),
                **environment,
            },
        )
        self.facts = {}


def start(
    runner: str, model: Path, directory: Path, num_draft_tokens: int | None, **settings: Any
) -> V2Engine:
    """An engine, to be used as a context manager. num_draft_tokens: None for the engine without the plugin."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "disable_log_stats": False,
        "block_size": 32,
    } | settings
    if num_draft_tokens is None:
        settings["speculative_config"] = None
    else:
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": "vllm_integration.PredictedOutputs",
            "num_speculative_tokens": num_draft_tokens,
        }
    environment = NO_PLUGIN if num_draft_tokens is None else PLUGIN
    if runner == "V1":
        return V1Engine(model, directory, environment=environment, **settings)
    return V2Engine(model, directory, num_draft_tokens=0, environment=environment, **settings)


if __name__ == "__main__":
    from engine_process import serve

    serve(json.loads(sys.argv[1]))

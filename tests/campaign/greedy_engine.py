"""Engines of both runners, with the plugin and without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The harnesses. Behind everything else: under tests/ there are folders that are named like our packages.
sys.path += [str(ROOT / "tests" / "vllm"), str(ROOT / "tests" / "vllm_integration")]

from byte_llama import build  # noqa: E402
from v2_harness import Request, Run, V2Engine  # noqa: E402

__all__ = ["Request", "Run", "V2Engine", "build", "start"]

#: Without recipes, whose drafts would come before those of the prediction.
PLUGIN = {"GPU_ALIGN_RECIPES": "off"}
#: vLLM loads no plugin.
NO_PLUGIN = {"VLLM_PLUGINS": ""}


def start(
    runner: str, model: Path, directory: Path, num_draft_tokens: int | None, **settings: Any
) -> V2Engine:
    """An engine, to be used as a context manager. num_draft_tokens: None for the engine without the plugin."""
    if num_draft_tokens is None:
        settings["speculative_config"] = None
    environment = NO_PLUGIN if num_draft_tokens is None else PLUGIN
    return V2Engine(
        model,
        directory,
        num_draft_tokens=num_draft_tokens or 0,
        runner=runner,
        environment=environment,
        **settings,
    )

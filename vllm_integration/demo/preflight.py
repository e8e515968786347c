"""Checks what the demo needs before it starts, and names the command that installs what is missing."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from importlib.util import find_spec

_NEEDED = ("torch", "vllm", "transformers", "tokenizers", "openai", "rich", "yaml")
# Optional parts of vLLM and transformers. Where one is installed and does not fit torch, importing a text
# model fails too, with a message that does not name the cause.
_MUST_FIT_TORCH = ("torchvision", "torchaudio", "torchcodec")


def problems() -> list[str]:
    """Return one line for everything that would stop the demo; empty when it can run."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return [f"not installed: {', '.join(missing)}. Run: pip install -e '.[cpu,demo]'"]
    load_torch()
    found = [line for name in _MUST_FIT_TORCH if (line := _misfit(name))]
    if not any(entry.name == "gpu_align" for entry in entry_points(group="vllm.general_plugins")):
        found.append("vLLM does not know the plugin. Run: pip install -e . --no-deps")
    return found


def _misfit(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        importlib.import_module(name)
    except Exception as error:
        import torch

        why = str(error).splitlines()[0]
        return (
            f"{name} does not fit torch {torch.__version__} ({why}). The demo does not need it. "
            f"Run: pip uninstall -y {name}"
        )
    return None


def load_torch() -> None:
    """Import torch with threads that sleep, not spin, while they wait for one another.

    On a machine that is busy with something else, training is then two to four times faster. OpenMP reads
    the variable once, when torch is loaded; it is taken back so that the server does not inherit it.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        importlib.import_module("torch")
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device."""
    import torch

    return torch.cuda.is_available()

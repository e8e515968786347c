"""Checks what the demo needs before it starts, and names the command that installs what is missing."""

from __future__ import annotations

import importlib
import os
import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_NEEDED = ("torch", "vllm", "transformers", "tokenizers", "openai", "rich", "yaml")
# Optional parts of vLLM and transformers. Where one is installed and does not fit torch, importing a text
# model fails too, with a message that does not name the cause.
_MUST_FIT_TORCH = ("torchvision", "torchaudio", "torchcodec")


#: How the hub writes a model: `name` or `organisation/name`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def wrong_use(model: str | None, out_dir: Path) -> str | None:
    """Return what is wrong with the two options, or None. Loads nothing and writes nothing."""
    try:
        return _wrong_use(model, out_dir)
    except OSError as error:  # a name that is too long, a folder that may not be read
        return f"{error.filename}: {error.strerror}"


def _wrong_use(model: str | None, out_dir: Path) -> str | None:
    if model is not None:
        folder = Path(model)
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                return f"the model {model} is a folder without a config.json"
        elif folder.exists() or not _HUB_NAME.fullmatch(model):
            return f"expected a model as its folder or its Hugging Face name, found {model!r}"
    parent = next(place for place in (out_dir, *out_dir.parents) if place.exists())
    if not parent.is_dir():
        return f"{out_dir}: {parent} is not a folder"
    if not os.access(parent, os.W_OK):
        return f"{out_dir}: {parent} cannot be written to"
    return None


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

"""The `vllm.general_plugins` entry point."""

from __future__ import annotations

import os

from vllm_integration import compat


def register() -> None:
    """Arrange that vLLM's front end understands predictions. vLLM calls this in every process.

    It may be called any number of times and never raises, unless `GPU_ALIGN_STRICT=1`. It imports no vLLM
    module: each is wrapped when vLLM itself imports it. The model runner's part is installed by
    `PredictedOutputs` when the engine creates it, so a process that does not speculate never sees it.
    """
    for module, install in ((compat.INPUTS_MODULE, _install_inputs), (compat.CHAT_MODULE, _install_chat)):
        if module not in _watched:
            _watched.add(module)
            compat.when_imported(module, install)


def strict() -> bool:
    """Whether a missing seam shall raise. Read leniently: this must not fail while vLLM starts."""
    return os.environ.get("GPU_ALIGN_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


def guarded_install(group: compat.Group, wrappers: dict[str, compat.Wrapper]) -> bool:
    """`compat.install`, or the plugin off; whether it is installed. Raises only when strict."""
    try:
        compat.install(group, wrappers)
    except Exception as error:
        if strict():
            raise
        compat.turn_off(f"{type(error).__name__}: {error}")
        return False
    return True


def _install_inputs() -> None:
    from vllm_integration import inputs

    guarded_install("inputs", inputs.WRAPPERS)


def _install_chat() -> None:
    from vllm_integration import api

    guarded_install("chat", api.WRAPPERS)


_watched: set[str] = set()

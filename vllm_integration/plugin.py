"""The `vllm.general_plugins` entry point, and the place where the V2 model runner gets our drafter."""

from __future__ import annotations

from typing import Any

from .config.in_use import drafts_predictions
from .seams.install import Original, namesakes, seam, tell, watch


def register() -> None:
    """Arrange that vLLM understands predictions. vLLM calls this in every process, any number of times. Each
    module is wrapped when vLLM itself imports it; what runs every step when the engine makes our drafter."""
    watch()
    if points := namesakes():
        tell(f"{len(points)} plugins are called gpu_align, vLLM loads the last one: {', '.join(points)}")


@seam("v2_start.init_speculator")
def init_speculator(
    original: Original, vllm_config: Any, device: Any, req_states: Any, *args: Any, **kwargs: Any
) -> Any:
    """`init_speculator` as the V2 runner imported it: ours where the configuration names our class."""
    if not drafts_predictions(vllm_config, even_if_off=True):
        return original(vllm_config, device, req_states, *args, **kwargs)
    from .worker.speculator import make_speculator

    return make_speculator(vllm_config, device, req_states, original)

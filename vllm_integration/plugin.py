"""The `vllm.general_plugins` entry point."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_integration.seams import OUTPUTS_MODULE
from vllm_integration.seams import install as compat


def register() -> None:
    """Arrange that vLLM understands predictions. vLLM calls this in every process.

    It may be called any number of times and never raises, unless `GPU_ALIGN_STRICT=1`. It imports no vLLM
    module: each is wrapped when vLLM itself imports it. What runs every step is installed when the engine
    makes our drafter, `PredictedOutputs` on V1 and the speculator on V2: an engine that does not draft from
    predictions never sees it.
    """
    for module, install in (
        (compat.INPUTS_MODULE, _install_inputs),
        (compat.CHAT_MODULE, functools.partial(_install_api, "chat")),
        (compat.COMPLETION_MODULE, functools.partial(_install_api, "completions")),
        (compat.RESPONSES_MODULE, functools.partial(_install_api, "responses")),
        (compat.BATCH_MODULE, functools.partial(_install_api, "batch")),
        (compat.APP_MODULE, _install_app),
        (compat.CONFIG_MODULE, _install_config),
        (compat.RUNNER_MODULE, _install_v2),
        (OUTPUTS_MODULE, _install_usage),
    ):
        if module not in _watched:
            _watched.add(module)
            compat.when_imported(module, install)


def guarded_install(group: compat.Group, wrappers: dict[str, compat.Wrapper]) -> bool:
    """`compat.install`, or the plugin off; whether it is installed. Raises only when strict."""
    try:
        compat.install(group, wrappers)
    except Exception as error:
        if compat.strict():
            raise
        compat.turn_off(f"{type(error).__name__}: {error}")
        return False
    return True


def _install_inputs() -> None:
    from vllm_integration.frontend import input_processor as inputs

    guarded_install("inputs", inputs.WRAPPERS)


def _install_api(group: compat.Group) -> None:
    from vllm_integration.frontend import endpoints as api

    guarded_install(group, api.WRAPPERS)


def _install_app() -> None:
    from vllm_integration.frontend import body_limit

    guarded_install("app", body_limit.WRAPPERS)


def _install_config() -> None:
    from vllm_integration.config import engine_config

    guarded_install("config", engine_config.WRAPPERS)


def _install_usage() -> None:
    from vllm_integration.frontend import usage_collector as collector
    from vllm_integration.seams import usage_groups as usage_seams

    usage_seams.install("usage", collector.WRAPPERS)


def _install_v2() -> None:
    guarded_install("v2", {"v2.init_speculator": _wrap_init_speculator})


def _wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_speculator` as the V2 runner imported it: ours where the configuration names our class."""

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_integration.frontend.input_processor import drafts_predictions

        if drafts_predictions(vllm_config, even_if_off=True):
            from vllm_integration.worker.speculator import make_speculator

            return make_speculator(vllm_config, device, req_states)
        return original(vllm_config, device, req_states, *args, **kwargs)

    return init_speculator


_watched: set[str] = set()

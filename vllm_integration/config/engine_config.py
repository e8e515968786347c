"""One speculative configuration for both model runners. vLLM takes a custom drafter class on its V1 runner only;
on V2 our speculator takes the same place, so there the configuration is let through."""

from __future__ import annotations

import copy
import json
import logging
import sys
import threading
from contextlib import suppress
from typing import Any, Literal

from gpu_align.ops.choose import MAX_DRAFT_TOKENS
from gpu_align.ops.match import MAX_CONTEXT_LEN

from ..seams import source_probe
from ..seams.guard import logger, shown_reason, strict, warn_once
from ..seams.install import Original, SeamError, install, missing, seam
from ..seams.table import CONFIG
from .in_use import INNER, drafts_predictions, inner_tokens, names_ours, note_engine
from .settings import Settings, warn_of_unknown_names


def do_without(vllm_config: Any, reason: object) -> None:
    """Turn adaptive verification off in this process, if it was asked for; the first rank says so."""
    if not getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        return
    vllm_config.speculative_config.enable_adaptive_verification = False
    level = logging.DEBUG if getattr(vllm_config.parallel_config, "rank", 0) else logging.WARNING
    logger.log(
        level, "gpu_align schedules draft slots without adaptive verification: %s", shown_reason(reason)
    )


#: Held while a name of vLLM's is replaced: another thread may configure an engine, too.
_replacing = threading.RLock()
#: Recurrent layers that drafts were run with, and architectures that have them.
RUN = "Mamba-2 and Qwen's GDN on the V2 model runner"
_RUN = ("FalconH1", "GraniteMoeHybrid", "Mamba2", "NemotronH", "Qwen3Next", "Qwen3_5", "Zamba2")

_OURS = "vllm_integration.scheduler.schedulers.PredictedOutputs"
V1_SCHEDULER = f"{_OURS}V1Scheduler"
#: `MAX_SPEC_LEN` of vLLM's V1 rejection sampler.
MAX_SPEC_LEN = 128
#: All limits that `_keep_limits` knows, for `gpu-align doctor`.
LIMITS = (
    f"num_speculative_tokens {MAX_DRAFT_TOKENS} and max_num_batched_tokens - 1 on V2, {MAX_SPEC_LEN} on V1; "
    f"max_model_len {MAX_CONTEXT_LEN}"
)


@seam("config._get_v2_model_runner_unsupported_features")
def unsupported_features(original: Original, self: Any, *args: Any, **kwargs: Any) -> list[str]:
    """`VllmConfig._get_v2_model_runner_unsupported_features`, of our class as of an engine without a drafter."""
    if not drafts_predictions(self):
        return list(original(self, *args, **kwargs))
    if reason := missing("v2_start", "v2", "scheduler"):
        if strict():
            raise SeamError(reason)
        warn_once("gpu_align does not know this vLLM's V2 model runner: " + reason)
        return list(original(self, *args, **kwargs))
    without = copy.copy(self)
    without.speculative_config = None
    return list(original(without, *args, **kwargs))


@seam("config.__post_init__")
def post_init(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`VllmConfig.__post_init__`: our scheduler is used and, on V2, asynchronous scheduling is allowed: for the
    time of vLLM's check our method counts as one of the drafters that it knows to be on the device. Raises
    `ValueError` when a `GPU_ALIGN_*` variable cannot be read, or the answers would be wrong."""
    if not drafts_predictions(self):
        return original(self, *args, **kwargs)
    settings = Settings.of(self)  # raises here, where the start fails with one line, and not in a worker
    warn_of_unknown_names(settings)
    _take_inner_drafter(self)
    settings.travel_with(self)
    _keep_limits(self)
    if self.use_v2_model_runner:
        module: Any = sys.modules[CONFIG]
        with _replacing:
            on_device = module.NgramGPUTypes
            module.NgramGPUTypes = Literal["ngram_gpu", "custom_class"]
            try:
                result = original(self, *args, **kwargs)
            finally:
                module.NgramGPUTypes = on_device
        mode = "Async" if self.scheduler_config.async_scheduling else ""
        _use_our_scheduler(self.scheduler_config, f"{_OURS}{mode}Scheduler")
    else:
        do_without(self, "the V1 model runner has none")
        result = original(self, *args, **kwargs)
        if reason := missing("scheduler"):
            warn_once("gpu_align reports no usage with the V1 model runner: " + reason)
        elif not self.scheduler_config.async_scheduling:
            _use_our_scheduler(self.scheduler_config, V1_SCHEDULER)
    if differs := source_probe.difference():
        warn_once(f"gpu_align: {differs}")
    if reason := refused_layers(self):
        raise ValueError(f"{reason}: start this model without speculative_config")
    note_engine(self)
    return result


def _take_inner_drafter(vllm_config: Any) -> None:
    """If `GPU_ALIGN_DRAFTER` names a drafter of vLLM's, configure the engine as for that one, with our K: vLLM
    makes its cache, its inputs and its graphs then, or raises."""
    given, speculative = Settings.of(vllm_config).drafter, vllm_config.speculative_config
    if given is None or not names_ours(speculative):
        return
    fields = None
    with suppress(ValueError):
        fields = json.loads(given)
    if not isinstance(fields, dict) or fields.get("method") in (None, "custom_class"):
        expected = 'a speculative configuration of vLLM\'s as JSON, {"method": "mtp", …}'
        raise ValueError(f"GPU_ALIGN_DRAFTER: expected {expected}, got {shown_reason(given, 60)!r}")
    if not vllm_config.use_v2_model_runner:
        raise ValueError("GPU_ALIGN_DRAFTER: expected vLLM's V2 model runner, the engine uses V1")
    if install("inner"):
        return
    # vLLM would learn from what becomes of our drafts how likely its own are.
    do_without(vllm_config, "not beside GPU_ALIGN_DRAFTER")
    inner = type(speculative)(
        target_model_config=speculative.target_model_config or vllm_config.model_config,
        target_parallel_config=speculative.target_parallel_config or vllm_config.parallel_config,
        **fields,
    )
    if inner.draft_sample_method != "greedy":
        raise ValueError("GPU_ALIGN_DRAFTER: expected draft_sample_method 'greedy', got another one")
    if getattr(inner, "num_speculative_tokens_per_batch_size", None) is not None:
        raise ValueError("GPU_ALIGN_DRAFTER: expected a fixed num_speculative_tokens, got one by batch size")
    setattr(inner, INNER, int(inner.num_speculative_tokens))
    inner.num_speculative_tokens = max(inner.num_speculative_tokens, speculative.num_speculative_tokens)
    vllm_config.speculative_config = inner


def inner_config(vllm_config: Any) -> Any:
    """The configuration from which vLLM makes its own drafter: as without us."""
    config = copy.copy(vllm_config)
    config.speculative_config = speculative = copy.copy(vllm_config.speculative_config)
    speculative.num_speculative_tokens = inner_tokens(vllm_config)
    delattr(speculative, INNER)
    return config


def refused_layers(vllm_config: Any) -> str:
    """Why a model with recurrent layers is not served; empty where it has none, or these were run with drafts."""
    model = vllm_config.model_config
    if not has_states(model):
        return ""
    if has_cpu_kernels():
        kernels = "vLLM's CPU kernels of recurrent layers (Mamba, GDN, short convolutions)"
        return f"{kernels} lose their states where anything drafts"
    if not (vllm_config.use_v2_model_runner and model.architecture.startswith(_RUN)):
        return f"gpu_align drafts for models with recurrent layers only where that was run, {RUN}"
    return ""


def has_states(model_config: Any) -> bool:
    """Whether a model has recurrent layers."""
    return bool(model_config.is_hybrid or model_config.is_attention_free)


def has_cpu_kernels() -> bool:
    """Whether layers run vLLM's CPU kernels: 0.32's `causal_conv1d_update_cpu` ignores accepted drafts."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _keep_limits(vllm_config: Any) -> None:
    """Cap what is beyond a limit, or say what is not drafted: a WARNING each. With a larger K the engine ends
    (V1), a request is never scheduled (V2), or no drafter can be made."""
    speculative = vllm_config.speculative_config
    if vllm_config.use_v2_model_runner:
        # vLLM pads a request whose prompt is cached but for one token to 1 + K tokens. Where no batch has room for
        # so many, it would wait for ever. On V1 our scheduler does not pad.
        room = max(1, vllm_config.scheduler_config.max_num_batched_tokens - 1)
        fits = room, "the most that fit into max_num_batched_tokens"
        most, why = min(fits, (MAX_DRAFT_TOKENS, "the most that its kernel makes"))
    else:
        most, why = MAX_SPEC_LEN, "the most that vLLM's V1 sampler verifies"
        if getattr(speculative, "num_speculative_tokens_per_batch_size", None) is not None:
            warn_once("num_speculative_tokens_per_batch_size is not used: the V1 model runner has one K")
            speculative.num_speculative_tokens_per_batch_size = None
    asked = speculative.num_speculative_tokens
    if asked > most:
        logger.warning("num_speculative_tokens is %d; gpu_align uses %d, %s", asked, most, why)
        speculative.num_speculative_tokens = most
    if inner_tokens(vllm_config) > most:
        setattr(speculative, INNER, most)
    if too_long := beyond_longest(vllm_config.model_config.max_model_len):
        warn_once(f"gpu_align drafts nothing: {too_long}")


def beyond_longest(max_model_len: int) -> str:
    """Why nothing is drafted in contexts of up to `max_model_len` tokens; empty where drafts are made."""
    found = f"expected at most {MAX_CONTEXT_LEN} tokens, got {max_model_len}"
    return f"max_model_len: {found}" if max_model_len > MAX_CONTEXT_LEN else ""


def _use_our_scheduler(scheduler_config: Any, ours: str) -> None:
    given = scheduler_config.scheduler_cls
    if given is None or str(given).startswith(_OURS):
        scheduler_config.scheduler_cls = ours
        return
    logger.warning(
        "scheduler_cls is %s: responses will omit accepted and rejected prediction tokens, and on V2 every "
        "decoding request is scheduled with all draft slots, also those without a prediction",
        given,
    )

"""FULL CUDA graphs for the steps that this plugin makes, on the V2 runner: plain ones, and drafts of all lengths.

With K draft tokens vLLM captures FULL decode graphs for requests of K + 1 tokens and runs every other step
PIECEWISE, unless adaptive verification is on. Here:

    all requests plain            the FULL graphs that a server without speculation has
    all requests K + 1 tokens     FULL, as vLLM
    any other mixture             FULL, where the attention backend replays lengths that vary
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

from ..config.engine_config import has_states
from ..config.in_use import drafts_predictions, inner_tokens
from ..config.settings import Settings
from ..seams.guard import logger, shown_fault, strict
from ..seams.install import Original, seam

_PLAIN, _WHOLE = "steps without drafts", "steps with K drafts for every request"
#: Name of what was found → the steps that run with FULL CUDA graphs, and why others do not; empty where all do.
GRAPHS = {
    "all": ("all steps", ""),
    "decode": ("all decode steps", ""),
    "no mode": ("no steps", "cudagraph_mode has none"),
    "off": ("only the steps that vLLM does", "GPU_ALIGN_CUDA_GRAPHS=0"),
    "failed": ("only the steps that vLLM does", "no more could be added"),
    "pipeline": (_WHOLE, "only the last pipeline stage drafts, and all stages have to pad alike"),
    "microbatches": (_WHOLE, "microbatches are captured for one number of tokens a request"),
    "states": (_WHOLE, "the model has layers with recurrent states"),
    "context": (f"{_PLAIN} and {_WHOLE}", "context parallelism"),
    "backend": (
        f"{_PLAIN} and {_WHOLE}",
        "graphs of the attention backend take one length (any: FlashAttention 3, --attention-backend TRITON_ATTN)",
    ),
}
#: Names that are no loss to anybody, or that the operator chose.
_ASKED_FOR = ("all", "decode", "no mode", "off")


@seam("graphs.initialize_kv_cache")
def initialize_kv_cache(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner.initialize_kv_cache`, which decides what will be captured; called twice with profiling."""
    result = original(self, *args, **kwargs)
    if drafts_predictions(self.vllm_config) and self.speculator is not None:
        try:
            name, detail = add_graphs(self) if Settings.of(self.vllm_config).cuda_graphs else ("off", "")
        except Exception as error:
            if strict():
                raise
            name, detail = "failed", shown_fault(error)
        reporter = getattr(self.speculator, "reporter", None)
        if reporter is not None and not kwargs.get("is_profiling"):
            reporter.plain_graphs_alone = name in ("context", "backend")
            full, others = GRAPHS[name]
            why = others and f"; why not more: {others} {detail}".rstrip()
            level = logging.INFO if name in _ASKED_FOR else logging.WARNING
            size = self.vllm_config.compilation_config.max_cudagraph_capture_size
            upto = "" if name == "no mode" else f", up to {size} tokens"
            logger.log(level, "gpu_align runs %s with FULL CUDA graphs%s%s", full, upto, why)
    return result


def add_graphs(runner: Any) -> tuple[str, str]:
    """Add the descriptors of these graphs to a runner's: a name of `GRAPHS`, and what the log adds to it."""
    config, manager = runner.vllm_config, runner.cudagraph_manager
    mode, parallel = config.compilation_config.cudagraph_mode.name, config.parallel_config
    if not mode.startswith("FULL"):
        return "no mode", f"({mode})"
    if mode == "FULL":
        return "all", ""
    if parallel.pipeline_parallel_size > 1:
        return "pipeline", ""
    if parallel.use_ubatching and parallel.data_parallel_size > 1:
        return "microbatches", ""
    if has_states(config.model_config):
        # A step of one token a request is planned as without speculation, a captured one as with.
        return "states", f"({config.model_config.architecture})"
    trims = config.speculative_config.enable_adaptive_verification  # vLLM has its graphs then
    name, detail = ("decode", "") if trims else _lengths_that_vary(runner)
    if name == "decode" and not trims:
        varying = _descriptors(manager, manager.decode_query_len, varlen_decode=True)
        manager.varlen_decode = True
        manager._candidates, manager._capture_descs = varying._candidates, varying._capture_descs
    full = CUDAGraphMode.FULL
    for query_len in {1, 1 + inner_tokens(config)}:
        # A step takes the first graph that fits.
        more = _descriptors(manager, query_len, varlen_decode=False)
        known = manager._capture_descs.get(full, [])
        new = [desc for desc in more._capture_descs.get(full, []) if desc not in known]
        manager._capture_descs[full] = sorted([*known, *new], key=lambda desc: desc.num_tokens, reverse=True)
        for key, descs in more._candidates.items():
            first = [desc for desc in descs if desc in new]
            manager._candidates[key] = [*first, *manager._candidates.get(key, [])]
    return name, detail


def _lengths_that_vary(runner: Any) -> tuple[str, str]:
    """As `add_graphs`: whether the attention backends can replay requests of 1 to K + 1 tokens in one graph."""
    config = runner.vllm_config
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context", ""
    unsupported = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups, config, runner.cudagraph_manager.decode_query_len
    )
    support, backend = runner.model_state.get_additional_cg_support()
    if unsupported is None and support != AttentionCGSupport.ALWAYS:
        unsupported = backend, None
    return ("decode", "") if unsupported is None else ("backend", f"({unsupported[0]})")


def _descriptors(manager: Any, query_len: int, *, varlen_decode: bool) -> Any:
    """A manager that is never captured: its descriptors are those for decodes of `query_len` tokens a request."""
    made = copy.copy(manager)
    made.decode_query_len, made.varlen_decode = query_len, varlen_decode
    made._candidates, made._capture_descs = {}, {}
    made.compilation_config = compilation = copy.copy(manager.compilation_config)
    config = manager.vllm_config
    largest = config.scheduler_config.max_num_seqs * query_len
    tp_size = int(config.parallel_config.tensor_parallel_size)
    if query_len == 1 and largest <= compilation.max_cudagraph_capture_size and largest % tp_size == 0:
        # Without speculation vLLM captures the largest batch, too.
        sizes = {*compilation.cudagraph_capture_sizes, largest}
        compilation.cudagraph_capture_sizes = sorted(sizes)
    made._init_candidates()
    return made

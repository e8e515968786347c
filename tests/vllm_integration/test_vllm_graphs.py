"""Which CUDA graph a decode step runs with: vLLM's own manager and dispatch, for every kind of attention backend.

Nothing is captured: the manager decides from its descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.config.vllm import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils

from tests.vllm_integration import fakes
from vllm_integration.seams.install import wrapped_by
from vllm_integration.worker import graphs

DEFAULT = CUDAGraphMode.FULL_AND_PIECEWISE
PARALLEL = ("pipeline", "decode_context", "prefill_context", "tensor", "data")


class Runner:
    """What `GPUModelRunner.initialize_kv_cache` leaves behind. K = 0: a server without speculation.

    support: of the attention backend. bound: its `get_varlen_cudagraph_max_query_len`. adaptive: with adaptive
    verification. schedule: of draft tokens by batch size."""

    def __init__(
        self,
        K: int,
        max_num_seqs: int,
        support: str = "ALWAYS",
        *,
        bound: int | None = None,
        has_states: bool = False,
        mode: CUDAGraphMode = DEFAULT,
        adaptive: bool = False,
        schedule: list[tuple[int, int, int]] | None = None,
        sizes: list[int] | None = None,
        **parallel: int,
    ) -> None:
        compilation = CompilationConfig(
            cudagraph_mode=mode, **({"cudagraph_capture_sizes": sizes} if sizes else {})
        )
        config = fakes.config(
            K,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            layers="is_hybrid" if has_states else "",
            architecture="Some",
            enable_adaptive_verification=adaptive,
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        )
        config.speculative_config = config.speculative_config if K else None
        config.model_config.enforce_eager, config.compilation_config = False, compilation
        sizes_of_1 = {f"{kind}_parallel_size": 1 for kind in PARALLEL}
        config.parallel_config = SimpleNamespace(**sizes_of_1 | {"use_ubatching": False} | parallel)
        config.cache_config = SimpleNamespace(use_kda_recoverssm=False)
        config.uniform_decode_query_len, config.num_speculative_tokens = K + 1, K
        config.performance_mode = "balanced"
        self.vllm_config = config
        VllmConfig._set_cudagraph_sizes(config)
        level = AttentionCGSupport[support]
        builder = SimpleNamespace(
            get_cudagraph_support=lambda *_: level, get_varlen_cudagraph_max_query_len=lambda *_: bound
        )
        group = SimpleNamespace(
            backend=type("Backend", (), {}),
            layer_names=["0"],
            kv_cache_spec=None,
            get_metadata_builder=lambda _: builder,
        )
        self.attn_groups = [[group]]
        self.model_state = SimpleNamespace(
            get_additional_cg_support=lambda: (AttentionCGSupport.ALWAYS, None)
        )
        self.speculator = SimpleNamespace(reporter=SimpleNamespace(plain_graphs_alone=False)) if K else None
        resolved = compilation.resolve_cudagraph_mode_and_sizes(
            level, "Backend", K + 1, use_v2_model_runner=True
        )
        self.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
            config, torch.device("cpu"), resolved, K + 1, varlen_decode=adaptive
        )

    @wrapped_by(graphs.initialize_kv_cache)
    def initialize_kv_cache(self, is_profiling: bool = False) -> str:
        return "initialised"

    def mode_of(self, lengths: list[int]) -> str:
        manager = self.cudagraph_manager
        manager._graphs_captured = True
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        found = manager.dispatch(len(lengths), sum(lengths), uniform, 0, max_query_len=max(lengths))
        if found.cg_mode == CUDAGraphMode.FULL:
            assert found in manager._capture_descs[CUDAGraphMode.FULL]
            assert found.num_tokens <= manager.compilation_config.max_cudagraph_capture_size
        return str(found.cg_mode.name)


@pytest.fixture(autouse=True)
def no_distribution() -> Iterator[None]:
    pipeline = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with (
        patch.object(cudagraph_utils, "get_pp_group", lambda: pipeline),
        patch.object(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, create=True),
    ):
        yield


def steps_of(K: int, rows: int) -> dict[str, list[int]]:
    """Tokens of each request in steps that the scheduler makes."""
    return {
        "plain": [1] * rows,
        "whole": [K + 1] * rows,
        "some": [K + 1] * (rows // 2) + [1] * (rows - rows // 2),
        "cut": [K + 1] * (rows - 1) + [K // 2 + 1],
        "short": [2] * rows,
    }


ALL = {"plain", "whole", "mixed"}


@pytest.mark.parametrize(
    ("options", "full", "name"),
    [
        ({}, ALL, "decode"),
        ({"bound": 65, "support": "UNIFORM_BATCH"}, ALL, "decode"),
        ({"adaptive": True}, ALL, "decode"),
        ({"mode": CUDAGraphMode.FULL}, ALL, "all"),
        ({"mode": CUDAGraphMode.FULL_DECODE_ONLY}, ALL, "decode"),
        ({"support": "UNIFORM_BATCH"}, {"plain", "whole"}, "backend"),
        ({"bound": 8, "support": "UNIFORM_BATCH"}, {"plain", "whole"}, "backend"),
        ({"decode_context_parallel_size": 2}, {"plain", "whole"}, "context"),
        ({"prefill_context_parallel_size": 2}, {"plain", "whole"}, "context"),
        ({"use_ubatching": True, "data_parallel_size": 2}, {"whole"}, "microbatches"),
        ({"has_states": True, "support": "UNIFORM_BATCH"}, {"whole"}, "states"),
        ({"pipeline_parallel_size": 2}, {"whole"}, "pipeline"),
        ({"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, set(), "no mode"),
        ({"mode": CUDAGraphMode.PIECEWISE}, set(), "no mode"),
    ],
)
@pytest.mark.parametrize("K", [8, 64])
def test_a_step_runs_full_where_the_backend_takes_its_lengths(
    K: int, options: dict[str, Any], full: set[str], name: str
) -> None:
    runner, theirs = Runner(K, 256, **options), Runner(0, 256, **options)
    runner.initialize_kv_cache()
    assert graphs.add_graphs(Runner(K, 256, **options))[0] == name
    assert runner.speculator.reporter.plain_graphs_alone == (full == {"plain", "whole"})
    for rows in (1, 2, 7, 8, 16, 30, 64, 100, 250, 256):
        for step, lengths in steps_of(K, rows).items():
            same = len(set(lengths)) == 1
            kind = {1: "plain", K + 1: "whole"}.get(lengths[0], "mixed") if same else "mixed"
            has_piecewise = runner.cudagraph_manager.cudagraph_mode.has_piecewise_cudagraphs()
            otherwise = "NONE" if sum(lengths) > 512 or not has_piecewise else "PIECEWISE"
            wanted = "FULL" if kind in full and sum(lengths) <= 512 else otherwise
            assert runner.mode_of(lengths) == wanted, f"{rows} rows, {step}"
            if kind == "plain" and "plain" in full:
                assert wanted == theirs.mode_of(lengths)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 33, 200, 250, 256, 500, 512, 1024])
@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 24]])
@pytest.mark.parametrize("support", ["ALWAYS", "UNIFORM_BATCH"])
def test_plain_steps_of_any_size_run_as_without_speculation(
    support: str, sizes: list[int] | None, max_num_seqs: int
) -> None:
    runner = Runner(16, max_num_seqs, support, sizes=sizes)
    theirs = Runner(0, max_num_seqs, support, sizes=sizes)
    runner.initialize_kv_cache()
    for rows in range(1, max_num_seqs + 1):
        assert runner.mode_of([1] * rows) in ("FULL", theirs.mode_of([1] * rows)), rows


def test_a_schedule_of_draft_tokens_keeps_its_graphs() -> None:
    """vLLM captures those of each number of draft tokens in it, none among them."""
    runner = Runner(16, 64, "UNIFORM_BATCH", schedule=[(1, 16, 16), (17, 32, 4), (33, 64, 0)])
    before = list(runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL])
    runner.initialize_kv_cache()
    assert runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL] == before
    assert [runner.mode_of([n] * 8) for n in (1, 5, 17, 2)] == ["FULL", "FULL", "FULL", "PIECEWISE"]


@pytest.mark.parametrize("foreign", ["no speculator", "another drafter", "turned off"])
def test_another_server_keeps_its_graphs(
    foreign: str, info_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(16, 64, "UNIFORM_BATCH")
    if foreign == "turned off":
        monkeypatch.setenv("GPU_ALIGN_CUDA_GRAPHS", "0")
    if foreign == "no speculator":
        runner.speculator = None
    elif foreign == "another drafter":
        runner.vllm_config.speculative_config.model = "somebody.Else"
    before = dict(runner.cudagraph_manager._capture_descs)
    runner.initialize_kv_cache()
    assert runner.cudagraph_manager._capture_descs == before
    assert ["GPU_ALIGN_CUDA_GRAPHS=0" in line for line in info_log] == [True] * (foreign == "turned off")

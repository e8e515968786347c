"""Adaptive verification: each place where vLLM refuses it, with vLLM's own code, ends in one warning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_integration.config import engine_config, in_use
from vllm_integration.seams import install as compat
from vllm_integration.seams.install import wrapped_by

pytestmark = pytest.mark.usefixtures("plugin_on")

GONE = "adaptive.maybe_create_adaptive_verification_manager"
OURS, THEIRS = "vllm_integration.PredictedOutputs", "somebody.Else"


def config_of(model: str = OURS, *, asked: bool = True, rank: int = 0) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="custom_class", model=model, enable_adaptive_verification=asked, num_speculative_tokens=16
        ),
        parallel_config=SimpleNamespace(rank=rank),
    )


def asked(config: Any) -> bool:
    return bool(config.speculative_config.enable_adaptive_verification)


def test_what_the_configuration_refuses_does_not_stop_the_server(plugin_log: list[str]) -> None:
    class Refusing:
        def __init__(self, model: str) -> None:
            vars(self).update(vars(config_of(model)))

        @wrapped_by(engine_config.or_without)
        def validate(self) -> None:
            if asked(self):
                raise ValueError("not currently compatible with LoRA")

    ours, theirs = Refusing(OURS), Refusing(THEIRS)
    ours.validate()
    ours.validate()
    assert not asked(ours)
    (line,) = plugin_log
    assert "LoRA" in line
    with pytest.raises(ValueError, match="LoRA"):
        theirs.validate()


@pytest.fixture
def backend_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's cached choice of an attention backend, wrapped, on a platform whose only backend cannot trim; and the
    choice's configuration."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    def choose(_: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        if attn_selector_config.block_size == 7:
            raise ValueError("block_size not supported")
        if attn_selector_config.use_adaptive_verification:
            raise ValueError("device-cpu query lens mismatch not supported")
        return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(choose))
    original = selector._cached_get_attn_backend
    original.cache_clear()
    config = selector.AttentionSelectorConfig(
        head_size=64, dtype=torch.float32, kv_cache_dtype=None, block_size=32, use_adaptive_verification=True
    )
    yield wrapped_by(engine_config.select_backend)(original), config
    original.cache_clear()


@pytest.mark.parametrize(
    ("config", "falls_back"),
    [(config_of(), True), (config_of(THEIRS), False), (None, False)],
    ids=["ours", "another drafter", "no drafter"],
)
def test_an_attention_backend_is_chosen_without(
    backend_choice: Any,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
    config: Any,
    falls_back: bool,
) -> None:
    import vllm.config

    choose, selector_config = backend_choice
    config = config or SimpleNamespace(speculative_config=None)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    if falls_back:
        for _ in range(2):  # each layer of a model asks
            assert choose(None, selector_config).get_name() == "CPU_ATTN"
        assert not asked(config)
        (line,) = plugin_log
        assert "query lens mismatch" in line
        with pytest.raises(ValueError, match="block_size"):  # not for want of adaptive verification
            choose(None, selector_config._replace(block_size=7))
    else:
        with pytest.raises(ValueError, match="query lens mismatch"):
            choose(None, selector_config)
        assert plugin_log == []


def groups_of(support: str, *, exact_lengths: bool = False) -> list[list[Any]]:
    """One attention group. support: of its CUDA graphs. exact_lengths: it needs query lengths on the host."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder

    class Builder(AttentionMetadataBuilder):
        def __init__(self) -> None: ...

        def build(self, *args: Any, **kwargs: Any) -> Any: ...

        @classmethod
        def get_cudagraph_support(cls, *args: Any) -> Any:
            return AttentionCGSupport[support]

    class Backend(AttentionBackend):
        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return not exact_lengths

    group = SimpleNamespace(
        layer_names=["layer"], backend=Backend, kv_cache_spec=None, get_metadata_builder=lambda _: Builder()
    )
    return [[group]]


def create(config: Any, groups: list[list[Any]]) -> Any:
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

    wrapped = wrapped_by(engine_config.or_without)(module.maybe_create_adaptive_verification_manager)
    return wrapped(
        enable_adaptive_verification=asked(config),
        attn_groups=groups,
        req_states=SimpleNamespace(num_speculative_steps=4),
        query_start_loc=torch.zeros(5),
        num_bonus_tokens=1,
        max_total_logits=100,
        vllm_config=config,
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"support": "UNIFORM_BATCH"}, "query lengths vary up to 5, but Backend allows none"),
        ({"support": "NEVER"}, "Backend allows none"),
        (
            {"support": "ALWAYS", "exact_lengths": True},
            "which the Backend attention backend does not support",
        ),
    ],
    ids=["FlashAttention 2", "no graphs", "lengths on the host"],
)
def test_a_model_runner_goes_on_without_its_manager(
    groups: dict[str, Any], words: str, plugin_log: list[str]
) -> None:
    config = config_of()
    assert create(config, groups_of(**groups)) is None
    assert not asked(config)
    (line,) = plugin_log
    assert words in line
    assert create(config, groups_of(**groups)) is None  # vLLM asks again after it has profiled its memory
    assert len(plugin_log) == 1
    with pytest.raises(ValueError, match="Adaptive verification"):
        create(config_of(THEIRS), groups_of(**groups))


def test_only_the_first_rank_warns(plugin_log: list[str]) -> None:
    config = config_of(rank=1)
    engine_config.do_without(config, "reason")
    assert not asked(config)
    assert plugin_log == []


class V1Config:
    use_v2_model_runner = False
    scheduler_config = SimpleNamespace(async_scheduling=False, scheduler_cls=None, max_num_seqs=4)

    def __init__(self, is_hybrid: bool = False, is_attention_free: bool = False) -> None:
        vars(self).update(vars(config_of()))
        self.model_config = SimpleNamespace(
            is_hybrid=is_hybrid, is_attention_free=is_attention_free, architecture=""
        )

    @wrapped_by(engine_config.post_init)
    def post_init(self) -> None:
        assert not asked(self)  # vLLM raises here


@pytest.mark.parametrize("kind", ["is_hybrid", "is_attention_free"])
def test_a_recurrent_model_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with pytest.raises(ValueError, match=r"CPU kernels .* start this model without speculative_config"):
        V1Config(**{kind: True}).post_init()
    monkeypatch.setattr(engine_config, "has_cpu_kernels", lambda: False)
    with pytest.raises(ValueError, match=r"only where that was run, .* without speculative_config"):
        V1Config(**{kind: True}).post_init()


@pytest.mark.parametrize(
    ("architecture", "layers", "runner", "served"),
    [
        ("FalconH1ForCausalLM", "is_hybrid", "V2", True),
        ("Qwen3_5MoeForConditionalGeneration", "is_hybrid", "V2", True),
        ("Mamba2ForCausalLM", "is_attention_free", "V2", True),
        ("Mamba2ForCausalLM", "is_attention_free", "V1", False),
        ("Qwen3NextForCausalLM", "is_hybrid", "V1", False),
        ("MambaForCausalLM", "is_attention_free", "V2", False),
        ("JambaForCausalLM", "is_hybrid", "V2", False),
        ("Lfm2ForCausalLM", "is_hybrid", "V2", False),
        ("MiniMaxText01ForCausalLM", "is_hybrid", "V2", False),
        ("LlamaForCausalLM", "", "V1", True),
    ],
)
def test_recurrent_layers_that_were_not_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, architecture: str, layers: str, runner: str, served: bool
) -> None:
    monkeypatch.setattr(engine_config, "has_cpu_kernels", lambda: False)
    model = SimpleNamespace(is_hybrid=False, is_attention_free=False, architecture=architecture)
    if layers:
        setattr(model, layers, True)
    config = SimpleNamespace(model_config=model, use_v2_model_runner=runner == "V2")
    assert bool(engine_config.refused_layers(config)) is not served


def test_v1_does_without(plugin_log: list[str]) -> None:
    V1Config().post_init()
    (line,) = plugin_log
    assert "V1" in line


def test_a_vllm_whose_refusals_cannot_be_caught_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    changed = [replace(seam, parameters=("changed",)) for seam in compat.SEAMS if seam.name == GONE]
    assert changed
    monkeypatch.setattr(compat, "SEAMS", tuple(changed))
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    engine_config.prepare(config_of(asked=False))
    assert plugin_log == []
    config = config_of()
    engine_config.prepare(config)
    assert not asked(config)
    assert "expected parameters changed" in plugin_log[0]
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(compat.SeamError):
        engine_config.prepare(config_of())


class Known:
    """As much of vLLM's `SpeculativeConfig`."""

    enable_adaptive_verification = False

    def __init__(self, **fields: Any) -> None:
        self.draft_sample_method, self.model = "greedy", None
        vars(self).update(fields)
        if self.method == "nonsense":
            raise ValueError("vLLM's own")


def known(num_speculative_tokens: int = 16, *, v2: bool = True) -> Any:
    drafts = {"num_speculative_tokens": num_speculative_tokens, "model": OURS}
    speculative = Known(method="custom_class", target_model_config="m", target_parallel_config="p", **drafts)
    return SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)


MTP = '{"method": "mtp", "num_speculative_tokens": 3}'


@pytest.mark.parametrize("k", [2, 16])
def test_vllms_own_drafter_is_configured_as_without_us(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """The engine has room for the longer drafts of the two."""
    monkeypatch.setenv("GPU_ALIGN_DRAFTER", MTP)
    config = known(k)
    for _ in range(2):  # vLLM checks a configuration more than once
        engine_config._take_inner_drafter(config)
        speculative = config.speculative_config
        assert (speculative.method, speculative.num_speculative_tokens) == ("mtp", max(k, 3))
        assert (speculative.target_model_config, speculative.target_parallel_config) == ("m", "p")
        assert (in_use.inner_tokens(config), in_use.drafts_predictions(config)) == (3, True)
    inner = engine_config.inner_config(config)
    assert (inner.speculative_config.num_speculative_tokens, in_use.drafts_predictions(inner)) == (3, False)
    assert in_use.inner_tokens(config) == 3
    theirs = SimpleNamespace(speculative_config=Known(method="mtp", num_speculative_tokens=3))
    engine_config._take_inner_drafter(theirs)
    assert not in_use.drafts_predictions(theirs)


@pytest.mark.parametrize(
    ("given", "v2", "message"),
    [
        ("mtp", True, "as JSON, .* got 'mtp'"),
        ("[1]", True, "as JSON, .* got '\\[1\\]'"),
        ('{"num_speculative_tokens": 3}', True, "as JSON"),
        ('{"method": "custom_class"}', True, "as JSON"),
        (MTP, False, "V2 model runner, the engine uses V1"),
        (
            MTP[:-1] + ', "draft_sample_method": "probabilistic"}',
            True,
            "expected draft_sample_method 'greedy'",
        ),
        (
            MTP[:-1] + ', "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 0]]}',
            True,
            "expected a fixed num_speculative_tokens",
        ),
        ('{"method": "nonsense"}', True, "^vLLM's own$"),
    ],
)
def test_a_drafter_that_cannot_be_had_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, given: str, v2: bool, message: str
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DRAFTER", given)
    with pytest.raises(ValueError, match=message):
        engine_config._take_inner_drafter(known(v2=v2))

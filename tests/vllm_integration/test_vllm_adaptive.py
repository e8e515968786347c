"""What becomes of an engine's configuration: adaptive verification, recurrent layers, vLLM's own drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_integration.config import engine_config, in_use
from vllm_integration.seams.install import wrapped_by

pytestmark = pytest.mark.usefixtures("plugin_on")

OURS = "vllm_integration.PredictedOutputs"


def config_of(rank: int = 0) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="custom_class", model=OURS, enable_adaptive_verification=True, num_speculative_tokens=16
        ),
        parallel_config=SimpleNamespace(rank=rank),
    )


def asked(config: Any) -> bool:
    return bool(config.speculative_config.enable_adaptive_verification)


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


def test_v1_turns_adaptive_verification_off(plugin_log: list[str]) -> None:
    V1Config().post_init()
    (line,) = plugin_log
    assert "V1" in line


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

"""Settings and the configuration of an engine: checked where they matter, all at once, before a worker starts, and
only where they are used."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_align import DrafterConfig
from gpu_align.drafter.survival import KNOTS
from gpu_align.ops.choose import NUM_CLASSES
from gpu_align.tools.tune.tuning import make_table, write_table
from tests.vllm_integration.fakes import config
from vllm_integration.config import engine_config, in_use
from vllm_integration.config.settings import Settings, warn_of_unknown_names
from vllm_integration.seams import guard
from vllm_integration.worker.startup import drafter_config

pytest.importorskip("vllm.config.vllm")


def test_settings_from_the_environment() -> None:
    assert Settings.from_env({}) == Settings()
    given = {
        "strict": ("1", True), "draft_without_prediction": ("Yes", True), "max_prediction_tokens": ("100", 100),
        "debug_dir": ("/x", "/x"), "max_slowdown": (" 1.5 ", 1.5), "arena_tokens": ("600", 600),
    }  # fmt: skip
    settings = Settings.from_env({f"GPU_ALIGN_{name.upper()}": text for name, (text, _) in given.items()})
    assert settings == Settings(**{name: value for name, (_, value) in given.items()})
    assert settings.prediction_capacity(50) == 50
    assert settings.prediction_capacity(500) == 100
    assert Settings().prediction_capacity(500) == 500
    assert Settings().prediction_capacity(2**22) == 2**21 - 1
    # Room for the longest prediction at least, and for no more than can be needed: 3 slots of 2 pages, 8 pages.
    assert settings.prediction_room(3, 400) == 600
    assert settings.prediction_room(3, 700) == 700
    assert Settings().prediction_room(3, 500) == 8 * 256
    assert Settings().prediction_room(1024, 32_768) == 4 * 2**20


@pytest.mark.parametrize(
    ("value", "pack"),
    [
        (None, "base"),
        (" ", "base"),
        ("Base", "base"),
        ("OFF", "off"),
        ("0", "off"),
        ("no", "off"),
        (" /packs/Mine.json.gz ", "/packs/Mine.json.gz"),
        ("./off", "./off"),
        ("Base, triage@2 ,/packs/House.json", "base,triage@2,/packs/House.json"),
    ],
)
def test_recipes_are_names_and_paths(value: str | None, pack: str) -> None:
    assert Settings.from_env({} if value is None else {"GPU_ALIGN_RECIPES": value}).recipes == pack


def test_more_packs_than_a_drafter_tells_apart_are_refused() -> None:
    assert len(Settings.from_env({"GPU_ALIGN_RECIPES": ",".join("x" * 31)}).packs) == 31
    with pytest.raises(ValueError, match="GPU_ALIGN_RECIPES: expected base, off, or 1 to 31 packs"):
        Settings.from_env({"GPU_ALIGN_RECIPES": ",".join("x" * 32)})


UNREADABLE = {
    "STRICT": ["maybe"],
    "DRAFT_WITHOUT_PREDICTION": ["2"],
    "MAX_PREDICTION_TOKENS": ["0", "-4", "many"],
    "ARENA_TOKENS": ["0"],
    "MAX_SLOWDOWN": ["0.99", "-1", "nan", "inf", "80%"],
    "RECIPES": ["base,,x", "base,off"],
    "MEMORY_TOKENS": ["-1", "a lot"],
    "DRAFTER_FILLS": ["3"],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_settings_are_named(name: str) -> None:
    for value in UNREADABLE[name]:
        with pytest.raises(ValueError, match=f"GPU_ALIGN_{name}: expected .*got '{value}'"):
            Settings.from_env({f"GPU_ALIGN_{name}": value})


def test_all_that_cannot_be_read_is_told_in_one_line() -> None:
    wrong = {"GPU_ALIGN_MAX_BODY_BYTES": "4MB", "GPU_ALIGN_MAX_SLOWDOWN": "0.5", "GPU_ALIGN_STRICT": "1"}
    with pytest.raises(ValueError, match="GPU_ALIGN") as error:
        Settings.from_env(wrong)
    assert sorted(str(error.value).split("; ")) == [
        "GPU_ALIGN_MAX_BODY_BYTES: expected a positive number of bytes, got '4MB'",
        "GPU_ALIGN_MAX_SLOWDOWN: expected a number, 1 or more, got '0.5'",
    ]


# --- the configuration of an engine ---


def post_init(vllm_config: Any) -> list[Any]:
    """The configurations for which vLLM's own `__post_init__` was reached."""
    made: list[Any] = []
    engine_config.post_init(made.append, vllm_config)
    return made


def test_the_configuration_fails_before_a_worker_starts_and_only_with_our_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(post_init(config())) == 1
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "4MB")
    assert len(post_init(config(method="ngram"))) == 1
    with pytest.raises(ValueError, match="GPU_ALIGN_MAX_BODY_BYTES: expected a positive number of bytes"):
        post_init(config())


def test_settings_travel_with_the_configuration_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_MAX_SLOWDOWN", "7")
    (made,) = post_init(config())
    sent = pickle.loads(pickle.dumps(made.speculative_config))
    monkeypatch.setenv("GPU_ALIGN_MAX_SLOWDOWN", "9")  # on another machine, or none there
    assert Settings.of(SimpleNamespace(speculative_config=sent)).max_slowdown == 7
    engine_config.post_init(lambda _: None, made)  # a copy of the configuration, made by a worker
    assert Settings.of(made).max_slowdown == 7
    assert Settings.of(config()).max_slowdown == 9


def test_unknown_names_are_warned_of_once_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    warn_of_unknown_names.cache_clear()
    monkeypatch.setenv("GPU_ALIGN_DEBUGDIR", "/x")
    monkeypatch.setenv("GPU_ALIGN_SURE", "0.5")
    monkeypatch.setenv("GPU_ALIGN_USAGE_DETAILS", "0")
    post_init(config(method="ngram"))
    assert plugin_log == []
    for _ in range(2):
        post_init(config())
    warn_of_unknown_names.cache_clear()
    assert plugin_log == [
        "GPU_ALIGN_DEBUGDIR is not a setting of gpu_align; the nearest one is GPU_ALIGN_DEBUG_DIR",
        "GPU_ALIGN_SURE is no setting any more; in its place is GPU_ALIGN_MAX_SLOWDOWN",
    ]


@pytest.mark.parametrize(
    ("asked", "more", "used", "why"),
    [
        *((asked, {}, min(asked, 128), "V1 sampler verifies") for asked in (1, 127, 128, 129, 1000)),
        (63, {"v2": True, "max_num_batched_tokens": 64}, 63, ""),
        (64, {"v2": True, "max_num_batched_tokens": 64}, 63, "the most that fit"),
        (200, {"v2": True, "max_num_batched_tokens": 64}, 63, "the most that fit"),
        (200, {"v2": True}, 200, ""),
        *((asked, {"v2": True}, min(asked, 256), "its kernel makes") for asked in (256, 257, 1000)),
        (300, {"v2": True, "max_num_batched_tokens": 257}, 256, ""),
        (300, {"v2": True, "max_num_batched_tokens": 256}, 255, "the most that fit"),
        (1, {"v2": True, "max_num_batched_tokens": 1}, 1, ""),
        (200, {"method": "ngram", "max_num_batched_tokens": 64}, 200, ""),
    ],
)
def test_no_more_drafts_than_the_sampler_verifies_or_a_batch_has_room_for(
    asked: int, more: dict[str, Any], used: int, why: str, plugin_log: list[str]
) -> None:
    vllm_config = config(asked, **more)
    for _ in range(2):  # vLLM may make a configuration again
        (made,) = post_init(vllm_config)
        assert made.speculative_config.num_speculative_tokens == used
    said = [line for line in plugin_log if "num_speculative_tokens" in line]
    assert len(said) == (asked > used)
    assert all(f"is {asked}; gpu_align uses {used}, " in line and why in line for line in said)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}, "per_batch_size is not used: the V1 model"),
        ({"num_speculative_tokens_per_batch_size": [(1, 8, 3)], "v2": True}, ""),
        ({"num_speculative_tokens_per_batch_size": None}, ""),
        ({"max_model_len": 4194303, "v2": True}, ""),
        *(
            ({"max_model_len": 4194304, "v2": v2}, "nothing: max_model_len: expected at most 4194303 tokens, got")
            for v2 in (False, True)
        ),
    ],
)  # fmt: skip
def test_what_is_not_used_is_said(given: dict[str, Any], says: str, plugin_log: list[str]) -> None:
    guard.warn_once.cache_clear()
    (made,) = post_init(config(**given))
    assert [says in line for line in plugin_log] == [True] * bool(says), plugin_log
    if "num_speculative_tokens_per_batch_size" in given:
        schedule = given["num_speculative_tokens_per_batch_size"]
        kept = made.speculative_config.num_speculative_tokens_per_batch_size
        assert kept == (schedule if made.use_v2_model_runner else None)


def test_vllms_own_drafter_is_capped_with_us() -> None:
    vllm_config = config(300, v2=True, max_num_batched_tokens=64, method="mtp", **{in_use.INNER: 100})
    (made,) = post_init(vllm_config)
    assert (made.speculative_config.num_speculative_tokens, in_use.inner_tokens(made)) == (63, 63)


NOT_RUN, ON_CPU = "only where that was run", "CPU kernels"


@pytest.mark.parametrize(
    ("architecture", "layers", "runner", "why"),
    [
        ("FalconH1ForCausalLM", "is_hybrid", "V2", ""),
        ("Qwen3_5MoeForConditionalGeneration", "is_hybrid", "V2", ""),
        ("Mamba2ForCausalLM", "is_attention_free", "V2", ""),
        ("Mamba2ForCausalLM", "is_attention_free", "V1", NOT_RUN),
        ("Qwen3NextForCausalLM", "is_hybrid", "V1", NOT_RUN),
        ("MambaForCausalLM", "is_attention_free", "V2", NOT_RUN),
        ("JambaForCausalLM", "is_hybrid", "V2", NOT_RUN),
        ("Lfm2ForCausalLM", "is_hybrid", "V2", NOT_RUN),
        ("MiniMaxText01ForCausalLM", "is_hybrid", "V2", NOT_RUN),
        ("FalconH1ForCausalLM", "is_hybrid", "V2", ON_CPU),
        ("Mamba2ForCausalLM", "is_attention_free", "V1", ON_CPU),
        ("LlamaForCausalLM", "", "V1", ""),
    ],
)
def test_recurrent_layers_that_were_not_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, architecture: str, layers: str, runner: str, why: str
) -> None:
    monkeypatch.setattr(engine_config, "has_cpu_kernels", lambda: why == ON_CPU)
    refused = pytest.raises(ValueError, match=rf"{why}.*start this model without speculative_config")
    with refused if why else nullcontext():
        post_init(config(v2=runner == "V2", layers=layers, architecture=architecture))


def test_v1_turns_adaptive_verification_off(plugin_log: list[str]) -> None:
    """Before vLLM's own check, which raises."""
    asked: list[bool] = []
    vllm_config = config(enable_adaptive_verification=True)
    engine_config.post_init(
        lambda made: asked.append(made.speculative_config.enable_adaptive_verification), vllm_config
    )
    assert asked == [False]
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
    drafts = {"num_speculative_tokens": num_speculative_tokens, "model": "vllm_integration.PredictedOutputs"}
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
        post_init(known(v2=v2))


# A survival table of one's own.


def test_the_server_drafts_with_the_table_and_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    survival = np.full((NUM_CLASSES, len(KNOTS)), 1000)
    settings = {"length_factor": 3.0, "min_survival": 0.2}
    write_table(make_table(survival, [0.0] * 20, np.ones(NUM_CLASSES), 9, "a test", settings), path)
    given = Settings.from_env({"GPU_ALIGN_SURVIVAL_TABLE": str(path)}).survival_table
    assert drafter_config(given) == DrafterConfig(
        length_factor=3.0, min_survival=0.2, survival_table=str(path)
    )
    assert drafter_config(Settings.from_env({}).survival_table) == DrafterConfig()
    least = Settings.from_env({"GPU_ALIGN_MIN_MATCH": "3"}).min_match
    for table, expected in ((None, DrafterConfig()), (given, drafter_config(given))):
        assert drafter_config(table, least) == replace(expected, min_match=3)


@pytest.mark.parametrize("content", [None, "", "{", '{"a": 1}'], ids=["missing", "empty", "torn", "foreign"])
def test_an_invalid_table_costs_one_warning(
    content: str | None, tmp_path: Path, plugin_log: list[str]
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    drafter_config.cache_clear()
    for _ in range(3):
        assert drafter_config(str(path)) == DrafterConfig()
    (line,) = plugin_log
    assert "GPU_ALIGN_SURVIVAL_TABLE" in line
    assert "\n" not in line

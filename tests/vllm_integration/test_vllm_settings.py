"""Settings are checked where they matter: all at once, before a worker starts, and only where they are used."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_align import DrafterConfig
from gpu_align.ops.choose import NUM_CLASSES
from gpu_align.ops.choose.survival import KNOTS
from gpu_align.tools.tune.tuning import make_table, write_table
from tests.vllm_integration.fakes import config
from vllm_integration.config import engine_config
from vllm_integration.config.settings import Settings, warn_of_unknown_names
from vllm_integration.worker.startup import drafter_config


def test_settings_from_the_environment() -> None:
    assert Settings.from_env({}) == Settings()
    given = {
        "strict": ("1", True), "draft_without_prediction": ("Yes", True), "max_prediction_tokens": ("100", 100),
        "debug_dir": ("/x", "/x"), "max_draft_tokens": ("512", 512), "fill_tokens": ("0", 0),
        "sure": (" 0.75 ", 0.75), "arena_tokens": ("600", 600),
    }  # fmt: skip
    settings = Settings.from_env({f"GPU_ALIGN_{name.upper()}": text for name, (text, _) in given.items()})
    assert settings == Settings(**{name: value for name, (_, value) in given.items()})
    assert settings.prediction_capacity(50) == 50
    assert settings.prediction_capacity(500) == 100
    assert Settings().prediction_capacity(500) == 500
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPU_ALIGN_STRICT", "maybe"),
        ("GPU_ALIGN_DRAFT_WITHOUT_PREDICTION", "2"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "0"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "-4"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "many"),
        ("GPU_ALIGN_ARENA_TOKENS", "0"),
        ("GPU_ALIGN_FILL_TOKENS", "-1"),
        ("GPU_ALIGN_FILL_TOKENS", "1.5"),
        ("GPU_ALIGN_SURE", "1.01"),
        ("GPU_ALIGN_SURE", "-0.1"),
        ("GPU_ALIGN_SURE", "nan"),
        ("GPU_ALIGN_SURE", "80%"),
        ("GPU_ALIGN_RECIPES", "base,,x"),
        ("GPU_ALIGN_RECIPES", "base,off"),
        ("GPU_ALIGN_MEMORY_TOKENS", "-1"),
        ("GPU_ALIGN_MEMORY_TOKENS", "a lot"),
        ("GPU_ALIGN_DRAFTER_FILLS", "3"),
    ],
)
def test_unreadable_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*got '{value}'"):
        Settings.from_env({name: value})


def test_all_that_cannot_be_read_is_told_in_one_line() -> None:
    wrong = {"GPU_ALIGN_MAX_BODY_BYTES": "4MB", "GPU_ALIGN_SURE": "2", "GPU_ALIGN_STRICT": "1"}
    with pytest.raises(ValueError, match="GPU_ALIGN") as error:
        Settings.from_env(wrong)
    assert sorted(str(error.value).split("; ")) == [
        "GPU_ALIGN_MAX_BODY_BYTES: expected a positive number of bytes, got '4MB'",
        "GPU_ALIGN_SURE: expected a number from 0 to 1, got '2'",
    ]


def post_init(method: str) -> list[Any]:
    """The configurations for which vLLM's own `__post_init__` was reached."""
    made: list[Any] = []
    vllm_config = config()
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = False
    vllm_config.scheduler_config = SimpleNamespace(async_scheduling=False, scheduler_cls=None, max_num_seqs=4)
    engine_config.post_init(made.append, vllm_config)
    return made


@pytest.mark.usefixtures("plugin_on")
def test_the_configuration_fails_before_a_worker_starts_and_only_with_our_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(post_init("custom_class")) == 1
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "4MB")
    assert len(post_init("ngram")) == 1
    with pytest.raises(ValueError, match="GPU_ALIGN_MAX_BODY_BYTES: expected a positive number of bytes"):
        post_init("custom_class")


@pytest.mark.usefixtures("plugin_on")
def test_settings_travel_with_the_configuration_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_FILL_TOKENS", "7")
    (made,) = post_init("custom_class")
    sent = pickle.loads(pickle.dumps(made.speculative_config))
    monkeypatch.setenv("GPU_ALIGN_FILL_TOKENS", "9")  # on another machine, or none there
    assert Settings.of(SimpleNamespace(speculative_config=sent)).fill_tokens == 7
    assert Settings.here().fill_tokens == 7
    engine_config.post_init(lambda _: None, made)  # a copy of the configuration, made by a worker
    assert Settings.of(made).fill_tokens == 7
    assert Settings.of(config()).fill_tokens == 9


@pytest.mark.usefixtures("plugin_on")
def test_unknown_names_are_warned_of_once_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    warn_of_unknown_names.cache_clear()
    monkeypatch.setenv("GPU_ALIGN_DEBUGDIR", "/x")
    monkeypatch.setenv("GPU_ALIGN_USAGE_DETAILS", "0")
    post_init("ngram")
    assert plugin_log == []
    for _ in range(2):
        post_init("custom_class")
    warn_of_unknown_names.cache_clear()
    assert plugin_log == [
        "GPU_ALIGN_DEBUGDIR is not a setting of gpu_align; the nearest one is GPU_ALIGN_DEBUG_DIR"
    ]


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

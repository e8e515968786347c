"""Settings are checked where they matter: all at once, before a worker starts, and only where they are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import config

from vllm_integration.config import engine_config
from vllm_integration.config.settings import Settings, warn_of_unknown_names


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

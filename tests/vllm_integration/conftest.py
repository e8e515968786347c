"""Fixtures of the plugin's tests: a tiny real model, its outputs by transformers, one engine, one server.

The engine and the server start once a session; tests that use them are marked `vllm`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import build, greedy_by_transformers
from vllm_harness import ENVIRONMENT, MAX_MODEL_LEN, K, OfflineEngine, Server

from vllm_integration.seams import install as compat


@pytest.fixture
def plugin_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin on before the test, and in its old state after it."""
    monkeypatch.setattr(compat, "_off_reason", None)


@contextmanager
def _lines_of_the_log(level: int) -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = compat.logger.level
    compat.logger.addHandler(handler)
    compat.logger.setLevel(min(before or level, level))
    yield lines
    compat.logger.setLevel(before)
    compat.logger.removeHandler(handler)


@pytest.fixture
def plugin_log() -> Iterator[list[str]]:
    """The plugin's log lines from WARNING up. (vLLM cuts its loggers off from the root, so no `caplog`.)"""
    with _lines_of_the_log(logging.WARNING) as lines:
        yield lines


@pytest.fixture
def info_log() -> Iterator[list[str]]:
    """Those from INFO up."""
    with _lines_of_the_log(logging.INFO) as lines:
        yield lines


@pytest.fixture(scope="module")
def request_app() -> Iterator[Any]:
    """vLLM's HTTP application around a fake serving, with the plugin on and its settings at their defaults."""
    from request_app import make_app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "_off_reason", None)
        for name in [name for name in os.environ if name.startswith("GPU_ALIGN_")]:
            patch.delenv(name)
        yield make_app()


@pytest.fixture(scope="session")
def byte_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model can write any text, JSON too; stopped at the end."""
    from byte_llama import build as build_byte_llama
    from request_server import serve

    model = build_byte_llama(tmp_path_factory.mktemp("byte-llama"))
    no_free_space = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    with serve(model, tmp_path_factory.mktemp("byte-server"), *no_free_space) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama and its tokenizer."""
    return build(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def greedy(tiny_llama: Path) -> Callable[[list[int], int], list[int]]:
    """`greedy(prompt, n)`: the next n tokens by transformers, which knows nothing of drafts."""
    return greedy_by_transformers(tiny_llama)


@pytest.fixture(scope="session")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    """A real engine in this process. Its KV cache holds 768 tokens, so that a few long requests preempt
    each other, and 64 tokens a step, so that longer prompts are prefilled in chunks."""
    logs = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("GPU_ALIGN_DEBUG_DIR", str(logs))
        from vllm import LLM

        llm = LLM(
            str(tiny_llama),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            block_size=32,
            num_gpu_blocks_override=24,
            max_num_batched_tokens=64,
            enable_chunked_prefill=True,
            disable_log_stats=False,
            speculative_config={
                "method": "custom_class",
                "model": "vllm_integration.PredictedOutputs",
                "num_speculative_tokens": K,
            },
        )
        yield OfflineEngine(llm, logs)


@pytest.fixture(scope="session")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The OpenAI server as a user starts it, in its own process, without recipes; stopped at the end.

    Its step logs grow with each step, which a log that has ended does not show, and it tells of each request."""
    from request_server import serve

    if not any(point.name == "gpu_align" for point in entry_points(group="vllm.general_plugins")):
        pytest.fail("vLLM finds the plugin by its entry point: run `pip install -e .` first")
    directory = tmp_path_factory.mktemp("server")
    variables = {"GPU_ALIGN_RECIPES": "off", "GPU_ALIGN_DEBUG_LIVE": "1", "GPU_ALIGN_VERBOSE": "1"}
    options = ("--enable-log-requests", "--cudagraph-metrics")
    with serve(tiny_llama, directory, *options, environment=variables) as running:
        yield running

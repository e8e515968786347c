"""Fixtures of the plugin's tests: a tiny real model and a server of it.

The server starts once a session; tests that use it are marked `vllm`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Server, serve
from tests.vllm.tiny_llama import build_bytes
from vllm_integration.budget import compiled
from vllm_integration.config import in_use
from vllm_integration.frontend import prediction, streams
from vllm_integration.seams import guard
from vllm_integration.seams import install as compat

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin and all of its parts on, no setting but that there are no recipes, nothing told."""
    for name in [name for name in os.environ if name.startswith("GPU_ALIGN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "off")
    monkeypatch.delenv(guard._TOLD, raising=False)
    in_use.engine_of_request.set(None)
    monkeypatch.setattr(compat, "_off_reason", None)
    monkeypatch.setattr(guard, "_faults", {})
    for each in (prediction.reading, prediction.counting, streams._guard):
        monkeypatch.setattr(each, "_count", 0)
        monkeypatch.setattr(each, "_until", -math.inf)
        monkeypatch.setattr(each, "_told", set())


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
def request_app() -> Any:
    """vLLM's HTTP application around a fake serving."""
    from tests.vllm_integration.fakes import make_app

    return make_app()


@pytest.fixture(scope="session")
def byte_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model can write any text, JSON too; stopped at the end."""
    from vllm_integration.demo.model import CHAT_TEMPLATE

    model = build_bytes(tmp_path_factory.mktemp("byte-llama"))
    call = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    calls = "{% for c in message.tool_calls or [] %}" + call + "{% endfor %}<|end|>"
    template = ("--chat-template", CHAT_TEMPLATE.replace("<|end|>", calls))
    no_free_space = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "xlam")
    with serve(
        model, tmp_path_factory.mktemp("byte-server"), *no_free_space, *parser, *template, runner="V1"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The OpenAI server in its own process, without recipes, which tells of each request; stopped at the end."""
    if not any(point.name == "gpu_align" for point in entry_points(group="vllm.general_plugins")):
        pytest.fail("vLLM finds the plugin by its entry point: run `pip install -e .` first")
    directory = tmp_path_factory.mktemp("server")
    variables = {"GPU_ALIGN_RECIPES": "off", "GPU_ALIGN_VERBOSE": "1"}
    options = {"environment": variables, "runner": "V1"}
    with serve(tiny_model, directory, "--enable-log-requests", **options) as running:
        yield running


@pytest.fixture(params=["plain", "compiled"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's loops as Python runs them, and as Numba has compiled them."""
    if request.param == "compiled":
        compiled.compile_loops()
    for loop in compiled.LOOPS if request.param == "plain" else ():
        monkeypatch.setattr(loop, "_run", loop.plain)

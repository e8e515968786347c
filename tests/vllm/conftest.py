"""Fixtures of the tests of vLLM's V2 model runner: one engine process a set of settings, each once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import SHORT, V2Engine
from tests.vllm.tiny_llama import Greedy, greedy_by_transformers


@pytest.fixture(scope="session")
def greedy(tiny_model: Path) -> Greedy:
    """`greedy(prompt, n)`: the next n tokens by transformers, which knows nothing of drafts."""
    return greedy_by_transformers(tiny_model)


@pytest.fixture(scope="session")
def start_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., V2Engine]]:
    """`start_engine(name, **settings)`: an engine, started when it is first asked for."""
    with ExitStack() as stack:
        running: dict[str, V2Engine] = {}

        def start(name: str, **settings: Any) -> V2Engine:
            if name not in running:
                directory = tmp_path_factory.mktemp(name)
                running[name] = stack.enter_context(V2Engine(tiny_model, directory, **settings))
            return running[name]

        yield start


@pytest.fixture(scope="session")
def k16(start_engine: Callable[..., V2Engine]) -> V2Engine:
    """K = 16, asynchronous scheduling; draft lengths reach the scheduler a step late. It runs our kernels."""
    settings = {"asynchronous": True, "delay_counts": True, "kernels": True, "environment": SHORT}
    return start_engine("k16", num_draft_tokens=16, **settings)

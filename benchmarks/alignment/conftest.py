"""Options, order and results of the pytest-benchmark suite: ``make bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "on the CPU, too, every size: batch up to 1,024, texts up to 32k"
    parser.addoption("--full", action="store_true", help=said)
    parser.addoption("--rows", type=Path, metavar="FILE", help="append a line of JSON for each benchmark")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "largest(n, power=1): batch times size to that power without --full")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run GPU rows first, then small before large: a run that is stopped has the most valuable rows."""

    def key(item: Any) -> tuple[bool, int]:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return "gpu" not in item.name, params.get("batch", 1) * params.get("size", 1)

    items.sort(key=key)


@pytest.fixture(autouse=True)
def skip_large(request: pytest.FixtureRequest) -> None:
    """Tests of one contestant have ``batch`` and ``size``; `largest` marks what is done in good time."""
    if request.config.getoption("--full"):
        return
    for mark in request.node.iter_markers("largest"):
        (most, power), params = (*mark.args, 1)[:2], request.node.callspec.params
        if params["batch"] * params["size"] ** power > most:
            pytest.skip(f"larger than {most:,}: --full")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: Any) -> Any:
    """Append a row: what was timed, microseconds of the call and, on a GPU, of the device."""
    path, benchmark = item.config.getoption("--rows"), getattr(item, "funcargs", {}).get("benchmark")
    if path and benchmark is not None and benchmark.stats is not None:
        stats = benchmark.stats.stats
        row = {"name": item.name, "verdict": "passed", "group": benchmark.group, "rounds": stats.rounds}
        row |= {"us": round(stats.median * 1e6, 2), "iqr_us": round(stats.iqr * 1e6, 2)}
        with path.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps({**row, **benchmark.extra_info}) + "\n")
    yield

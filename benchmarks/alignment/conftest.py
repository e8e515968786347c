"""Options, order and results of the pytest-benchmark suite: ``make bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.alignment.workload import machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="on the CPU, too, every size: batch up to 1,024, texts up to 32k"
    )
    parser.addoption("--rows", type=Path, metavar="FILE", help="append a line of JSON for each benchmark")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "largest(tokens): batch times size that the CPU does without --full")
    config.addinivalue_line("markers", "most_cells(cells): of an LCS that a GPU does without --full")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run GPU rows first, then small before large: a run that is stopped has the most valuable rows."""

    def key(item: Any) -> tuple[bool, int]:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return "gpu" not in item.name, params.get("batch", 1) * params.get("size", 1)

    items.sort(key=key)


@pytest.fixture(autouse=True)
def skip_large(request: pytest.FixtureRequest) -> None:
    """Tests of one contestant have ``batch`` and ``size``; `largest` marks what the CPU does in good time."""
    if request.config.getoption("--full"):
        return
    for name, power, unit in (("largest", 1, "tokens"), ("most_cells", 2, "cells")):
        mark = request.node.get_closest_marker(name)
        if mark is None:
            continue
        params = request.node.callspec.params
        if params["batch"] * params["size"] ** power > mark.args[0]:
            pytest.skip(f"more than {mark.args[0]:,} {unit}: --full")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: Any) -> Any:
    """Append a row: what was timed, by whom, microseconds of the call and, on a GPU, of the device."""
    path, benchmark = item.config.getoption("--rows"), getattr(item, "funcargs", {}).get("benchmark")
    if path and benchmark is not None and benchmark.stats is not None:
        stats, params = benchmark.stats.stats, item.callspec.params
        contestant = params.get("name") or item.name.partition("[")[0].removeprefix("test_")
        row = {
            "group": benchmark.group,
            "contestant": contestant,
            "rounds": stats.rounds,
            "machine": machine(),
        }
        times = {"us": round(stats.median * 1e6, 2), "iqr_us": round(stats.iqr * 1e6, 2)}
        with path.open("a", encoding="utf-8") as rows:
            rows.write(
                json.dumps({"name": item.name, "verdict": "passed", **row, **times, **benchmark.extra_info})
            )
            rows.write("\n")
    yield

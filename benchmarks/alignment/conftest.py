"""Options and machine of the pytest-benchmark suite: ``make bench``."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="on the CPU, too, every size: batch up to 1,024, texts up to 32k"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "largest(tokens): batch times size that the CPU does without --full")
    config.addinivalue_line("markers", "most_cells(cells): of an LCS that a GPU does without --full")


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

"""How much the campaign checks: `--campaign-count N` times as many cases as `make test`, drawn from another
seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`count(n)`: how many cases to check where `make test` checks n."""
    times: int = request.config.getoption("--campaign-count")
    return lambda cases: cases * times


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{request.node.name} {request.config.getoption('--campaign-count')}")

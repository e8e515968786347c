"""Work spread over processes, each with one thread of torch."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def pool(jobs: int, begin: Callable[[], None] | None = None) -> Any:
    """Spawned, not forked: torch's threads do not survive a fork. begin: each process calls it first."""
    return get_context("spawn").Pool(jobs, _begin, [begin])


def _begin(begin: Callable[[], None] | None) -> None:
    import torch

    from benchmarks.quality.build_suffix_peer import add_to_path

    torch.set_num_threads(1)
    add_to_path()
    if begin is not None:
        begin()

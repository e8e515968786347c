"""Work spread over processes, each with one thread of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


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


def dealt(work: Callable[[Sequence[Item]], Iterable[Found]], items: Sequence[Item], jobs: int) -> list[Found]:
    """The results of `work`, one an item, in their order; with one job in this process."""
    if jobs == 1:
        return list(work(items))
    parts = 4 * jobs
    with pool(jobs) as workers:
        found = workers.map(work, [items[part::parts] for part in range(parts)], chunksize=1)
    return [found[i % parts][i // parts] for i in range(len(items))]

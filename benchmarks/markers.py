"""Pages whose blocks a program makes, each between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Results = TypeVar("Results")


def fill(text: str, blocks: Mapping[str, Callable[[Results], str]], results: Results) -> str:
    """A page with each of `blocks`, made from `results`, between its markers.

    Raises:
        ValueError: the markers of a block are not there once each, in order.
    """
    for name, block in blocks.items():
        begin_mark, end_mark = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, begin, rest = text.partition(begin_mark)
        _, end, after = rest.partition(end_mark)
        if not (begin and end) or begin_mark in after or end_mark in before + after:
            raise ValueError(f"page: expected {begin_mark} and {end_mark} once each, in this order")
        text = f"{before}{begin_mark}\n{block(results)}\n{end_mark}{after}"
    return text

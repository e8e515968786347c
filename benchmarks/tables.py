"""Results as they are kept and shown: JSON, tables of Markdown, blocks of pages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

Results = TypeVar("Results")


def command(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m MODULE``, which its docstring's first line describes."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])


def table(heads: Iterable[object], rows: Iterable[Iterable[object]], align: str = "") -> str:
    """A table of Markdown. align: ``l`` for a column of text, ``r`` for one of numbers, a character a column; by
    default the first is text and the others are numbers."""
    heads = list(heads)
    marks = ["---" if a == "l" else "--:" for a in align or "l" + "r" * (len(heads) - 1)]
    return "\n".join([_row(heads), f"|{'|'.join(marks)}|", *map(_row, rows)])


def _row(cells: Iterable[object]) -> str:
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)


def verdict(holds: bool) -> str:
    """The last cell of a check."""
    return "holds" if holds else "**does not hold**"


def ratio(above: float, below: float) -> str:
    """Two digits; a dash where there is nothing below."""
    return f"{above / below:.2f}" if below else "–"


def at(counts: Mapping[str, Any]) -> str:
    """Tokens a step @ rejected per accepted."""
    speed, wrong = (
        ratio(counts[a], counts[b]) for a, b in (("output_tokens", "steps"), ("rejected", "accepted"))
    )
    return f"{speed} @ {wrong}"


def fill(text: str, blocks: Mapping[str, Callable[[Results], str]], results: Results) -> str:
    """A page with each of `blocks`, made from `results`, between its ``<!-- NAME:begin -->`` and ``:end -->``."""
    for name, block in blocks.items():
        begin_mark, end_mark = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, begin, rest = text.partition(begin_mark)
        _, end, after = rest.partition(end_mark)
        if not (begin and end) or begin_mark in after or end_mark in before + after:
            raise ValueError(f"page: expected {begin_mark} and {end_mark} once each, in this order")
        text = f"{before}{begin_mark}\n{block(results)}\n{end_mark}{after}"
    return text


def fill_file(page: Path, blocks: Mapping[str, Callable[[Results], str]], results: Results) -> None:
    """The same in a file."""
    page.write_text(fill(page.read_text(encoding="utf-8"), blocks, results), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    """``results/NAME.json``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found

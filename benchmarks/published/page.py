"""The results as tables, on the terminal and in a page of docs: published figures beside those found here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import tables
from benchmarks.tables import DOCS, ratio, table

RESULTS = tables.RESULTS / "published.json"
Results = dict[str, Any]

_RULES = {
    "threshold_35": "here: a threshold of 35",
    "rule": "here: 32, as published",
}
_DRAFTERS = {"openai": "OpenAI's", "static_text": "static text", "gpu_align": "`gpu_align`"}


def tasks_table(results: Results) -> str:
    """OpenAI's letter tasks, accepted and rejected, by every rule."""
    rows = []
    agree = dict.fromkeys(_RULES, 0)
    for task in results["openai"]["tasks"]:
        cells = []
        for rule in _RULES:
            same = task["here"][rule] == task["published"]
            agree[rule] += same
            cells.append(f"**{_pair(task['here'][rule])}**" if same else _pair(task["here"][rule]))
        rows.append([task["name"], _pair(task["published"]), *cells])
    rows.append(["tasks that agree", "", *(f"{count} of {len(rows)}" for count in agree.values())])
    return table(["accepted/rejected", "published", *_RULES.values()], rows)


def edits_table(results: Results) -> str:
    """Cascade's edits: tokens a step, acceptance and rejections here, with the published speed and acceptance."""
    rows = []
    for task in results["cascade"]["tasks"]:
        tokens = task["output_tokens"]
        sizes = (
            f"{task['prediction_tokens']:,} → {tokens:,} tokens, {_percent(task['equal_lines'])} of the lines"
        )
        cells = []
        for drafter in _DRAFTERS:
            run = task["here"][drafter]
            wrong = ratio(run["rejected"], run["accepted"])
            cell = f"{tokens / run['steps']:.2f} ({_percent(run['accepted'] / tokens)}; {wrong})"
            if drafter in task["published"]:
                speed, accepted = task["published"][drafter]
                cell += f"; published {speed:.2f}× ({_percent(accepted)}: {1 / (1 - accepted):.2f})"
            cells.append(cell)
        rows.append([f"{task['task']}: {sizes}", *cells])
    return table(["task", *_DRAFTERS.values()], rows)


PAGE = DOCS / "published.md"
#: The blocks of the page by name.
BLOCKS: dict[str, Callable[[Results], str]] = {
    "letters": tasks_table,
    "edits": edits_table,
}


def _pair(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts))


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", "\u00a0%")

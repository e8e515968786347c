"""Write the results of the serving model as tables: to the terminal, a page of docs and the README here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import tables

#: Batches of the tables; the JSON has all.
COLUMNS = (1, 8, 64, 256, 1024)
#: Rule → what it is, where its name does not tell all.
RULES = {
    "lengths": "every draft",
    "plugin": "default, synchronous",
    "plugin, late by 1": "default, asynchronous",
}
#: The rule of the table in docs/worth-it.md, as vLLM schedules by default.
SHOWN_RULE = "plugin, late by 1"
#: Rules whose gains the pages list; the JSON has all.
GRID = re.compile(r"fixed 32|budget (64|256|1024)|fill (64|128)(, sure 0\.[59])?")
Results = dict[str, Any]


def _numbers(results: Results, row: list[float], fits: list[bool]) -> list[str]:
    at = [results["batches"].index(b) for b in COLUMNS if b in results["batches"]]
    return [f"{row[i]:.2f}" + ("" if fits[i] else " ×") for i in at]


def _batches(results: Results) -> list[str]:
    return [f"{b:,}" for b in COLUMNS if b in results["batches"]]


def _compared(results: Results) -> dict[str, str]:
    """Rule → what it is, for the tables."""
    largest = max(int(name.split()[1]) for name in results["rules"] if re.fullmatch(r"fixed \d+", name))
    listed = {
        f"fixed {largest}": f"{largest} slots for all, as vLLM",
        **RULES,
        "known curve": "bound: knows the step times",
    }
    return {name: says for name, says in listed.items() if name in results["rules"]}


def one_setup(results: Results) -> str:
    """The speed-up over no drafts: edits on the first shown setup by batch, and the worst of all setups."""
    setup, fits = next(iter(results["fits"].items()))
    rows = []
    for name, says in _compared(results).items():
        rule = results["rules"][name]
        worst = (f"{min(rule[mix]['worst']):.3f}" for mix in ("unrelated", "rejected"))
        rows.append([f"`{name}`", *_numbers(results, rule["edit"]["shown"][setup], fits), *worst, says])
    columns = [*_batches(results), "worst, unrelated", "worst, rejected"]
    return tables.table(["rule", *columns, ""], rows, f"l{'r' * len(columns)}l")


def gains(results: Results) -> str:
    """The plugin's default on every shown setup, in asynchronous scheduling."""
    found = results["rules"][SHOWN_RULE]
    rows = [
        [setup if mix == "edit" else "", mix, *_numbers(results, found[mix]["shown"][setup], fits)]
        for setup, fits in results["fits"].items()
        for mix in ("edit", "unrelated")
    ]
    columns = _batches(results)
    return tables.table(["setup", "predictions", *columns], rows, f"ll{'r' * len(columns)}")


def budgets(results: Results) -> str:
    """Rules that need no engine, and the plugin's, that are seldom slower: gains by edits, and the worst case."""
    rows = []
    for name, row in results["rules"].items():
        if name != "plugin" and (not GRID.fullmatch(name) or min(row["unrelated"]["worst"]) < 0.9):
            continue
        marks = "**" if name == results["recommended"]["rule"] else ""
        gain = (f"{row[mix]['gain']:.2f}" for mix in ("edit", "third"))
        worst = (f"{min(row[mix]['worst']):.2f}" for mix in ("unrelated", "rejected"))
        rows.append([f"{marks}`{name}`{marks}", *gain, *worst])
    return tables.table(["rule", "gain, edit", "gain, third", "worst, unrelated", "worst, rejected"], rows)


#: Page → its blocks by name.
PAGES: dict[Path, dict[str, Callable[[Results], str]]] = {
    tables.DOCS / "worth-it.md": {"gains": gains},
    tables.ROOT / "benchmarks" / "serving" / "README.md": {"edit": one_setup},
}


def text(results: Results) -> str:
    """What the command prints."""
    setup = next(iter(results["fits"]))
    return "\n\n".join(
        [
            f"Speed-up over no drafts, {setup}, edits (×: does not fit in memory)",
            one_setup(results),
            "Means over all setups and batches; worst cases",
            budgets(results),
            "Recommended: {rule}; as a constant budget: {constant}".format(**results["recommended"]),
        ]
    )

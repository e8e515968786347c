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
    "delay_3": "here: a delay of 3",
    "55_letters_discard_delay_1": "here: 55 letters, own tokens discarded, a delay of 1",
    "same_output": "here: one output, edited drafts",
}
_DRAFTERS = {"openai": "OpenAI's", "static_text": "static text", "gpu_align": "`gpu_align`"}
_LOOKUP_TASKS = {
    "summary": "summary of an article",
    "rename": "a file with one name replaced",
    "rewrite": "a program rewritten",
}
_PREDICTORS = {
    "example": "example",
    "defaults": "defaults",
    "example_documented": "example, not limited",
    "defaults_documented": "defaults, not limited",
    "gpu_align": "`gpu_align`",
}


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


def linear_table(results: Results) -> str:
    """What Cascade says about half-right and right predictions, and steps here."""
    curve = results["cascade"]["curve"]
    rows = []
    for right, layout, where, says in (
        (100, "scattered", "", "nearly 0"),
        (50, "scattered", ", the others scattered", "about half"),
        (50, "block", ", the others in one block", "about half"),
    ):
        cells = [_percent(1 / _speed(curve, layout, drafter, right)) for drafter in _DRAFTERS]
        rows.append([f"{right} % of the lines right{where}", says, *cells])
    return table(["time with the prediction, of the time without", "published", *_DRAFTERS.values()], rows)


def lookup_table(results: Results) -> str:
    """Validated and refuted tokens of node-llama-cpp's input lookup, and tokens a step."""
    tasks = results["node_llama_cpp"]["tasks"]
    labels = (f"{_LOOKUP_TASKS[task]}, {found['output_tokens']:,} tokens" for task, found in tasks.items())
    rows = []
    for name, says in _PREDICTORS.items():
        runs = [(found["output_tokens"], found["runs"][name]) for found in tasks.values()]
        cells = [f"{r['validated']:,} / {r['refuted']:,}, {tokens / r['steps']:.2f}" for tokens, r in runs]
        rows.append([says, *cells])
    return table(["validated / refuted, tokens a step", *labels], rows)


PAGE = DOCS / "published.md"
#: The blocks of the page by name.
BLOCKS: dict[str, Callable[[Results], str]] = {
    "letters": tasks_table,
    "edits": edits_table,
    "linear": linear_table,
    "lookup": lookup_table,
}


def _speed(curve: dict[str, Any], layout: str, policy: str, right: int) -> float:
    """Tokens a step where this percentage of the lines is right."""
    at, found = curve["changed"].index(100 - right), curve["layouts"][layout]
    return float(found["output_tokens"][at] / found["runs"][policy][at]["steps"])


def _pair(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts))


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", "\u00a0%")

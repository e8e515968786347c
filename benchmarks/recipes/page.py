"""Write the measurements as a JSON file, to the terminal, and as the two tables of docs/recipes.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.tables import ratio, signed

RESULTS = tables.RESULTS / "recipes.json"
PAGE = tables.DOCS / "recipes.md"
Results = dict[str, Any]

#: Coverage, accuracy and speed-up of the tasks here that recipe speculative decoding was published with.
#: Source: https://kolm.ai/articles/speculative-decoding-recipes
PUBLISHED = {
    "JSON extraction": (0.83, 1.0, 4.2),
    "HumanEval": (0.71, 0.999, 3.1),
    "summaries": (0.22, 1.0, 1.3),
}
#: Task → the published one that it is most like.
PUBLISHED_AS = {
    "json-records": "JSON extraction",
    "python-client": "HumanEval",
    "python": "HumanEval",
    "changelog": "summaries",
}
DRAFTERS = {
    "pack_alone": "pack alone",
    "drafter_without_pack": "drafter, shipped pack",
    "drafter_with_pack": "drafter, this pack",
    "drafter_with_both": "drafter, both packs",
    "suffix_decoding_4": "suffix decoding, factor 4",
    "suffix_decoding_4_samples": "suffix decoding, factor 4, with the samples",
    "prompt_lookup": "prompt lookup",
}
#: Case of earlier answers → what it is.
CASES = {
    "next_version": "a file in its next version, beside the earlier version as prediction",
    "form: place": "records: places",
    "form: contact": "records: contacts",
    "form: term": "records: terms",
    "form: area": "records: areas",
    "form: triage": "records: triage",
    "same_package": "other files of the package",
    "all_packages": "all other files, of all packages",
    "unrelated": "unrelated answers",
    "unrelated_alike": "unrelated answers, as if to prompts like this one",
}
#: Not in the page.
IN_JSON_ALONE = {"form: contact", "form: term", "form: triage", "all_packages", "unrelated_alike"}


def per_step(counts: dict[str, Any]) -> float:
    """Tokens a step."""
    return float(counts["output_tokens"] / counts["steps"])


def more_steps(counts: dict[str, Any], than: dict[str, Any]) -> float:
    """The share of steps on top of another run's; negative where there are fewer."""
    return float(counts["steps"] / than["steps"] - 1)


def rejected_a_token(counts: dict[str, Any], source: str | None = None) -> float:
    """Rejected drafts for each output token, of one source or of all."""
    rejected = counts["rejected"] if source is None else counts["rejected_from"].get(source, 0)
    return float(rejected / counts["output_tokens"])


#: What the page shows of `DRAFTERS`, by the heads of its columns.
SHOWN = {
    "drafter_without_pack": "tokens a step, base pack",
    "drafter_with_pack": "its own pack",
    "suffix_decoding_4_samples": "suffix decoding, its samples",
}


def tasks_table(results: Results) -> str:
    """Each task's pack: coverage and accuracy beside the published ones, tokens a step with and without it."""
    rows = []
    for name, task in results["tasks"].items():
        published = PUBLISHED_AS.get(name)
        coverage, accuracy, _ = PUBLISHED.get(published or "", (0, 0, 0))
        accurate, covered, _ = _figures(task["report"])
        runs = (task["runs"][run] for run in SHOWN)
        rows.append(
            [
                name, f"{published}: {coverage:.0%}, {accuracy:.1%}" if published else "–", covered, accurate,
                *(f"{per_step(c):.2f} at {ratio(c['rejected'], c['accepted'])}" for c in runs),
            ]
        )  # fmt: skip
    heads = ["task", "published: coverage, accuracy", "coverage", "accuracy", *SHOWN.values()]
    return tables.table(heads, rows, "llrrrrr")


def drafters_table(results: Results) -> str:
    """Tokens a step at rejected per accepted draft, of each drafter and task."""
    rows = []
    for run, says in DRAFTERS.items():
        found = [task["runs"][run] for task in results["tasks"].values()]
        rows.append([says, *(f"{per_step(c):.2f} at {ratio(c['rejected'], c['accepted'])}" for c in found)])
    return tables.table(["", *results["tasks"]], rows)


def merged_table(results: Results) -> str:
    """What a merge does to outputs that gave none of the misses."""
    rows = []
    for name, task in results["tasks"].items():
        found = task["merged"]
        learned, after = (
            [f"{part['rejected']:,}", *_figures(part)] for part in (found["learned"], found["merged"])
        )
        entries, *merged = found["entries"]
        cells = [*zip(learned, after, strict=True), (f"{entries:,}", f"{sum(merged) / 2:,.0f}")]
        rows.append([name, *map(" → ".join, cells), f"{sum(found['removed']) / 2:,.0f}"])
    heads = ["rejected", "accuracy", "coverage", "tokens a step", "entries", "of them gone"]
    return tables.table(["task", *heads], rows)


def _figures(report: dict[str, Any]) -> list[str]:
    accuracy = f"{report['accuracy']:.2%}" if report["drafted"] else "–"
    return [accuracy, f"{report['coverage']:.1%}", f"{report['tokens_per_step']:.2f}"]


def memory_table(results: Results) -> str:
    """Tokens a step and rejected drafts a token, without and with earlier answers, at the least K."""
    rows = []
    for name, sizes in results["memory"].items():
        if name in IN_JSON_ALONE:
            continue
        counts = next(iter(sizes.values()))
        memory, other = counts["memory"], counts.get("prediction", counts["without"])
        speeds, rejected = (
            " → ".join(f"{of(found):.2f}" for found in (other, memory)) for of in (per_step, rejected_a_token)
        )
        rows.append([CASES[name], speeds, rejected])
    return tables.table(["earlier answers", "tokens a step", "rejected a token"], rows)


def checks_table(results: Results) -> str:
    """The evidence that was wanted of packs, and what was found."""
    return tables.table(
        ["evidence", "found", "wanted", ""],
        ([name, found, wanted, tables.verdict(holds)] for name, found, wanted, holds in _checks(results)),
        "llll",
    )


def _checks(results: Results) -> Iterable[tuple[str, str, str, bool]]:
    for name in ("json-records", "triage"):
        report = results["tasks"][name]["report"]
        alone = per_step(results["tasks"][name]["runs"]["pack_alone"])
        yield f"{name}: coverage", f"{report['coverage']:.1%}", "≥ 80 %", report["coverage"] >= 0.8
        yield f"{name}: accuracy", f"{report['accuracy']:.2%}", "≥ 99.5 %", report["accuracy"] >= 0.995
        yield f"{name}: tokens a step, pack alone", f"{alone:.2f}", "≥ 4.2", alone >= 4.2
    for name, says in (("python-client", "one kind of method"), ("python", "arbitrary functions")):
        accuracy = results["tasks"][name]["report"]["accuracy"]
        yield f"{name}, {says}: accuracy", f"{accuracy:.2%}", "≥ 98 %", accuracy >= 0.98
    prose = results["prose"]
    for name, says in (("own", "its own pack"), ("foreign", "packs of other tasks")):
        change, rejected = more_steps(prose[name], prose["none"]), rejected_a_token(prose[name], "recipe")
        yield f"free prose, {says}: steps", signed(change), "≤ +1 %", change <= 0.01
        yield f"free prose, {says}: rejected a token", f"{rejected:.4f}", "≤ 0.05", rejected <= 0.05
    pairs = [(task["merged"]["learned"], task["merged"]["merged"]) for task in results["tasks"].values()]
    better = sum(after["accuracy"] >= before["accuracy"] for before, after in pairs)
    yield "accuracy after a merge", f"{better} of {len(pairs)} tasks", "no less in each", better == len(pairs)
    reach = [after["accuracy"] for _, after in pairs]
    yield "accuracy after a merge, the best", f"{max(reach):.2%}", "≥ 99.9 %", max(reach) >= 0.999


#: The blocks of the page.
BLOCKS: dict[str, Callable[[Results], str]] = {"tasks": tasks_table, "memory": memory_table}
#: What the command prints of the tasks.
PRINTED: dict[str, Callable[[Results], str]] = {
    "checks": checks_table,
    "tasks": tasks_table,
    "drafters": drafters_table,
    "merged": merged_table,
}


def update(results_file: Path = RESULTS, page_file: Path = PAGE, **found: Any) -> None:
    """Put what was found into the results, and make the page's tables from them."""
    stored = json.loads(results_file.read_text(encoding="utf-8")) if results_file.is_file() else {}
    stored.update(found)
    results_file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if page_file.is_file():
        tables.fill_file(page_file, BLOCKS, stored)

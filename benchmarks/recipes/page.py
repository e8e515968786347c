"""What was measured, as a JSON file and as the tables of docs/developer/recipes-measured.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.tables import ratio, signed

RESULTS = tables.RESULTS / "recipes.json"
PAGE = tables.DOCS / "developer" / "recipes-measured.md"
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


def tasks_table(results: Results) -> str:
    """Coverage, accuracy and speed of each task's pack beside the published ones; what it was learned from."""
    rows = []
    for name, task in results["tasks"].items():
        report, pack, published = task["report"], task["pack"], PUBLISHED_AS.get(name)
        coverage, accuracy, speed = PUBLISHED.get(published or "", (0, 0, 0))
        rows.append(
            [
                name, f"{published}: {coverage:.0%}, {accuracy:.1%}, {speed:.1f}×" if published else "–",
                *_figures(report), task["groups"],
                f"{task['sample_tokens']:,}", f"{pack['literal']:,} + {pack['shape']:,}",
                f"{pack['bytes'] / 1024:.0f}, {pack['gzipped'] / 1024:.0f} KiB", task["outputs"],
                f"{task['output_tokens']:,}",
            ]
        )  # fmt: skip
    heads = [
        "task",
        "published: coverage, accuracy, speed",
        "accuracy",
        "coverage",
        "tokens a step",
        "groups",
        "tokens of samples",
        "entries: literal + shape",
    ]
    return tables.table([*heads, "size, gzipped", "outputs", "tokens"], rows)


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
    """Steps with response memory beside those without, and whether that was wanted: a row a case, each K."""
    rows = []
    for name, sizes in results["memory"].items():
        cells: list[list[str]] = [[] for _ in range(5)]
        for counts in sizes.values():
            memory, other = counts["memory"], counts.get("prediction", counts["without"])
            change = more_steps(memory, other)
            cells[0].append(f"{per_step(other):.2f} → {per_step(memory):.2f}")
            cells[1].append(f"÷ {1 / (1 + change):.2f}" if change < -0.3 else signed(change))
            cells[2] += [
                wanted if holds else f"**not {wanted}**" for wanted, holds in _wanted_of_memory(name, counts)
            ]
            cells[3].append(f"{rejected_a_token(memory, 'memory'):.3f}")
            cells[4].append(f"{rejected_a_token(other):.2f} → {rejected_a_token(memory):.2f}")
        rows.append([CASES[name], *("; ".join(dict.fromkeys(cell)) for cell in cells)])
    heads = ["earlier answers", "tokens a step", "steps", "wanted", "rejected from memory", "rejected in all"]
    return tables.table(heads, rows, "lrrlrr")


def _wanted_of_memory(name: str, counts: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was wanted of a case of response memory, and whether it holds."""
    memory, change = counts["memory"], more_steps(counts["memory"], counts["without"])
    if name == "next_version":
        return [("≤ +5 %", more_steps(memory, counts["prediction"]) <= 0.05)]
    if name.startswith("form: "):
        return [("÷ ≥ 3", counts["without"]["steps"] / memory["steps"] >= 3)]
    if name == "same_package":
        return [("≤ −7 %", change <= -0.07)]
    if name == "unrelated":
        return [("≤ +1 %", change <= 0.01), ("≤ 0.02 rejected", rejected_a_token(memory, "memory") <= 0.02)]
    return []


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


BLOCKS: dict[str, Callable[[Results], str]] = {
    "checks": checks_table,
    "tasks": tasks_table,
    "drafters": drafters_table,
    "merged": merged_table,
    "memory": memory_table,
}


def update(results_file: Path = RESULTS, page_file: Path = PAGE, **found: Any) -> None:
    """Put what was found into the results, and make the page's tables from them."""
    stored = json.loads(results_file.read_text(encoding="utf-8")) if results_file.is_file() else {}
    stored.update(found)
    results_file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if page_file.is_file():
        tables.fill_file(page_file, BLOCKS, stored)

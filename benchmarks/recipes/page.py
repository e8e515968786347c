"""What was measured, as a JSON file and as the tables of docs/developer/recipes-measured.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import markers

RESULTS = Path(__file__).resolve().parents[1] / "results" / "recipes.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "developer" / "recipes-measured.md"
Results = dict[str, Any]

#: Task → speed-up as published for such a task.
PUBLISHED = {"json-records": 4.2, "triage": 4.2, "python-client": 3.1, "python": 3.1, "changelog": 1.3}
#: The two tasks in Python.
PYTHON = {"python-client": "one kind of method", "python": "arbitrary functions"}
COLUMNS = {
    "pack_alone": "pack alone",
    "drafter_without_pack": "drafter, shipped pack",
    "drafter_with_pack": "drafter, this pack",
    "drafter_with_both": "drafter, both packs",
    "suffix_decoding": "suffix decoding",
    "suffix_decoding_samples": "… with the samples",
    "prompt_lookup": "prompt lookup",
}
PEERS = {
    **COLUMNS,
    "suffix_decoding_4": "suffix decoding, factor 4",
    "suffix_decoding_4_samples": "… with the samples",
}


class Check(NamedTuple):
    """What was wanted, what was found, and whether that is enough."""

    name: str
    found: str
    wanted: str
    holds: bool


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
    """Coverage, accuracy and tokens a step of each task."""
    rows = [
        f"| task | published | coverage | accuracy | {' | '.join(COLUMNS.values())} |",
        "|---|--:|--:|--:|" + "--:|" * len(COLUMNS),
    ]
    for name, task in results["tasks"].items():
        published = f"{PUBLISHED[name]:.1f}×" if name in PUBLISHED else "–"
        cells = [f"{per_step(task['runs'][run]):.2f}" for run in COLUMNS]
        report = task["report"]
        rows.append(
            f"| {name} | {published} | {report['coverage']:.1%} | {_accuracy(report)} | {' | '.join(cells)} |"
        )
    return "\n".join(rows)


def _accuracy(report: dict[str, Any]) -> str:
    return f"{report['accuracy']:.2%}" if report["drafted"] else "–"


def rejections_table(results: Results) -> str:
    """Rejected per accepted draft of each drafter and task."""
    rows = [
        f"| task | {' | '.join(PEERS.values())} |",
        "|---|" + "--:|" * len(PEERS),
    ]
    for name, task in results["tasks"].items():
        cells = []
        for run in PEERS:
            counts = task["runs"][run]
            ratio = f"{counts['rejected'] / counts['accepted']:.2f}" if counts["accepted"] else "–"
            cells.append(f"{per_step(counts):.2f} at {ratio}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def packs_table(results: Results) -> str:
    """What each pack was learned from, and how large it is."""
    rows = [
        "| task | groups | tokens of samples | entries | literal | shape | size | gzipped | outputs | tokens |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, task in results["tasks"].items():
        pack = task["pack"]
        rows.append(
            f"| {name} | {task['groups']} | {task['sample_tokens']:,} | {pack['entries']:,} | {pack['literal']:,} "
            f"| {pack['shape']:,} | {pack['bytes'] / 1024:.0f} KiB | {pack['gzipped'] / 1024:.0f} KiB "
            f"| {task['outputs']} | {task['output_tokens']:,} |"
        )
    return "\n".join(rows)


def rounds_table(results: Results) -> str:
    """Rejected recipe drafts of each round of misses and merge."""
    count = max(len(task["rounds"]) for task in results["tasks"].values())
    rows = [
        f"| task | {' | '.join(f'round {i}' if i else 'as learned' for i in range(count))} | tokens a step |",
        "|---|" + "--:|" * (count + 1),
    ]
    for name, task in results["tasks"].items():
        rounds = task["rounds"]
        cells = [f"{found['rejected']:,}" for found in rounds]
        speed = f"{rounds[0]['tokens_per_step']:.2f} → {rounds[-1]['tokens_per_step']:.2f}"
        rows.append(f"| {name} | {' | '.join(cells)} | {speed} |")
    return "\n".join(rows)


def prose_table(results: Results) -> str:
    """What packs do to outputs that they are not for."""
    rows = [
        "| packs | steps | beside none | rejected recipe drafts a token | tokens a step |",
        "|---|--:|--:|--:|--:|",
    ]
    without = results["prose"]["none"]
    names = {"none": "none", "own": "learned from changelogs", "base": "the shipped pack"}
    names["foreign"] = "those of all other tasks"
    for name, counts in results["prose"].items():
        says = names.get(name, f"that of {name} alone")
        rows.append(
            f"| {says} | {counts['steps']:,} | {_signed(more_steps(counts, without))} "
            f"| {rejected_a_token(counts, 'recipe'):.4f} | {per_step(counts):.3f} |"
        )
    return "\n".join(rows)


def python_table(results: Results) -> str:
    """Coverage of what is structural in Python."""
    rows = ["| task | tokens | share of all | drafted and accepted | coverage |", "|---|---|--:|--:|--:|"]
    for task, found in results["python"].items():
        for name, says in (("structural", "structure"), ("free", "names, numbers, strings, comments")):
            part = found[name]
            rows.append(
                f"| {task} | {says} | {part['tokens'] / found['tokens']:.1%} | {part['covered']:,} "
                f"| {part['covered'] / max(part['tokens'], 1):.1%} |"
            )
    return "\n".join(rows)


def learning_table(results: Results) -> str:
    """Time and memory of learning."""
    found = results["learning"]
    return (
        f"{found['groups']:,} groups of {found['samples']} samples of {found['tokens']} tokens: "
        f"{found['processor_seconds']:.0f} s of one core ({found['seconds']:.0f} s on a machine that did other "
        f"work), {found['peak_mib']:,} MiB at the peak "
        f"({found['before_mib']:,} MiB before learning began), {found['entries']:,} entries."
    )


#: Case → what it is.
CASES = {
    "next_version": "a file in its next version, beside the earlier version as prediction",
    "form: place": "records: places",
    "form: contact": "records: contacts",
    "form: term": "records: terms",
    "form: area": "records: areas",
    "form: triage": "records: triage",
    "form: api-reference": "pages of an API reference",
    "same_package": "other files of the package",
    "all_packages": "all other files, of all packages",
    "unrelated": "unrelated answers",
    "unrelated_alike": "unrelated answers, as if to prompts like this one",
}


def memory_table(results: Results) -> str:
    """Steps with response memory beside those without."""
    rows = [
        "| earlier answers | K | without memory | with it | steps | rejected from memory | rejected in all |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, sizes in results["memory"].items():
        for size, counts in sizes.items():
            memory, other = counts["memory"], counts.get("prediction", counts["without"])
            change = more_steps(memory, other)
            steps = f"÷ {other['steps'] / memory['steps']:.2f}" if change < -0.3 else _signed(change)
            in_all = f"{rejected_a_token(other):.2f} → {rejected_a_token(memory):.2f}"
            rows.append(
                f"| {CASES[name]} | {size} | {per_step(other):.2f} | {per_step(memory):.2f} | {steps} "
                f"| {rejected_a_token(memory, 'memory'):.3f} | {in_all} |"
            )
    return "\n".join(rows)


def checks(results: Results) -> list[Check]:
    """The evidence that is wanted, and what was found."""
    found = []
    for name in ("json-records", "triage"):
        report = results["tasks"][name]["report"]
        alone = per_step(results["tasks"][name]["runs"]["pack_alone"])
        found += [
            Check(f"{name}: coverage", f"{report['coverage']:.1%}", "≥ 80 %", report["coverage"] >= 0.8),
            Check(f"{name}: accuracy", _accuracy(report), "≥ 99.5 %", report["accuracy"] >= 0.995),
            Check(f"{name}: tokens a step, pack alone", f"{alone:.2f}", "≥ 4.2", alone >= 4.2),
        ]
    for name, python in results["python"].items():
        label = f"{name}, {PYTHON[name]}"
        share = python["structural"]["covered"] / python["structural"]["tokens"]
        accuracy = results["tasks"][name]["report"]["accuracy"]
        found += [
            Check(f"{label}: structure covered", f"{share:.1%}", "≥ 60 %", share >= 0.6),
            Check(f"{label}: accuracy", f"{accuracy:.2%}", "≥ 98 %", accuracy >= 0.98),
        ]
    prose = results["prose"]
    for name, says in (("own", "its own pack"), ("foreign", "packs of other tasks")):
        change = more_steps(prose[name], prose["none"])
        rejected = rejected_a_token(prose[name], "recipe")
        found += [
            Check(f"free prose, {says}: steps", _signed(change), "≤ +1 %", change <= 0.01),
            Check(f"free prose, {says}: rejected a token", f"{rejected:.4f}", "≤ 0.05", rejected <= 0.05),
        ]
    for name, task in results["tasks"].items():
        first, second = task["rounds"][0]["rejected"], task["rounds"][1]["rejected"]
        fewer = second < first or first == 0
        found.append(Check(f"{name}: rejected after one merge", f"{first:,} → {second:,}", "fewer", fewer))
    learning = results["learning"]
    found += [
        Check(
            "learning: seconds of one core",
            f"{learning['processor_seconds']:.0f}",
            "< 120",
            learning["processor_seconds"] < 120,
        ),
        Check("learning: MiB", f"{learning['peak_mib']:,}", "< 2,048", learning["peak_mib"] < 2_048),
    ]
    return found + memory_checks(results)


def memory_checks(results: Results) -> list[Check]:
    """Those of response memory, at each K."""
    found = []
    for name, sizes in results["memory"].items():
        for size, counts in sizes.items():
            memory, without = counts["memory"], counts["without"]
            label = f"memory, {CASES[name].split(',')[0]}, K = {size}"
            change = more_steps(memory, without)
            if name == "next_version":
                change = more_steps(memory, counts["prediction"])
                found.append(Check(label, _signed(change), "≤ +5 %", change <= 0.05))
            elif name.startswith("form: ") and name != "form: api-reference":
                ratio = without["steps"] / memory["steps"]
                found.append(Check(label, f"÷ {ratio:.2f}", "≥ 3×", ratio >= 3))
            elif name == "same_package":
                found.append(Check(label, _signed(change), "≤ −7 %", change <= -0.07))
            elif name == "unrelated":
                rejected = rejected_a_token(memory, "memory")
                found.append(Check(label, _signed(change), "≤ +1 %", change <= 0.01))
                found.append(
                    Check(f"{label}: rejected a token", f"{rejected:.4f}", "≤ 0.02", rejected <= 0.02)
                )
    return found


def checks_table(results: Results) -> str:
    """The checks with their verdicts."""
    rows = ["| evidence | found | wanted | |", "|---|---|---|---|"]
    rows += [
        f"| {c.name} | {c.found} | {c.wanted} | {'holds' if c.holds else '**does not hold**'} |"
        for c in checks(results)
    ]
    return "\n".join(rows)


def _signed(share: float) -> str:
    return f"{share:+.1%}".replace("-", "−")


BLOCKS: dict[str, Callable[[Results], str]] = {
    "checks": checks_table,
    "tasks": tasks_table,
    "rejections": rejections_table,
    "packs": packs_table,
    "rounds": rounds_table,
    "prose": prose_table,
    "python": python_table,
    "learning": learning_table,
    "memory": memory_table,
}


def fill(text: str, results: Results) -> str:
    """A page with each of `BLOCKS` between its markers; as `markers.fill`."""
    return markers.fill(text, BLOCKS, results)


def update(results_file: Path = RESULTS, page_file: Path = PAGE, **found: Any) -> None:
    """Put what was found into the results, and make the page's tables from them."""
    stored = json.loads(results_file.read_text(encoding="utf-8")) if results_file.is_file() else {}
    stored.update(found)
    results_file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if page_file.is_file():
        page_file.write_text(fill(page_file.read_text(encoding="utf-8"), stored), encoding="utf-8")

"""The results as tables, on the terminal and in docs/published.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables import DOCS, ratio, table
from benchmarks.tables import RESULTS as FOLDER

NAME = "real_model"
PAGE, RESULTS = DOCS / "published.md", FOLDER / f"{NAME}.json"
Results = dict[str, Any]


def replays(found: Results) -> str:
    """Tokens a step, and rejected per accepted, of every drafter on each half."""
    halves = {half: dict(counts) for half, counts in found["replays"].items()}
    for half, counts in halves.items():
        if "baseline" in found:
            counts["gpu_align, baseline"] = found["baseline"][half]

    def shown(c: Results) -> str:
        return f"{ratio(c['output_tokens'], c['steps'])}; {ratio(c['rejected'], c['accepted'])}"

    rows = [[name, *(shown(of[name]) for of in halves.values())] for name in next(iter(halves.values()))]
    sizes = [sum(row[1] == half and row[3] for row in found["answers"]) for half in halves]
    heads = [f"{half}: {size} answers" for half, size in zip(halves, sizes, strict=True)]
    return table(["tokens a step; rejected per accepted", *heads], rows)


def served(found: Results) -> str:
    """CPU seconds of the servers' processes over the answers that count."""
    served = [row for row in found.get("served", ()) if row["counts"]]
    rows = []
    for mode in served[0]["cpu_s"] if served else ():
        used, none = (sum(row["cpu_s"][name] for row in served) for name in (mode, "none"))
        by_task = sorted(row["cpu_s"]["none"] / row["cpu_s"][mode] for row in served)
        rows.append([mode, f"{used:.0f} s", f"{none / used:.2f}", f"{by_task[0]:.2f}–{by_task[-1]:.2f}"])
    same = sum(row["identical"] for row in served)
    return table([f"{same} of {len(served)} texts equal", "CPU", "none over it", "by task"], rows)


def node(found: Results) -> str:
    """node-llama-cpp: validated and refuted by the release and by its guide's rule, its text, CPU seconds."""
    rows = []
    for task, run in found.get("published", {}).get("node_llama_cpp", {}).items():
        for rule in ("example", "defaults"):
            pairs = [" / ".join(map(str, run[rule][which])) for which in ("release", "guide")]
            seconds = [f"{run['cpu_s'][which]:.1f} s" for which in (rule, "none")]
            text = "equal" if run[rule]["identical"] else "another"
            rows.append([f"{task}, {run['tokens']} tokens, {rule}", *pairs, text, *seconds])
    heads = ["validated / refuted", "release", "guide's rule", "text", "CPU", "without"]
    return table(heads, rows)


def recipes(found: Results) -> str:
    """Packs of the model's samples: share drafted, share of it right, tokens a step without and with the pack."""
    rows = []
    for task, run in found.get("published", {}).get("recipes", {}).items():
        alone, both = (f"{run['tokens'] / run[steps]:.2f}" for steps in ("steps_context", "steps_both"))
        right = f"{run['accuracy']:.1%}" if run["drafted"] else "–"
        rows.append([task, f"{run['coverage']:.0%}", right, alone, both])
    return table(["task", "coverage", "accuracy", "tokens a step: context alone", "with the pack"], rows)


def passes(found: Results) -> str:
    """Forward passes and CPU seconds with the answer as prediction, and of llama-cpp-python."""
    rows = []
    for name, of in (("verbatim", "verbatim"), ("llama_cpp", "llama-cpp-python")):
        for task, runs in found.get("published", {}).get(name, {}).items():
            made = [(run, each) for run, each in runs.items() if run != "tokens"]
            cells = [f"{run}: {each['passes']} ({each['cpu_s']:.1f} s)" for run, each in made]
            rows.append([f"{of}: {task}, {runs['tokens']} tokens", ", ".join(cells)])
    return table(["", "passes (CPU)"], rows, "ll")


#: The blocks of the page by name.
BLOCKS: dict[str, Callable[[Results], str]] = {
    "model": replays, "served": served, "node": node, "teacher": recipes, "passes": passes,
}  # fmt: skip

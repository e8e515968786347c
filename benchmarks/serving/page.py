"""What the serving model found, as tables: on the terminal, and between the markers of two pages of docs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.serving.step_cost import GPUS, LONGER, MODELS, SETUPS, Roofline

#: Batches of the tables; the JSON has all.
COLUMNS = (1, 8, 64, 256, 1024)
#: Rule → what it is, where its name does not tell all.
RULES = {
    "lengths": "every draft proposed",
    "plugin": "the plugin's default, synchronous scheduling",
    "plugin, late by 1": "the plugin's default, asynchronous scheduling",
    "plugin, without credit": "synchronous, without what it learns of each request",
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
        f"fixed {largest}": f"{largest} slots for every request, as vLLM schedules",
        **RULES,
        results["recommended"]["constant"]: "the best constant budget that never loses",
        results["recommended"]["rule"]: "the rule alone: recommended, with credit beside it",
        "known curve": "upper bound: knows the step-time curve",
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
        for mix in ("edit", "third", "unrelated")
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


def graphs(results: Results) -> str:
    """What is left without FULL CUDA graphs, from the least of `LONGER` to the most: of edits on the first shown
    setup, and in the worst case."""
    fits = next(iter(results["fits"].values()))
    rows = []
    for takes in ("any length", "one length"):
        few, many = (results["lost_graphs"][f"{takes}, {longer:g}"] for longer in LONGER)
        cells = zip(*(_numbers(results, row["edit"], fits) for row in (few, many)), strict=True)
        worst = [f"{min(row['unrelated']):.2f}" for row in (few, many)]
        rows.append([takes, *("–".join(dict.fromkeys(pair)) for pair in (*cells, worst))])
    return tables.table(["graphs take", *_batches(results), "worst, unrelated"], rows)


def assumptions(results: Results) -> str:
    """Every number that the step times rest on."""
    gpus = [
        [g.name, *(f"{number:g}" for number in (g.bandwidth / 1e12, g.bf16 / 1e12, g.fp8 / 1e12)),
         f"{g.memory / 1e9:g}", f"{g.link / 1e9:g}", g.source]
        for g in GPUS.values()
    ]  # fmt: skip
    models = [
        [m.name, f"{m.params / 1e9:g} B, {m.embedding / 1e9:g} B of them looked up", m.layers, f"{m.hidden:,}",
         f"{m.q_heads}, {m.kv_heads}, {m.head_dim}", f"{m.vocab:,}", m.source]
        for m in MODELS.values()
    ]  # fmt: skip
    roofline = Roofline(GPUS["H100"], MODELS["8B"], "bf16", 1)
    shown = ["bandwidth_share", "compute_share", "softness", "overhead_ms", "logits_bytes", "exchange_us"]
    ours = [[f"`{name}`", f"{getattr(roofline, name):g}"] for name in (*shown, "memory_share")]
    says = "`drafter_us`: the drafter's time a step, paid by every rule that drafts"
    ours.append([says, f"{results['drafter_us']:g}"])
    gpu_heads = ["GPU", "TB/s", "bf16 TFLOP/s", "fp8 TFLOP/s", "GB", "NVLink GB/s", "source"]
    model_heads = [
        "model",
        "parameters",
        "layers",
        "hidden",
        "heads, KV heads, width",
        "vocabulary",
        "source",
    ]
    on: dict[str, list[str]] = {}
    for gpu, model, dtype, count in SETUPS:
        on.setdefault(f"{model} {dtype}", []).append(f"{count} {gpu}")
    setups = "; ".join(f"{name} on {', '.join(used)}" for name, used in on.items())
    contexts = {int(s.rsplit(" ", 1)[1].replace(",", "")) for s in results["setups"] if "context" in s}
    at = ", ".join(f"{c:,}" for c in sorted(contexts))
    most = f"at most {results['num_draft_tokens']} drafts a request and step"
    return "\n\n".join(
        [
            tables.table(gpu_heads, gpus, "lrrrrrl"),
            tables.table(model_heads, models, "lrrrrrl"),
            tables.table(["our assumption", "value"], ours),
            f"Setups: {setups}; each at {at} tokens of context a request.",
            f"Traced: {results['records']} records, {results['positions']:,} positions, {most}.",
        ]
    )


#: Page → its blocks by name.
PAGES: dict[Path, dict[str, Callable[[Results], str]]] = {
    tables.DOCS / "worth-it.md": {"gains": gains},
    tables.DOCS / "developer" / "serving-rules.md": {
        "edit": one_setup,
        "graphs": graphs,
        "assumptions": assumptions,
    },
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

"""The picture of docs/agents.md from benchmarks/results/agents.json: ``python -m benchmarks.agents.picture``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks import tables
from benchmarks.pictures import GREY, for_both_schemes, pyplot, save

PICTURE = tables.DOCS / "img" / "agents.svg"
#: Name of a row → its label, marker and colour.
MARKS = {
    "gpu_align": ("gpu_align", "o", GREY),
    "gpu_align, views": ("with the forms", "o", "#009688"),
    "gpu_align, views, learned": ("and a pack of its answers", "o", "#0072b2"),
    "suffix_decoding_4_deep, views": ("suffix decoding with the forms", "|", "#e69f00"),
    "suffix_decoding_4_deep_cached, views": ("and its answers cached", "|", "#d55e00"),
}


def speeds(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Form of the answer → row → tokens a step, over all collections but the answers that edit nothing."""
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for case in cases:
        if case["collection"].endswith("no edit") or case["written"] == "thoughts":
            continue
        for name in MARKS:
            counts, total = case["rows"][name], sums[case["written"]][name]
            total[0] += counts["output_tokens"]
            total[1] += counts["steps"]
    return {form: {name: t / n for name, (t, n) in rows.items()} for form, rows in sums.items()}


def draw(results: dict[str, Any]) -> Any:
    """A line a form: without the forms, and with them."""
    found = sorted(speeds(results["cases"]).items(), key=lambda item: item[1]["gpu_align, views"])
    figure, panel = pyplot().subplots(figsize=(7.5, 3.2), layout="constrained")
    for at, (_, rows) in enumerate(found):
        panel.plot([rows["gpu_align"], rows["gpu_align, views"]], [at, at], color=GREY, linewidth=1)
    for name, (label, marker, color) in MARKS.items():
        values = [rows[name] for _, rows in found]
        panel.plot(values, range(len(found)), marker, color=color, markersize=9 if marker == "|" else 6,
                   markeredgewidth=2, label=label)  # fmt: skip
    panel.set_yticks(range(len(found)), [form for form, _ in found])
    panel.set_xlim(left=1)
    panel.set_xlabel("tokens a step, all collections")
    legend = panel.legend(frameon=False, loc="lower right")
    for_both_schemes(figure, [panel], legend)
    return figure


if __name__ == "__main__":
    save(draw(tables.read("agents")), PICTURE)

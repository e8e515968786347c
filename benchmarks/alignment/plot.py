"""A picture of a benchmark run: ``python -m benchmarks.alignment.plot ROWS.jsonl OUT.png``. Needs matplotlib."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pictures import pyplot, save
from benchmarks.tables import command

#: One colour a contestant, whatever else is in the picture. Ours are the two strongest.
COLOURS = {
    "gpu_align_gpu": "#0f766e",
    "gpu_align_cpu": "#5eead4",
    "rapidfuzz": "#b45309",
    "difflib": "#a1a1aa",
    "myers": "#ca8a04",
    "static_text": "#78716c",
    "prompt_lookup": "#2563eb",
    "suffix_decoding": "#7c3aed",
}


class Panel(NamedTuple):
    """One plot: what is timed, and the length of its texts or of what is new."""

    title: str
    size: int
    unit: str


#: Contestant → (batch, median, interquartile range), by batch.
Lines = dict[str, list[tuple[int, float, float]]]


def panels(rows: Iterable[Mapping[str, Any]]) -> dict[Panel, Lines]:
    """The times of the suite's rows by panel: device time where there is one, else wall time."""
    found: dict[Panel, Lines] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        match = re.fullmatch(r"(.+), batch (\d+), (\d+) ((?:new )?tokens)(?:, (\w+))?", row.get("group", ""))
        if match is None:
            continue
        title = match[1] + (f", {match[5]}" if match[5] else "")
        times = row.get("device_us") or {"median": row["us"], "iqr": row["iqr_us"]}
        points = found[Panel(title, int(match[3]), match[4])][row["contestant"]]
        points.append((int(match[2]), times["median"], times["iqr"]))
        points.sort()
    return {panel: dict(found[panel]) for panel in sorted(found)}


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Titles down, text lengths across; time against batch, both logarithmic."""
    plt = pyplot()
    found = panels(rows)
    if not found:
        raise ValueError("expected groups like 'step, batch 64, 1024 tokens', found none")
    titles = list(dict.fromkeys(panel.title for panel in found))
    rows_of = {title: [panel for panel in found if panel.title == title] for title in titles}
    width = max(map(len, rows_of.values()))
    shape = {"figsize": (3.6 * width, 2.7 * len(titles)), "sharex": True, "squeeze": False}
    figure, axes = plt.subplots(len(titles), width, **shape)
    for axis in axes.flat:
        axis.set_visible(False)
    for panel, lines in found.items():
        row = titles.index(panel.title)
        axis = axes[row][rows_of[panel.title].index(panel)]
        axis.set_visible(True)
        for name, points in sorted(lines.items()):
            batch, median, iqr = zip(*points, strict=True)
            # A spread wider than the median itself would leave the logarithmic axis.
            down = [min(i / 2, m * 0.9) for i, m in zip(iqr, median, strict=True)]
            axis.errorbar(
                batch, median, yerr=[down, [i / 2 for i in iqr]], label=name, color=COLOURS.get(name),
                marker="o", markersize=3, linewidth=1.2, capsize=2,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", title=f"{panel.title}, {panel.size:,} {panel.unit}")
        axis.tick_params(labelbottom=True)
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=6)
        axis.set_xlabel("batch", fontsize=8)
    for line in axes:
        line[0].set_ylabel("µs (median, IQR)", fontsize=8)
    machine = rows[0]["machine"]
    versions = ", ".join(f"{k} {machine[k]}" for k in ("python", "torch", "triton") if k in machine)
    figure.suptitle(f"{machine['cpu']} · GPU: {machine['gpu']} · {versions}", fontsize=8)
    figure.tight_layout()
    save(figure, out, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = command("benchmarks.alignment.plot", __doc__)
    parser.add_argument("rows", type=Path, help="what --rows of the suite wrote")
    parser.add_argument("out", type=Path, help=".png, .svg or .pdf")
    options = parser.parse_args(argv)
    try:
        draw([json.loads(row) for row in options.rows.read_text(encoding="utf-8").splitlines()], options.out)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A picture of a benchmark run: ``python -m benchmarks.speed.plot BENCH.json OUT.png``. Needs matplotlib."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.pictures import pyplot, save
from benchmarks.speed.compare import Timing, read_timings
from benchmarks.tables import command

#: One colour a contestant, whatever else is in the picture. Ours are the two strongest.
COLOURS = {
    "gpu": "#0f766e",
    "triton": "#0f766e",
    "cpu": "#5eead4",
    "numpy_reference": "#5eead4",
    "rapidfuzz": "#b45309",
    "difflib": "#78716c",
    "static_text": "#78716c",
    "prompt_lookup": "#b45309",
    "suffix_tree": "#7c3aed",
    "vllm_ngram_gpu": "#be123c",
}


class Panel(NamedTuple):
    """One plot: what is timed, and the length of its texts."""

    title: str
    size: int


def panels(timings: dict[str, Timing]) -> dict[Panel, dict[str, list[tuple[int, float, float]]]]:
    """Panel → contestant → (batch, median, interquartile range), by batch."""
    found: dict[Panel, dict[str, list[tuple[int, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings.values():
        match = re.fullmatch(r"(.+), batch (\d+), (\d+) tokens(?:, (\w+))?", timing.group)
        if match is None:
            continue
        title = match[1] + (f", {match[4]}" if match[4] else "")
        found[Panel(title, int(match[3]))][timing.contestant].append(
            (int(match[2]), timing.median, timing.iqr)
        )
    for lines in found.values():
        for points in lines.values():
            points.sort()
    return {panel: dict(found[panel]) for panel in sorted(found)}


def draw(machine: dict[str, str], timings: dict[str, Timing], out: Path) -> None:
    """Titles down, text lengths across; time against batch, both logarithmic."""
    plt = pyplot()
    found = panels(timings)
    if not found:
        raise ValueError("expected groups like 'step, batch 64, 1024 tokens', found none")
    titles = list(dict.fromkeys(panel.title for panel in found))
    sizes = sorted({panel.size for panel in found})
    figure, axes = plt.subplots(
        len(titles), len(sizes), figsize=(3.6 * len(sizes), 2.7 * len(titles)), sharex=True, squeeze=False
    )
    for panel, lines in found.items():
        axis = axes[titles.index(panel.title)][sizes.index(panel.size)]
        for name, points in sorted(lines.items()):
            batch, median, iqr = zip(*points, strict=True)
            # A spread wider than the median itself would leave the logarithmic axis.
            down = [min(i / 2, m * 0.9) for i, m in zip(iqr, median, strict=True)]
            axis.errorbar(
                batch, median, yerr=[down, [i / 2 for i in iqr]], label=name, color=COLOURS.get(name),
                marker="o", markersize=3, linewidth=1.2, capsize=2,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", title=f"{panel.title}, {panel.size:,} tokens")
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=6)
    for axis in axes[-1]:
        axis.set_xlabel("batch", fontsize=8)
    for row in axes:
        row[0].set_ylabel("µs (median, IQR)", fontsize=8)
    versions = ", ".join(f"{k} {machine[k]}" for k in ("python", "torch", "triton") if k in machine)
    figure.suptitle(f"GPU: {machine.get('gpu', '?')} · {machine.get('cpu', '?')} · {versions}", fontsize=8)
    figure.tight_layout()
    save(figure, out, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = command("benchmarks.speed.plot", __doc__)
    parser.add_argument("run", type=Path, help="what pytest --benchmark-json wrote")
    parser.add_argument("out", type=Path, help=".png, .svg or .pdf")
    options = parser.parse_args(argv)
    try:
        draw(*read_timings(options.run), options.out)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

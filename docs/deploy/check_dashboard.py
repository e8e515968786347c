"""Run every query of the dashboard against a Prometheus, and draw what it answers.

::

    python docs/deploy/check_dashboard.py http://localhost:9090 --window 1m [--png dashboard.png --minutes 30]

It ends with 1 if a query fails or has no data. Needs matplotlib for `--png`, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).with_name("grafana") / "dashboards" / "gpu_align.json"
POINTS = 120
#: A data series: labels, and (time, value) pairs.
Series = dict[str, Any]


class Query(NamedTuple):
    """One query of a panel, with Grafana's variables filled in."""

    panel: dict[str, Any]
    expr: str
    legend: str


def queries(dashboard: dict[str, Any], window: str, job: str = ".*") -> Iterator[Query]:
    """Grafana's query. window: `$__rate_interval`, four times the scrape interval. job: the job variable."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", window).replace("$job", job)
            if "$" in expr:
                raise ValueError(f"{panel['title']}: a variable that is not known, in {expr}")
            yield Query(panel, expr, target["legendFormat"])


def ask(prometheus: str, path: str, **parameters: object) -> Any:
    """`data` of an answer of Prometheus's HTTP API. A query that it refuses is a `ValueError` in its words."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.loads(error.read() or b"{}")
    if answer.get("status") != "success":
        raise ValueError(answer.get("error", f"{prometheus} is no Prometheus"))
    return answer["data"]


def run(prometheus: str, query: Query, seconds: float) -> list[Series]:
    """The query over the last `seconds`."""
    end = time.time()
    step = max(1, seconds // POINTS)
    found = ask(prometheus, "query_range", query=query.expr, start=end - seconds, end=end, step=step)
    return list(found["result"])


def has_data(series: list[Series]) -> bool:
    """Whether there is any number. (0 / 0, as before the first request, is not a number.)"""
    return any(math.isfinite(float(value)) for one in series for _, value in one["values"])


def draw(answers: list[tuple[Query, list[Series]]], png: Path) -> None:
    """The panels in the places that the dashboard gives them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cells = {query.panel["id"]: query.panel["gridPos"] for query, _ in answers}
    rows = max(cell["y"] + cell["h"] for cell in cells.values())
    figure = plt.figure(figsize=(15, rows * 0.42), layout="constrained")
    grid = figure.add_gridspec(rows, 24)
    axes: dict[int, Any] = {}
    start = min(stamp for _, found in answers for one in found for stamp, _ in one["values"])
    for query, found in answers:
        panel, cell = query.panel, cells[query.panel["id"]]
        if panel["id"] not in axes:
            place = grid[cell["y"] : cell["y"] + cell["h"], cell["x"] : cell["x"] + cell["w"]]
            axes[panel["id"]] = figure.add_subplot(place)
            axes[panel["id"]].set_title(panel["title"], fontsize=9, loc="left")
        axis = axes[panel["id"]]
        if panel["type"] == "stat":
            _draw_stat(axis, query, found)
        elif panel["type"] == "heatmap":
            _draw_heatmap(axis, found, start)
        else:
            for one in found:
                times = [(stamp - start) / 60 for stamp, _ in one["values"]]
                label = query.legend
                for name, value in one["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                values = [float(value) for _, value in one["values"]]
                # A series that stays at 0 has a line and no place in the legend.
                axis.plot(times, values, label=label if any(values) else None, linewidth=1.2)
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize=6, loc="upper left", ncols=2)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
    for query, _ in answers:
        if query.panel["type"] == "timeseries":
            axes[query.panel["id"]].set_ylim(bottom=0)  # only now: it ends the scaling of the axis
    figure.supxlabel("minutes", fontsize=8)
    figure.savefig(png, dpi=100)


def _draw_stat(axis: Any, query: Query, found: list[Series]) -> None:
    numbers = [value for one in found for _, value in one["values"] if math.isfinite(float(value))]
    defaults = query.panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    shown = query.legend if unit == "none" else "no data"
    if "mappings" in defaults and numbers:
        shown = defaults["mappings"][0]["options"][f"{float(numbers[-1]):.0f}"]["text"]
    elif unit == "none" and found:
        for name, value in found[-1]["metric"].items():
            shown = shown.replace("{{" + name + "}}", value)
    elif numbers:
        last = float(numbers[-1])
        shown = (
            f"{last:.1%}" if unit == "percentunit" else f"{last:.2f}" + (" req/s" if unit == "reqps" else "")
        )
    axis.axis("off")
    axis.text(
        0.5, 0.4, shown, ha="center", va="center", fontsize=11 if unit == "none" else 20, color="#00796b"
    )


def _draw_heatmap(axis: Any, found: list[Series], start: float) -> None:
    """Prometheus's buckets are cumulative; Grafana shows their differences, and so does this."""
    buckets = sorted(found, key=lambda one: float(one["metric"]["le"]))
    times = sorted({stamp for one in buckets for stamp, _ in one["values"]})
    table, below = [], dict.fromkeys(times, 0.0)
    for one in buckets:
        counts = {stamp: float(value) for stamp, value in one["values"]}
        counts = {stamp: counts.get(stamp, below[stamp]) for stamp in times}
        table.append([max(0.0, counts[stamp] - below[stamp]) for stamp in times])
        below = counts
    extent = ((times[0] - start) / 60, (times[-1] - start) / 60, -0.5, len(table) - 0.5)
    axis.imshow(table, aspect="auto", origin="lower", cmap="viridis", extent=extent)
    axis.set_yticks(range(len(table)), [one["metric"]["le"] for one in buckets], fontsize=6)
    axis.tick_params(labelsize=6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prometheus", metavar="URL", help="for example http://localhost:9090")
    parser.add_argument("--window", default="1m", help="$__rate_interval: four times the scrape interval")
    parser.add_argument("--job", default=".*", help="regular expression of the job label")
    parser.add_argument("--minutes", type=float, default=60, help="how far back to look")
    parser.add_argument("--png", type=Path, help="draw the panels into this file")
    given = parser.parse_args()
    answers, bad = [], 0
    for query in queries(json.loads(DASHBOARD.read_text(encoding="utf-8")), given.window, given.job):
        title = f"{query.panel['title']} ({query.legend})"
        try:
            found = run(given.prometheus.rstrip("/"), query, given.minutes * 60)
        except (OSError, ValueError) as error:
            print(f"failed   {title}: {error}")
            bad += 1
            continue
        if has_data(found):
            answers.append((query, found))
            print(f"ok       {title}: {len(found)} series")
        else:
            print(f"no data  {title}: {query.expr}")
            bad += 1
    if given.png and answers:
        draw(answers, given.png)
    print(f"{len(answers)} queries have data, {bad} have not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""The pictures of docs/published.md.

They have no background. Their text is a grey that is legible on white and on black, and so are their colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pictures import pyplot, save
from benchmarks.published.letters import LOOKAHEAD
from benchmarks.tables import DOCS

FOLDER = DOCS / "img"
GREY = "#808791"
#: Policy → its label and colour; those that are not here are thin grey lines.
COLOURS = {
    "baseline": ("no drafts", "#98a2ad"),
    "openai": ("OpenAI's rule", "#4c7fd0"),
    "static_text": ("Cascade's static text", "#3f9b57"),
    "cursor": ("no realignment", "#b59a2e"),
    "prompt_lookup": ("prompt lookup", "#9a6fc4"),
    "suffix_decoding_4_deep": ("suffix decoding, factor 4", "#c9534a"),
    "gpu_align": ("gpu-align", "#d98324"),
}
#: A published figure; its edge and its face are legible on every bar and on both backgrounds.
_MARK = {
    "marker": "D", "markersize": 6, "markerfacecolor": "#ffffff", "markeredgecolor": "#3a3f47", "linestyle": "",
}  # fmt: skip
_TEXT = (
    "text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color",
)  # fmt: skip
_BARS = ("baseline", "openai", "static_text", "gpu_align")
_REPLACED, _PUBLISHED = "replaced", "published"


def draw_all(results: dict[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Draw every picture, and return the files."""
    openai, cascade = results["openai"], results["cascade"]
    drawn = {
        "published-bifurcations": _bifurcations(openai["bifurcations"], openai["tasks"]),
        "published-insertions": _insertions(openai["insertions"]),
        "published-edits": _edits(cascade["tasks"]),
        "published-accuracy": _accuracy(cascade["curve"], cascade["num_draft_tokens"]),
    }
    paths = []
    for name, figure in drawn.items():
        paths.append(folder / f"{name}.svg")
        save(figure, paths[-1], transparent=True)
    return paths


def _bifurcations(found: dict[str, Any], tasks: list[dict[str, Any]]) -> Any:
    figure, panel = _pyplot().subplots(figsize=(8, 3.2), layout="constrained")
    positions = np.arange(found["size"])
    panel.bar(positions, found["rejected"][_REPLACED], color=COLOURS["openai"][1], width=0.8)
    panel.axhline(LOOKAHEAD, color=GREY, linestyle="--", linewidth=1)
    panel.annotate(
        f"never above {LOOKAHEAD}, as published", (0.99, LOOKAHEAD), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", ha="right", va="bottom",
    )  # fmt: skip
    at = {
        task["at"]: task["published"][1]
        for task in tasks
        if task["kind"] == _REPLACED and task["size"] == found["size"]
    }
    panel.plot(*zip(*at.items(), strict=True), **_MARK, label="published")
    panel.legend(loc="upper left", frameon=False)
    panel.set(
        xlabel="position of the replaced token in the draft", ylabel="rejected", xlim=(-0.7, found["size"] - 0.3),
        ylim=(0, LOOKAHEAD + 3), yticks=range(0, LOOKAHEAD + 1, 4),
    )  # fmt: skip
    panel.grid(axis="y", alpha=0.25)
    return figure


def _insertions(found: dict[str, Any]) -> Any:
    pyplot = _pyplot()
    from matplotlib.ticker import MaxNLocator

    figure, panels = pyplot.subplots(2, 2, figsize=(8, 5), sharex=True, sharey=True, layout="constrained")
    titles = {
        "accepted": "accepted, OpenAI's rule",
        "rejected": "rejected, OpenAI's rule",
        "steps": "verification steps, OpenAI's rule",
        "our_steps": "verification steps, gpu-align",
    }
    edges = [edge for name in ("positions", "lengths") for edge in _edges(found[name])]
    most_steps = np.max(found["steps"])
    for panel, (name, title) in zip(panels.flat, titles.items(), strict=True):
        most = most_steps if name.endswith("steps") else np.max(found[name])
        image = panel.imshow(
            found[name], origin="lower", aspect="auto", extent=edges, cmap="viridis", interpolation="nearest",
            vmin=0, vmax=most,
        )  # fmt: skip
        panel.set_title(title, fontsize=10)
        figure.colorbar(image, ax=panel).locator = MaxNLocator(integer=True)
    figure.supxlabel("position of the insertion in the draft", fontsize=10, color=GREY)
    figure.supylabel("tokens inserted", fontsize=10, color=GREY)
    return figure


def _edges(centres: list[int]) -> tuple[float, float]:
    """Where the first of these evenly spaced cells begins and the last one ends."""
    half = (centres[1] - centres[0]) / 2
    return centres[0] - half, centres[-1] + half


def _edits(tasks: list[dict[str, Any]]) -> Any:
    figure, panel = _pyplot().subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(_BARS)
    for number, name in enumerate(_BARS):
        label, colour = COLOURS[name]
        at = [task + (number - (len(_BARS) - 1) / 2) * width for task in range(len(tasks))]
        heights = [
            1.0 if name == "baseline" else task["output_tokens"] / task["here"][name]["steps"]
            for task in tasks
        ]
        panel.bar(at, heights, width * 0.92, color=colour, label=label)
        marks = [task[_PUBLISHED].get(name, (None,))[0] for task in tasks]
        for x, height, mark in zip(at, heights, marks, strict=True):
            collides = mark is not None and height <= mark < 1.4 * height
            panel.annotate(
                f"{height:.1f}", (x, mark if collides else height), xytext=(0, 7 if collides else 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
        shown = [(x, mark) for x, mark in zip(at, marks, strict=True) if mark is not None]
        if shown:
            label = "published, in time" if name == "static_text" else None
            panel.plot(*zip(*shown, strict=True), **_MARK, label=label, zorder=3)
    panel.set_yscale("log")
    ticks = (1, 2, 4, 8, 16, 32)
    panel.set_yticks(ticks, [f"{tick}×" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(0.7, 48)
    panel.set_xticks(range(len(tasks)), [task["task"].replace(", ", ",\n") for task in tasks])
    panel.set_ylabel("tokens a verification step")
    panel.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure


def _accuracy(curve: dict[str, Any], num_draft_tokens: int) -> Any:
    figure, panels = _pyplot().subplots(1, 2, figsize=(8, 4.6), sharey=True, layout="constrained")
    right = [100 - level for level in curve["changed"]]
    titles = {"scattered": "changed lines scattered", "block": "changed lines in one block"}
    share = np.linspace(0, 1, 201)
    for panel, (layout, title) in zip(panels, titles.items(), strict=True):
        found = curve["layouts"][layout]
        most = num_draft_tokens + 1
        panel.plot(
            100 * share, 1 / (1 - share * (1 - 1 / most)), color=GREY, linestyle="--", linewidth=1.2,
            label="time falls linearly", zorder=2,
        )  # fmt: skip
        named = [name for name in COLOURS if name in found["runs"]]
        for name in [name for name in found["runs"] if name not in COLOURS] + named:
            speed = [
                n / run["steps"] for n, run in zip(found["output_tokens"], found["runs"][name], strict=True)
            ]
            label, colour = COLOURS.get(name, (None, GREY))
            panel.plot(
                right, speed, color=colour, label=label, linewidth=2 if label else 0.6,
                alpha=1 if label else 0.6, marker="o" if label else "", markersize=3, zorder=4 if label else 1,
            )  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.set(xlabel="lines that the prediction has right, %", yscale="log")
        ticks = (1, 2, 4, 8, 16, 32)
        panel.set_yticks(ticks, [f"{tick}×" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("tokens a verification step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _pyplot() -> Any:
    return pyplot(**{"font.size": 9, **dict.fromkeys(_TEXT, GREY)})

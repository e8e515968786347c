"""Pictures without a background, in a grey that stands out from white and from black; the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GREY = "#808080"


def pyplot() -> Any:
    """matplotlib's, without a screen. Text stays text and ids repeat: the same numbers give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "gpu-align", "font.family": "sans-serif"}
    matplotlib.rcParams.update(fixed)
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write an SVG file without a date."""
    figure.savefig(path, metadata={"Date": None}, **options)


def for_both_schemes(figure: Any, panels: Any, legend: Any = None) -> None:
    """No background, and text, axes and grid in `GREY`."""
    figure.patch.set_alpha(0)
    for panel in panels:
        panel.patch.set_alpha(0)
        panel.grid(color=GREY, alpha=0.25)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(GREY)
        panel.tick_params(colors=GREY)
        for spine in panel.spines.values():
            spine.set_color(GREY)
    for text in legend.get_texts() if legend is not None else ():
        text.set_color(GREY)

"""Pictures without a background, in a grey that stands out from white and from black; the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GREY = "#808080"
#: Text stays text and ids repeat: the same numbers give the same file.
_SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "gpu-align", "font.family": "sans-serif", "axes.grid": True,
    "grid.alpha": 0.25, "figure.facecolor": "#ffffff00", "axes.facecolor": "#ffffff00",
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "axes.edgecolor", "grid.color"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), GREY),
}  # fmt: skip


def pyplot() -> Any:
    """matplotlib's, without a screen, for both colour schemes of the pages."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(_SETTINGS)
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write an SVG file without a date."""
    figure.savefig(path, metadata={"Date": None}, **options)

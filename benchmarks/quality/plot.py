"""The picture of draft quality: the trade-off at each K.

``python -m benchmarks.quality.plot`` draws it from benchmarks/results/quality.json, without a replay. It has no
background, and a grey that stands out from white and from black; the same numbers give the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.checks import Point, our_curve, point
from benchmarks.quality.runs import CLAIRVOYANT, WITHOUT_RECIPES, Counts, Run
from benchmarks.tables import DOCS, read
from gpu_align.tools.simulate.policies import OURS

GREY = "#808080"
_SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "gpu-align", "font.family": "sans-serif", "axes.grid": True,
    "grid.alpha": 0.25, "figure.facecolor": "#ffffff00", "axes.facecolor": "#ffffff00",
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "axes.edgecolor", "grid.color"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), GREY),
}  # fmt: skip
_RED, _ORANGE, _WINE, _YELLOW, _BLUE, _SKY = "#e0574f", "#e8862e", "#a8507c", "#c9a227", "#3f7fe0", "#45a5d9"
_GREEN, _PURPLE, _BROWN = "#5a9e3a", "#9b72cf", "#a07a4a"
_OURS = "#14a098"
#: Family of peers -> colour and marker. Members are joined by a line where one setting rises through them.
FAMILIES = {
    "suffix decoding": (r"suffix_decoding(_\d+)?", _RED, "s"),
    "suffix decoding, depth 128": (r"suffix_decoding(_\d+)?_deep", _ORANGE, "D"),
    "suffix decoding with the tuning split": (r"suffix_decoding(_\d+)?_deep_cached", _WINE, "D"),
    "suffix decoding, vLLM's depth 24": (r"suffix_decoding_vllm", _RED, "P"),
    "n-gram, window 2–5": (r"prompt_lookup(_vllm_2_5)?", _BLUE, "o"),
    "n-gram, window 1–3": (r"prompt_lookup_vllm(_v2)?_1_3", _BLUE, "v"),
    "n-gram, vLLM's window 5": (r"prompt_lookup_vllm(_v2)?", _BLUE, "^"),
    "transformers' prompt lookup": (r"prompt_lookup_transformers", _SKY, "P"),
    "static text": (r"static_text", _GREEN, "*"),
    "OpenAI, as reverse-engineered": (r"openai", _PURPLE, "X"),
    "streaming Myers diff": (r"myers", _YELLOW, "h"),
    "input lookup, node-llama-cpp": (r"input_lookup_node_llama_cpp", _BROWN, "d"),
    "recipes alone": (r"recipe_pack", GREY, "p"),
}
_JOINED = ("suffix decoding", "suffix decoding, depth 128", "suffix decoding with the tuning split")
_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)
TITLE = "Test split of the corpus; each mark is a setting, the large one our default"


def draw_stored(numbers: Mapping[str, Any], path: Path = DOCS / "img" / "quality.svg") -> None:
    """One panel a K: tokens a step over rejected per accepted (logarithmic), our curve and every peer.

    numbers: those of the documentation.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(_SETTINGS)
    from matplotlib.pyplot import subplots

    counts = {
        Run(run["policy"], run["num_draft_tokens"], tuple(run["setting"].items())): Counts(**run["test"])
        for run in numbers["runs"]
    }
    sizes = sorted({run.num_draft_tokens for run in counts})
    figure, panels = subplots(
        1, len(sizes), figsize=(3.1 * len(sizes), 4.9), sharey=True, layout="constrained"
    )
    for panel, k in zip(panels, sizes, strict=True):
        _draw_curves(panel, counts, k)
        panel.set_title(f"K = {k}", fontsize=11)
        panel.plot(
            *_xy([point(counts[Run(OURS, k, WITHOUT_RECIPES)])]), color=_OURS, linestyle="", marker="o",
            markersize=9, fillstyle="none", zorder=6, label="gpu-align without recipes",
        )  # fmt: skip
        if (bound := counts.get(Run(CLAIRVOYANT, k))) is not None:
            panel.axhline(bound.tokens_per_step, color=GREY, linewidth=0.8, linestyle=":")
            panel.annotate(
                "bound: clairvoyant", (0.02, bound.tokens_per_step), fontsize=9, color=GREY,
                xycoords=("axes fraction", "data"), ha="left", va="bottom",
            )  # fmt: skip
    panels[0].set_ylabel("tokens a verification step", fontsize=11)
    panels[len(sizes) // 2].set_xlabel("rejected drafts per accepted one", fontsize=11)
    handles = panels[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(TITLE, fontsize=11, color=GREY)
    figure.savefig(path, metadata={"Date": None}, dpi=150)


def _draw_curves(panel: Any, counts: Mapping[Run, Counts], num_draft_tokens: int) -> None:
    """Our curve with its default, and every family that has members, over a logarithmic axis."""
    ours = [p for p in our_curve(counts, num_draft_tokens) if p.rejected_per_accepted > 0]
    panel.plot(*_xy(ours), color=_OURS, linewidth=2.2, marker="o", markersize=4, label="gpu-align", zorder=5)
    default = point(counts[Run(OURS, num_draft_tokens)])
    panel.plot(*_xy([default]), color=_OURS, marker="o", markersize=9, zorder=6)
    for label, (pattern, colour, marker) in FAMILIES.items():
        members = sorted(
            point(c)
            for run, c in counts.items()
            if run.num_draft_tokens == num_draft_tokens and re.fullmatch(pattern, run.policy) and c.accepted
        )
        if members:
            panel.plot(
                *_xy(members), linestyle="-" if label in _JOINED else "", linewidth=1, color=colour, marker=marker,
                markersize=6, markeredgewidth=0, label=label,
            )  # fmt: skip
    panel.set_xscale("log")
    panel.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    panel.minorticks_off()
    panel.set_xlim(_TICKS[0] * 0.8, None)


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Nothing is at 0 on a logarithmic axis: what rejects less than the axis shows stands at its left end."""
    rejected, tokens = zip(*points, strict=True)
    return [max(each, _TICKS[0]) for each in rejected], list(tokens)


if __name__ == "__main__":
    draw_stored(read("quality"))

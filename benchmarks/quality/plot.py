"""The pictures of draft quality: the trade-off at each K, and the reliability diagram."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.checks import K, our_curve, point
from benchmarks.quality.curves import Point
from benchmarks.quality.runs import BOUNDS, WITHOUT_RECIPES, Counts, Run
from gpu_align.simulate import Reliability
from gpu_align.simulate.policies import OURS

#: Family of peers -> colour and marker. Members are joined by a line where one setting rises through them.
FAMILIES = {
    "suffix decoding": (r"suffix_decoding(_\d+)?", "#c8553d", "s"),
    "suffix decoding, tree of depth 128": (r"suffix_decoding(_\d+)?_deep", "#8c3f2d", "D"),
    "suffix decoding that knows the tuning split": (r"suffix_decoding(_\d+)?_deep_cached", "#5e1f14", "D"),
    "suffix decoding, vLLM's depth 24": (r"suffix_decoding_vllm", "#e0a89b", "s"),
    "n-gram, window 2–5": (r"prompt_lookup(_vllm_2_5)?", "#5b7db1", "o"),
    "n-gram, window 1–3": (r"prompt_lookup_vllm(_v2)?_1_3", "#86a6d6", "v"),
    "n-gram, vLLM's window 5": (r"prompt_lookup_vllm(_v2)?", "#3a5583", "^"),
    "transformers' prompt lookup": (r"prompt_lookup_transformers", "#9a86b8", "P"),
    "static text": (r"static_text", "#6b9362", "*"),
    "OpenAI, as reverse-engineered": (r"openai", "#555555", "X"),
    "streaming Myers diff": (r"myers", "#b89b5e", "h"),
    "input lookup of node-llama-cpp": (r"input_lookup_node_llama_cpp", "#a0a0a0", "d"),
    "recipes alone": (r"recipe_pack", "#5fa8a0", "p"),
}
_JOINED = (
    "suffix decoding",
    "suffix decoding, tree of depth 128",
    "suffix decoding that knows the tuning split",
)
_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LEAST_REJECTED = _TICKS[0]
_OURS = "#0f766e"
#: Colours that stand out from white and from black.
_OURS_BOTH, _GREY = "#14a098", "#808080"
KIND_FAMILIES = {
    "suffix decoding": (r"suffix_decoding(_\d+)?", "#e07a5f", "s"),
    "suffix decoding, tree of depth 128": (r"suffix_decoding(_\d+)?_deep", "#d1495b", "D"),
    "suffix decoding, vLLM's depth 24": (r"suffix_decoding_vllm", "#c9a227", "s"),
    "n-gram": (r"prompt_lookup.*", "#5b8def", "^"),
    "static text": (r"static_text", "#6aa84f", "*"),
    "OpenAI, as reverse-engineered": (r"openai", "#9b72cf", "X"),
}


def draw_trade_off(counts: Mapping[Run, Counts], title: str, path: Path) -> None:
    """One panel a K: tokens a step over rejected per accepted (logarithmic), our curve and every peer.

    Args:
        counts: the sums of every run over the same records.
        title: of the whole picture.
        path: ``.svg`` or ``.png``.
    """
    plt = _pyplot()
    sizes = sorted({run.num_draft_tokens for run in counts})
    figure, panels = plt.subplots(1, len(sizes), figsize=(4.6 * len(sizes), 4.6), sharey=True, squeeze=False)
    for panel, k in zip(panels[0], sizes, strict=True):
        ours = [p for p in our_curve(counts, k) if p.rejected_per_accepted > 0]
        panel.plot(
            *_xy(ours), color=_OURS, linewidth=2.2, marker="o", markersize=4, label="gpu-align", zorder=5
        )
        default = counts.get(Run(OURS, k))
        if default is not None:
            panel.plot(*_xy([point(default)]), color=_OURS, marker="o", markersize=9, zorder=6)
        without = counts.get(Run(OURS, k, WITHOUT_RECIPES))
        if without is not None:
            panel.plot(
                *_xy([point(without)]), color=_OURS, linestyle="", marker="o", markersize=9, fillstyle="none",
                zorder=6, label="gpu-align by default, without recipes",
            )  # fmt: skip
        for label, (pattern, colour, marker) in FAMILIES.items():
            members = [
                point(c)
                for run, c in counts.items()
                if run.num_draft_tokens == k and re.fullmatch(pattern, run.policy) and c.accepted
            ]
            line = "-" if label in _JOINED else ""
            panel.plot(
                *_xy(sorted(members)), linestyle=line, linewidth=1, color=colour, marker=marker, markersize=6,
                label=label,
            )  # fmt: skip
        panel.set_xscale("log")
        panel.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        panel.minorticks_off()
        panel.set_xlim(_TICKS[0] * 0.8, None)
        panel.set_title(f"up to {k} drafts a step")
        panel.set_xlabel("rejected drafts per accepted one")
        panel.grid(alpha=0.25)
        for name in BOUNDS:
            bound = counts.get(Run(name, k))
            if bound is not None:
                panel.axhline(bound.tokens_per_step, color="#999999", linewidth=0.8, linestyle=":")
                panel.annotate(
                    name.replace("_", " "), (0.99, bound.tokens_per_step), fontsize=7, color="#777777",
                    xycoords=("axes fraction", "data"), ha="right", va="bottom",
                )  # fmt: skip
    panels[0][0].set_ylabel("tokens a verification step")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    _save(figure, path)


def draw_kinds(found: Mapping[str, Mapping[Run, Counts]], folder: Path) -> None:
    """A picture a kind: our curve and every peer at K = 64, on no background, in greys that both schemes show."""
    plt = _pyplot()
    for kind, counts in found.items():
        figure, panel = plt.subplots(figsize=(5.2, 3.4))
        panel.plot(*_xy(our_curve(counts, K)), color=_OURS_BOTH, linewidth=2.2, marker="o", markersize=3.5,
                   label="gpu-align", zorder=5)  # fmt: skip
        panel.plot(*_xy([point(counts[Run(OURS, K)])]), color=_OURS_BOTH, marker="o", markersize=8, zorder=6)
        for label, (pattern, colour, marker) in KIND_FAMILIES.items():
            members = sorted(
                point(c) for run, c in counts.items()
                if run.num_draft_tokens == K and re.fullmatch(pattern, run.policy) and c.accepted
            )  # fmt: skip
            line = "-" if label in _JOINED else ""
            panel.plot(*_xy(members), linestyle=line, linewidth=1, color=colour, marker=marker, markersize=5,
                       label=label)  # fmt: skip
        panel.set_xscale("log")
        panel.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        panel.minorticks_off()
        panel.set(xlabel="rejected drafts per accepted one", ylabel="tokens a step")
        panel.set_title(f"{kind}: {counts[Run(OURS, K)].records} records, K = {K}", fontsize=10)
        panel.grid(color=_GREY, alpha=0.25)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(_GREY)
        panel.tick_params(colors=_GREY)
        for spine in panel.spines.values():
            spine.set_color(_GREY)
        legend = panel.legend(fontsize=7, frameon=False)
        for text in legend.get_texts():
            text.set_color(_GREY)
        figure.patch.set_alpha(0)
        panel.patch.set_alpha(0)
        figure.tight_layout()
        _save(figure, folder / f"{kind}.svg")


def draw_reliability(reliability: Reliability, path: Path) -> None:
    """Observed acceptance over promised, a dot a decile, as large as its share of the drafts."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(4.6, 4.6))
    panel.fill_between([0, 1], [-0.05, 0.95], [0.05, 1.05], color="#dddddd", alpha=0.5, linewidth=0)
    panel.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    deciles = [d for d in reliability.deciles() if d.drafts]
    panel.scatter(
        [d.confidence for d in deciles], [d.accepted for d in deciles], color=_OURS, alpha=0.85, zorder=3,
        s=[12 + 400 * d.share for d in deciles],
    )  # fmt: skip
    for d in deciles:
        panel.annotate(
            f"{d.share:.1%}",
            (d.confidence, d.accepted),
            xytext=(8, -4),
            textcoords="offset points",
            fontsize=7,
        )
    panel.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence, mean of a decile", ylabel="share accepted")
    panel.set_title("does confidence mean what it says?", fontsize=11)
    panel.grid(alpha=0.25)
    figure.tight_layout()
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text and ids repeat, so that the same numbers give the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "gpu-align", "font.family": "sans-serif"}
    )
    import matplotlib.pyplot as plt

    return plt


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Nothing is at 0 on a logarithmic axis: what rejects less than the axis shows stands at its left end."""
    return [max(p.rejected_per_accepted, _LEAST_REJECTED) for p in points], [
        p.tokens_per_step for p in points
    ]


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date: the same numbers give the same bytes.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    _pyplot().close(figure)

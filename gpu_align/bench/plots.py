"""Grouped bars as SVG: one group a concurrency, one bar a mode, with a line for the spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 12, 30
_TICKS = 4

#: Each mode has a colour and a pattern of its own, for readers who do not tell the colours apart.
STYLE = """
svg.plot { width: 100%; height: auto; display: block; }
svg.plot text { fill: var(--fg); font: 12px system-ui, sans-serif; }
svg.plot .grid { stroke: var(--line); } svg.plot .spread { stroke: var(--fg); stroke-width: 1.5; }
.m-none { fill: #8b949e; } .m-prediction { fill: #1a9c5b; } .m-unrelated { fill: #d97706; }
.m-ngram { fill: #3b82f6; }
.hatch { stroke: var(--bg); stroke-width: 2; }
div.plots { display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem 1.5rem; }
div.plots figure { margin: 0; } div.plots figcaption { font-weight: 600; }
div.plots figcaption small { font-weight: 400; color: var(--soft); display: block; }
div.scroll { margin: 0 0 1rem; } div.scroll :is(th, td) { white-space: nowrap; }
ul.modes { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; }
ul.modes svg { width: 1em; height: 1em; margin-right: .4rem; vertical-align: -.1em; }
""".strip()

#: SVG line patterns over a bar: none, and two directions.
_HATCHES = {"unrelated": "M0 6L6 0", "ngram": "M0 0L6 6"}


class Bar(NamedTuple):
    """One bar: a mode, its value, and the ends of the line over it."""

    mode: str
    value: float
    low: float
    high: float


def plot(
    title: str, subtitle: str, groups: Sequence[tuple[str, Sequence[Bar]]], line: float | None = None
) -> str:
    """Return a figure.

    Args:
        title, subtitle: what it shows.
        groups: label and bars of each group.
        line: a value to mark, such as 1 for a ratio.
    """
    top = _round_up(max([bar.high for _, bars in groups for bar in bars] + [line or 0.0, 1e-9]))
    plain = _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return _TOP + plain * (1 - min(value, top) / top)

    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    for number, (label, bars) in enumerate(groups):
        left = _LEFT + width * number
        parts.append(
            f'<text x="{left + width / 2:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(label)}</text>'
        )
        each = min(width * 0.84 / max(1, len(bars)), 64)
        start = left + (width - each * len(bars)) / 2
        for place, bar in enumerate(bars):
            parts += _bar(bar, start + each * place, each * 0.86, y)
    if line is not None:
        parts.append(
            f'<line class="spread" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(line):.1f}" y2="{y(line):.1f}" '
            'stroke-dasharray="4 3"/>'
        )
    caption = f"<figcaption>{escape(title)}<small>{escape(subtitle)}</small></figcaption>"
    return f"<figure>{caption}{''.join(parts)}</svg></figure>"


def legend(modes: Sequence[tuple[str, str]]) -> str:
    """What the colours mean: a mode and its words each; and the patterns that all plots use."""
    box = '<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="m-{0}" width="14" height="14"/>{1}</svg>'
    size = 'width="14" height="14"'
    items = "".join(
        f"<li>{box.format(mode, _hatch(mode, size))}{escape(words)}</li>" for mode, words in modes
    )
    patterns = "".join(
        f'<pattern id="h-{mode}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path class="hatch" d="{path}"/></pattern>'
        for mode, path in _HATCHES.items()
    )
    defs = f'<svg width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'
    return f'{defs}<ul class="modes">{items}</ul>'


def _bar(bar: Bar, x: float, width: float, y: Callable[[float], float]) -> list[str]:
    top, bottom, middle = y(bar.value), y(0), x + width / 2
    place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    parts = [
        f"<g><title>{escape(bar.mode)}: {_number(bar.value)} ({_number(bar.low)} to {_number(bar.high)})</title>",
        f'<rect class="m-{escape(bar.mode)}" {place}/>',
        _hatch(bar.mode, place),
    ]
    if bar.high > bar.low:
        ends = f'y1="{y(bar.low):.1f}" y2="{y(bar.high):.1f}"'
        parts.append(f'<line class="spread" x1="{middle:.1f}" x2="{middle:.1f}" {ends}/>')
    return [*parts, "</g>"]


def _hatch(mode: str, place: str) -> str:
    return f'<rect {place} fill="url(#h-{mode})"/>' if mode in _HATCHES else ""


def _round_up(value: float) -> float:
    """The next of 1, 2, 3, 4, 6, 8, 10 times a power of ten, so that the ticks are round."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 2, 3, 4, 6, 8, 10) if value <= step * power * (1 + 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""The result as one page that needs nothing else: the plots, the table, what to know, how it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from .. import html

SPEED = ("mode", "streams", "requests", "tokens/s", "speed-up", "TTFT ms", "between tokens ms")
STEPS = ("mode", "streams", "tokens", "steps", "tokens/step", "accepted", "rejected", "identical")
LEGEND = (
    "streams: requests in flight. speed-up: tokens/s as a multiple of none in the same round, median "
    "(least–largest). TTFT: time to the first token; it and the time between tokens: p50/p90/p99."
)


def rows(runs: Sequence[Mapping[str, Any]], header: Sequence[str]) -> list[list[str]]:
    """Return one row a run, under `SPEED` or `STEPS`."""
    return [[_cells(run)[name] for name in header] for run in runs]


def _cells(run: Mapping[str, Any]) -> dict[str, str]:
    rate, tokens, steps = run["tokens_per_s"], run["output_tokens"], run["steps"]
    return {
        "mode": run["mode"],
        "streams": str(run["concurrency"]),
        "requests": f"{run['requests']:,}",
        "tokens/s": f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        "speed-up": "–" if run["speed_up"] is None else _ratio(run["speed_up"]),
        "TTFT ms": _percentiles(run["ttft_ms"]),
        "between tokens ms": _percentiles(run["itl_ms"]),
        "tokens": f"{tokens:,}",
        "steps": _count(steps),
        "tokens/step": f"{tokens / steps:.2f}" if steps else "–",
        "accepted": _count(run["accepted"]),
        "rejected": _count(run["rejected"]),
        "identical": run["identical"] or "unchecked",
    }


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f}× ({found['min']:.2f}–{found['max']:.2f})"


def verdict(runs: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[str]:
    """Return sentences that say what the table shows; only what was measured. about: `Result.about`."""
    by_key = {(run["mode"], run["concurrency"]): run for run in runs}
    found = []
    sent = about.get("predictions", {})
    made = "" if sent.get("before") else " made from the first answers"
    if sent.get("output") and not made:
        made = f" ({sent['output']} of {sent['pairs']} made from the first answers)"
    named = {
        "prediction": f"predictions{made}",
        "unrelated": "useless predictions",
        "context": "own context only",
        "conversation": "texts of the conversation",
        "plain": "no prediction on the other server",
        "ngram": "n-gram drafts",
    }
    for streams in dict.fromkeys(run["concurrency"] for run in runs):
        parts = []
        for mode, words in named.items():
            ratio = by_key.get((mode, streams), {}).get("speed_up")
            if ratio is not None:
                unsure = ratio["min"] <= 1 <= ratio["max"]
                beyond = f"{ratio['median']:.2f}× (no difference beyond the spread)"
                parts.append(f"{words} {beyond if unsure else _ratio(ratio)}")
        if parts:
            found.append(f"At {streams} at a time: {', '.join(parts)}.")
    useless = [run for run in runs if run["mode"] == "unrelated"]
    elsewhere = sum(run["accepted"] or 0 for run in useless)
    if elsewhere and all("by_source" in run for run in useless):
        of_prediction = sum(run["by_source"].get("prediction", {}).get("accepted", 0) for run in useless)
        found.append(
            f"Of {elsewhere:,} accepted draft tokens with useless predictions {elsewhere - of_prediction:,} are "
            "not from the prediction but from the request's own prompt and output, or recipes: with a prediction "
            "a request drafts from these, too."
        )
    different = [run for run in runs if run["identical"] == "no"]
    if different:
        where = ", ".join(f"{run['mode']} at {run['concurrency']} ({run['different']})" for run in different)
        found.append(f"Answers differ from the first run beyond near ties: {where}.")
    return found


def _percentiles(found: Mapping[str, float | None]) -> str:
    def shown(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"

    return "/".join(shown(found[name]) for name in ("p50", "p90", "p99"))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 12, 30
_TICKS = 4

#: SVG line patterns over a bar: none, and two directions. Each mode has a colour and a pattern of its own, for
#: readers who do not tell the colours apart.
_HATCHES = {"unrelated": "M0 6L6 0", "ngram": "M0 0L6 6", "conversation": "M0 3L6 3", "plain": "M3 0L3 6"}


class Bar(NamedTuple):
    """A mode, its value, and the ends of the line over its bar."""

    mode: str
    value: float
    low: float
    high: float


def _plot(title: str, subtitle: str, groups: Mapping[str, Sequence[Bar]], marked: float | None) -> str:
    """A figure: the bars of each label, and a value to mark, such as 1 for a ratio."""
    top = _round_up(max([bar.high for bars in groups.values() for bar in bars] + [marked or 0.0, 1e-9]))
    plain = _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return _TOP + plain * (1 - min(value, top) / top)

    def across(kind: str, value: float, more: str = "") -> str:
        ends = f'y1="{y(value):.1f}" y2="{y(value):.1f}"'
        return f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {ends}{more}/>'

    def text(x: str, height: str, anchor: str, words: str) -> str:
        return f'<text x="{x}" y="{height}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        parts.append(across("grid", value))
        parts.append(text(str(_LEFT - 6), f"{y(value) + 4:.1f}", "end", _number(value)))
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    for number, (label, bars) in enumerate(groups.items()):
        left = _LEFT + width * number
        parts.append(text(f"{left + width / 2:.1f}", str(_HEIGHT - 10), "middle", label))
        each = min(width * 0.84 / len(bars), 64)
        start = left + (width - each * len(bars)) / 2
        parts += [_bar(bar, start + each * place, each * 0.86, y) for place, bar in enumerate(bars)]
    if marked is not None:
        parts.append(across("spread", marked, ' stroke-dasharray="4 3"'))
    caption = f"<figcaption>{escape(title)}<small>{escape(subtitle)}</small></figcaption>"
    return f"<figure>{caption}{''.join(parts)}</svg></figure>"


def _bar(bar: Bar, x: float, width: float, y: Callable[[float], float]) -> str:
    top, bottom, middle = y(bar.value), y(0), x + width / 2
    place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    spread = f"{_number(bar.value)} ({_number(bar.low)} to {_number(bar.high)})"
    ends = f'y1="{y(bar.low):.1f}" y2="{y(bar.high):.1f}"'
    line = f'<line class="spread" x1="{middle:.1f}" x2="{middle:.1f}" {ends}/>' if bar.high > bar.low else ""
    rect = f'<rect class="m-{escape(bar.mode)}" {place}/>{_hatch(bar.mode, place)}'
    return f"<g><title>{escape(bar.mode)}: {spread}</title>{rect}{line}</g>"


def _legend(modes: Iterable[str]) -> str:
    """What the colours mean; and the patterns that all plots use."""
    box = '<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="m-{0}" width="14" height="14"/>{1}</svg>'
    size = 'width="14" height="14"'
    items = (f"<li>{box.format(m, _hatch(m, size))}{escape(WORDS.get(m, m))}</li>" for m in modes)
    patterns = "".join(
        f'<pattern id="h-{mode}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path class="hatch" d="{path}"/></pattern>'
        for mode, path in _HATCHES.items()
    )
    defs = f'<svg width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'
    return f'{defs}<ul class="modes">{"".join(items)}</ul>'


def _hatch(mode: str, place: str) -> str:
    return f'<rect {place} fill="url(#h-{mode})"/>' if mode in _HATCHES else ""


def _round_up(value: float) -> float:
    """The next of 1, 2, 3, 4, 6, 8, 10 times a power of ten, so that the ticks are round."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 2, 3, 4, 6, 8, 10) if value <= step * power * (1 + 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


WORDS = {
    "none": "none: no prediction",
    "prediction": "prediction",
    "unrelated": "unrelated: a useless prediction",
    "context": "context: drafts from prompt and output alone",
    "conversation": "conversation: drafts from the messages' texts",
    "plain": "plain: no prediction, the other server",
    "ngram": "ngram: vLLM's own drafts",
}


def render(result: Mapping[str, Any]) -> str:
    """Return the page of `Result.as_json`."""
    runs = result["runs"]
    parts = [html.note(_summary(result))]
    if not result["complete"]:
        parts.append(html.note("This run was interrupted or failed: these are the turns that had finished."))
    if runs:
        parts += [html.note(sentence) for sentence in verdict(runs, result)]
        parts += [f"<style>{html.asset('bench.css')}</style>", *_plots(runs), html.heading("Figures")]
        parts += [html.table(header, rows(runs, header)) for header in (SPEED, STEPS)]
        parts.append(html.note(LEGEND))
    parts += [html.heading("What to know"), *map(html.note, (*result["notes"], *_HOW.split("\n\n")))]
    about = {name: value for name, value in result.items() if name not in ("runs", "notes")}
    listing = html.tokens([json.dumps(about, indent=1)], [html.Origin.GENERATED])
    listing = listing.replace('class="o o0"', 'class="o"')  # without the colour of generated tokens
    parts.append(html.details("Settings and servers", "as in the JSON file", listing))
    return html.page("gpu-align bench", parts)


_HOW = """\
Every mode gets the same requests at temperature 0. The modes of a server are measured one after another in each
round, in changing order, after a warm-up.

Between tokens: the time before each piece of the stream, divided evenly among its tokens. A step that accepts
draft tokens sends several tokens in one piece.

Identical compares each answer with that of the first run, which had no prediction. near-tie: where they part, the
log probabilities of the two tokens differ by no more than the margin, so that rounding decides.
"""


def _summary(result: Mapping[str, Any]) -> str:
    settings, data = result.get("settings", {}), result.get("data", {})
    edits = "1 edit" if data.get("pairs") == 1 else f"{data.get('pairs', '?')} edits"
    return (
        f"Model {result.get('model', '?')}; {edits} of {data.get('source', '?')}; "
        f"{settings.get('rounds', '?')} rounds; at most {settings.get('max_tokens', '?')} output tokens a "
        f"request; gpu-align {result.get('version', '?')}."
    )


#: Title, subtitle, and a value to mark of each figure.
_FIGURES: tuple[tuple[str, str, float | None], ...] = (
    ("Output tokens a second", "all streams together; line: rounds", None),
    ("Speed-up over none", "median of the rounds; line: least to largest", 1.0),
    ("Between tokens, ms", "p50; line: up to p90", None),
    ("To the first token, ms", "p50; line: up to p90", None),
    ("Tokens a verification step", "none: 1", 1.0),
    ("Rejected draft tokens", "per output token", None),
)


def _bars(run: Mapping[str, Any]) -> list[Bar | None]:
    """The bar of a run in each of `_FIGURES`; None: unknown."""
    rates = [turn["output_tokens"] / turn["seconds"] for turn in run["rounds"] if turn["seconds"]]
    ratio, between, first = run["speed_up"], run["itl_ms"], run["ttft_ms"]
    tokens, steps, rejected = run["output_tokens"], run["steps"], run["rejected"]
    values = (
        (run["tokens_per_s"], min(rates, default=0.0), max(rates, default=0.0)),
        (ratio["median"], ratio["min"], ratio["max"]) if ratio else (None,),
        (between["p50"], between["p50"], between["p90"]),
        (first["p50"], first["p50"], first["p90"]),
        (tokens / steps if steps else None,) * 3,
        (rejected / tokens if rejected is not None and tokens else None,) * 3,
    )
    return [None if value[0] is None else Bar(run["mode"], *value) for value in values]


def _plots(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    bars = [(f"{run['concurrency']} at a time", _bars(run)) for run in runs]
    figures = []
    for number, (title, subtitle, marked) in enumerate(_FIGURES):
        groups: dict[str, list[Bar]] = {}
        for label, of_run in bars:
            if (bar := of_run[number]) is not None:
                groups.setdefault(label, []).append(bar)
        figures.append(_plot(title, subtitle, groups, marked))
    legend = _legend(dict.fromkeys(run["mode"] for run in runs))
    return [legend, f'<div class="plots">{"".join(figures)}</div>']

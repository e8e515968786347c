"""The result as one page that needs nothing else: bars, the table, what to know, how it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from .. import html

SPEED = ("mode", "streams", "requests", "tokens/s", "speed-up", "TTFT ms", "between tokens ms")
STEPS = ("mode", "streams", "tokens", "steps", "tokens/step", "accepted", "rejected", "identical")
LEGEND = (
    "streams: requests in flight. speed-up: tokens/s as a multiple of none in the same round, median "
    "(least–largest). TTFT: time to the first token; it and the time between tokens: p50/p90/p99."
)


#: What a mode's requests have.
_WORDS = {
    "prediction": "predictions",
    "unrelated": "useless predictions",
    "context": "own context only",
    "conversation": "texts of the conversation",
    "plain": "no prediction on the other server",
    "ngram": "n-gram drafts",
}


def rows(runs: Sequence[Mapping[str, Any]], header: Sequence[str]) -> list[list[str]]:
    """One row a run, under `SPEED` or `STEPS`."""
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
        "steps": html.or_dash(steps),
        "tokens/step": f"{tokens / steps:.2f}" if steps else "–",
        "accepted": html.or_dash(run["accepted"]),
        "rejected": html.or_dash(run["rejected"]),
        "identical": f"{run['different']} differ" if run["different"] else "yes",
    }


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f}× ({found['min']:.2f}–{found['max']:.2f})"


def verdict(runs: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[str]:
    """Sentences that say what the table shows; only what was measured. about: `Result.about`."""
    by_key = {(run["mode"], run["concurrency"]): run for run in runs}
    found = []
    sent = about.get("predictions", {})
    made = "" if sent.get("before") else " made from the first answers"
    if sent.get("output") and not made:
        made = f" ({sent['output']} of {sent['pairs']} made from the first answers)"
    for streams in dict.fromkeys(run["concurrency"] for run in runs):
        parts = []
        for mode, words in _WORDS.items():
            ratio = by_key.get((mode, streams), {}).get("speed_up")
            if ratio is not None:
                unsure = ratio["min"] <= 1 <= ratio["max"]
                beyond = f"{ratio['median']:.2f}× (no difference beyond the spread)"
                words += made if mode == "prediction" else ""
                parts.append(f"{words} {beyond if unsure else _ratio(ratio)}")
        if parts:
            found.append(f"At {streams} at a time: {', '.join(parts)}.")
    different = [run for run in runs if run["different"]]
    if different:
        where = ", ".join(f"{run['mode']} at {run['concurrency']} ({run['different']})" for run in different)
        found.append(f"Answers differ from the first run: {where}.")
    return found


def _percentiles(found: Mapping[str, float | None]) -> str:
    def shown(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"

    return "/".join(shown(found[name]) for name in ("p50", "p90", "p99"))


class Bar(NamedTuple):
    """A bar's label, its mode, its value, and the ends of the line over it."""

    label: str
    mode: str
    value: float
    low: float
    high: float


def _figure(title: str, subtitle: str, bars: Sequence[Bar], marked: float | None) -> str:
    """Bars with their values, and a value to mark, such as 1 for a ratio."""
    most = max([*(bar.high for bar in bars), marked or 0.0, 1e-9])
    mark = "" if marked is None else _line("mark", marked / most, marked / most, 0, 10)
    rows = []
    for bar in bars:
        rect = f'<rect class="m-{escape(bar.mode)}" width="{100 * bar.value / most:.1f}" height="10"/>'
        spread, ends = "", ""
        if bar.high > bar.low:
            spread = _line("spread", bar.low / most, bar.high / most, 5, 5)
            ends = f" <small>{_number(bar.low)}–{_number(bar.high)}</small>"
        drawn = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none">{rect}{spread}{mark}</svg>'
        cells = f"<th>{escape(bar.label)}</th><td>{drawn}</td><td>{_number(bar.value)}{ends}</td>"
        rows.append(f"<tr>{cells}</tr>")
    caption = f"<figcaption>{escape(title)}<small>{escape(subtitle)}</small></figcaption>"
    return f'<figure>{caption}<table class="bars">{"".join(rows)}</table></figure>'


def _line(kind: str, x1: float, x2: float, y1: int, y2: int) -> str:
    """x: shares of the width."""
    return f'<line class="{kind}" x1="{100 * x1:.1f}" x2="{100 * x2:.1f}" y1="{y1}" y2="{y2}"/>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render(result: Mapping[str, Any]) -> str:
    """The page of `Result.as_json`."""
    runs = result["runs"]
    parts = [html.note(_summary(result))]
    if not result["complete"]:
        parts.append(html.note("This run was interrupted or failed: these are the turns that had finished."))
    if runs:
        parts += [html.note(sentence) for sentence in verdict(runs, result)]
        parts += [_plots(runs), html.heading("Figures")]
        parts += [html.table(header, rows(runs, header)) for header in (SPEED, STEPS)]
        told = (f"{mode}: {words}" for mode, words in _WORDS.items() if any(r["mode"] == mode for r in runs))
        parts += [html.note(LEGEND), html.note("; ".join(told))]
    parts += [html.heading("What to know"), *map(html.note, (*result["notes"], *_HOW.split("\n\n")))]
    about = {name: value for name, value in result.items() if name not in ("runs", "notes")}
    listing = html.tokens([json.dumps(about, indent=1)], [html.Origin.GENERATED])
    listing = listing.replace('class="o o0"', 'class="o"')  # without the colour of generated tokens
    parts.append(html.details("Settings and servers", "as in the JSON file", listing))
    return html.page("gpu-align bench", parts, styles=[html.asset("bench.css")])


_HOW = """\
Every mode gets the same requests at temperature 0. The modes of a server are measured one after another in each
round, in changing order, after a warm-up.

Between tokens: the time before each piece of the stream, divided evenly among its tokens. A step that accepts
draft tokens sends several tokens in one piece.

Identical compares each answer with that of the first run, which had no prediction. If answers of the mode none
differ, too, the rest of the batch decides near ties, by its rounding.
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
    mode, label = run["mode"], f"{run['mode']}, {run['concurrency']} at a time"
    return [None if value[0] is None else Bar(label, mode, *value) for value in values]


def _plots(runs: Sequence[Mapping[str, Any]]) -> str:
    figures = (
        _figure(*figure[:2], [bar for bar in bars if bar is not None], figure[2])
        for figure, bars in zip(_FIGURES, zip(*map(_bars, runs), strict=True), strict=True)
    )
    return f'<div class="plots">{"".join(figures)}</div>'

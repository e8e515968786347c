"""The result as one page that needs nothing else: the plots, the table, what to know, how it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_align import html
from gpu_align.bench import plots, table
from gpu_align.bench.plots import Bar

WORDS = {
    "none": "none: no prediction",
    "prediction": "prediction",
    "unrelated": "unrelated: a useless prediction",
    "ngram": "ngram: vLLM's own drafts",
}


def render(result: Mapping[str, Any]) -> str:
    """Return the page of `Result.as_json`."""
    runs = result["runs"]
    parts = [html.note(_summary(result))]
    if not result["complete"]:
        parts.append(html.note("This run was interrupted or failed: these are the turns that had finished."))
    if runs:
        parts += [html.note(sentence) for sentence in table.verdict(runs)]
        parts += [f"<style>{plots.STYLE}</style>", *_plots(runs), html.heading("Figures")]
        parts += [
            html.table(table.SPEED, table.speed_rows(runs)),
            html.table(table.STEPS, table.step_rows(runs)),
        ]
        parts.append(html.note(table.LEGEND))
    parts += [html.heading("What to know"), *map(html.note, (*result["notes"], *_HOW.split("\n\n")))]
    about = {name: value for name, value in result.items() if name not in ("runs", "notes")}
    listing = html.tokens([json.dumps(about, indent=1)], [html.Origin.GENERATED])
    parts.append(html.details("Settings and servers", "as in the JSON file", _plain(listing)))
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
    return (
        f"Model {result.get('model', '?')}; {_edits(data)} of {data.get('source', '?')}; "
        f"{settings.get('rounds', '?')} rounds; at most {settings.get('max_tokens', '?')} output tokens a "
        f"request; gpu-align {result.get('version', '?')}."
    )


def _edits(data: Mapping[str, Any]) -> str:
    return "1 edit" if data.get("pairs") == 1 else f"{data.get('pairs', '?')} edits"


def _plots(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    modes = list(dict.fromkeys(run["mode"] for run in runs))
    figures = [
        plots.plot("Output tokens a second", "all streams together; line: rounds", _groups(runs, _rate)),
        plots.plot(
            "Speed-up over none",
            "median of the rounds; line: least to largest",
            _groups(runs, _speed_up),
            1.0,
        ),
        plots.plot(
            "Between tokens, ms", "p50; line: up to p90", _groups(runs, lambda run: _times(run, "itl_ms"))
        ),
        plots.plot(
            "To the first token, ms",
            "p50; line: up to p90",
            _groups(runs, lambda run: _times(run, "ttft_ms")),
        ),
        plots.plot("Tokens a verification step", "none: 1", _groups(runs, _per_step), 1.0),
        plots.plot("Rejected draft tokens", "per output token", _groups(runs, _rejected)),
    ]
    return [
        plots.legend([(mode, WORDS.get(mode, mode)) for mode in modes]),
        f'<div class="plots">{"".join(figures)}</div>',
    ]


def _groups(runs: Sequence[Mapping[str, Any]], bar: Any) -> list[tuple[str, list[Bar]]]:
    groups: dict[str, list[Bar]] = {}
    for run in runs:
        values = bar(run)
        if values is not None:
            label = f"{run['concurrency']} at a time"
            groups.setdefault(label, []).append(Bar(run["mode"], *values))
    return list(groups.items())


def _rate(run: Mapping[str, Any]) -> tuple[float, float, float]:
    rates = [turn["output_tokens"] / turn["seconds"] for turn in run["rounds"] if turn["seconds"]]
    return run["tokens_per_s"], min(rates, default=0.0), max(rates, default=0.0)


def _speed_up(run: Mapping[str, Any]) -> tuple[float, float, float] | None:
    found = run["speed_up"]
    return None if found is None else (found["median"], found["min"], found["max"])


def _times(run: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    found = run[name]
    return None if found["p50"] is None else (found["p50"], found["p50"], found["p90"])


def _per_step(run: Mapping[str, Any]) -> tuple[float, float, float] | None:
    return None if not run["steps"] else (run["output_tokens"] / run["steps"],) * 3


def _rejected(run: Mapping[str, Any]) -> tuple[float, float, float] | None:
    known = run["rejected"] is not None and run["output_tokens"]
    return (run["rejected"] / run["output_tokens"],) * 3 if known else None


def _plain(listing: str) -> str:
    """The escaped listing without the colour of generated tokens."""
    return listing.replace('class="o o0"', 'class="o"')

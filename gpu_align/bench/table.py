"""The figures as rows of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPEED = ("mode", "streams", "requests", "tokens/s", "speed-up", "TTFT ms", "between tokens ms")
STEPS = ("mode", "streams", "tokens", "steps", "tokens/step", "accepted", "rejected", "identical")
#: Columns of words; the others hold numbers.
WORDS = ("mode", "identical")
LEGEND = (
    "streams: requests in flight. speed-up: tokens/s as a multiple of none in the same round, median "
    "(least–largest). TTFT: time to the first token; it and the time between tokens: p50/p90/p99."
)


def speed_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return one row a run, under `SPEED`."""
    return [
        [
            run["mode"],
            str(run["concurrency"]),
            f"{run['requests']:,}",
            f"{run['tokens_per_s']:,.0f}" if run["tokens_per_s"] >= 100 else f"{run['tokens_per_s']:.1f}",
            speed_up(run["speed_up"]),
            _percentiles(run["ttft_ms"]),
            _percentiles(run["itl_ms"]),
        ]
        for run in runs
    ]


def step_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return one row a run, under `STEPS`."""
    return [
        [
            run["mode"],
            str(run["concurrency"]),
            f"{run['output_tokens']:,}",
            _count(run["steps"]),
            "–" if not run["steps"] else f"{run['output_tokens'] / run['steps']:.2f}",
            _count(run["accepted"]),
            _count(run["rejected"]),
            run["identical"] or "unchecked",
        ]
        for run in runs
    ]


def speed_up(found: Mapping[str, float] | None) -> str:
    """A ratio with its spread over the rounds."""
    if found is None:
        return "–"
    return f"{found['median']:.2f}× ({found['min']:.2f}–{found['max']:.2f})"


def verdict(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences that say what the table shows; only what was measured."""
    by_key = {(run["mode"], run["concurrency"]): run for run in runs}
    found = []
    for streams in dict.fromkeys(run["concurrency"] for run in runs):
        parts = []
        for mode, words in (
            ("prediction", "predictions {}"),
            ("unrelated", "useless predictions {}"),
            ("ngram", "n-gram drafts {}"),
        ):
            ratio = by_key.get((mode, streams), {}).get("speed_up")
            if ratio is not None:
                parts.append(words.format(_effect(ratio)))
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


def _effect(ratio: Mapping[str, float]) -> str:
    value = f"{ratio['median']:.2f}×"
    if ratio["min"] <= 1 <= ratio["max"]:
        return f"{value} (no difference beyond the spread)"
    return f"{value} ({ratio['min']:.2f}–{ratio['max']:.2f})"


def _percentiles(found: Mapping[str, float | None]) -> str:
    values = [found[name] for name in ("p50", "p90", "p99")]
    return "/".join("–" if value is None else _milliseconds(value) for value in values)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"

"""The results of a simulation as JSON, as a page, and as rows of a table."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import __version__
from .. import html
from .records import Record
from .replay import PairResult, PolicyResult
from .tokenizers import load_tokenizer, token_texts

#: A page shows the outputs of further policies as long as all of them have no more tokens than this: browsers
#: open a page of a few megabytes at once.
MAX_PAGE_TOKENS = 400_000

TABLE_HEADER = ("policy", "tokens", "steps", "tokens/step", "accepted", "rejected", "rej/acc", "µs/draft")


def to_json(
    results: Sequence[PolicyResult], num_draft_tokens: int, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The results as the JSON object of docs/simulator.md; `about` is what the caller knows beside them."""
    counts = ("output_tokens", "steps", "accepted", "rejected")
    figures = (*counts, "tokens_per_step", "rejected_per_accepted", "propose_us_median")
    policies = {}
    for result in results:
        pairs = [{name: getattr(pair, name) for name in ("id", *counts)} for pair in result.pairs]
        policies[result.name] = {**{name: getattr(result, name) for name in figures}, "pairs": pairs}
    return {
        "version": __version__,
        **(about or {}),
        "num_draft_tokens": num_draft_tokens,
        "policies": policies,
    }


def table_rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """One row a policy, cells as text, in the order of `TABLE_HEADER`."""
    return [
        (
            r.name, f"{r.output_tokens:,}", f"{r.steps:,}", f"{r.tokens_per_step:.2f}", f"{r.accepted:,}",
            f"{r.rejected:,}", _or_dash(r.rejected_per_accepted, ".2f"), _or_dash(r.propose_us_median, ",.0f"),
        )
        for r in results
    ]  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def to_html(records: Sequence[Record], results: Sequence[PolicyResult], num_draft_tokens: int) -> str:
    """A page with the table, and each record's output coloured by where its tokens came from.

    Records with a tokenizer show text, the others token ids. `gpu_align` is first; the others follow in their
    order as long as there is room (`MAX_PAGE_TOKENS`).
    """
    # The sort is stable; behind our name there may be settings.
    ordered = sorted(results, key=lambda result: result.name.split(" ")[0] != "gpu_align")
    used = list(itertools.accumulate(result.output_tokens for result in ordered))
    num_shown = max(1, bisect.bisect_right(used, MAX_PAGE_TOKENS))
    shown, left_out = ordered[:num_shown], [result.name for result in ordered[num_shown:]]
    present = {int(origin) for result in shown for pair in result.pairs for origin in np.unique(pair.origins)}
    parts = [
        html.note(
            f"{len(records):,} known outputs replayed with up to {num_draft_tokens} draft tokens a step. "
            "A step is one forward pass of the model; rej/acc is the number of rejected draft tokens for "
            "each accepted one."
        ),
        html.table(TABLE_HEADER, table_rows(results)),
        html.heading("Where each token came from"),
        html.legend(present),
    ]
    if left_out:
        parts.append(html.note(f"Not shown, to keep the page small: {', '.join(left_out)}."))
    for index, record in enumerate(records):
        texts = [f"{token} " for token in record.output]
        if record.tokenizer is not None:
            texts = token_texts(load_tokenizer(record.tokenizer), record.output)
        pairs = [result.pairs[index] for result in shown]
        outputs = [html.tokens(texts, pair.origins.tolist(), pair.step_of.tolist()) for pair in pairs]
        if len(shown) > 1:
            outputs = [
                html.details(result.name, _pair_note(pair), output, opened=result is shown[0])
                for result, pair, output in zip(shown, pairs, outputs, strict=True)
            ]
        note = f"{shown[0].name}: {_pair_note(pairs[0])}"
        parts.append(html.details(record.id, note, "\n".join(outputs)))
    return html.page("gpu-align simulate", parts)


def _pair_note(pair: PairResult) -> str:
    return (
        f"{pair.output_tokens:,} tokens in {pair.steps:,} steps "
        f"({pair.output_tokens / pair.steps:.1f} a step), "
        f"{pair.accepted:,} accepted, {pair.rejected:,} rejected"
    )

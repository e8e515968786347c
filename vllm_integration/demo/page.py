"""The demo's table, for the terminal and for a page that shows where every token came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_align import html
from gpu_align.simulate.tokenizers import TextTokenizer, token_texts
from vllm_integration.demo.measure import Row

HEADER = (
    "prediction",
    "wall time",
    "speed-up",
    "tokens/s",
    "verification steps",
    "accepted",
    "rejected",
    "output identical",
)
_CAPTION = "steps: forward passes of the model, the prefill included"


def cells(row: Row, none: Row) -> tuple[str, ...]:
    """Return one row of the table; `none` is the row without a prediction."""
    return (
        row.name,
        f"{row.seconds:.2f} s",
        f"{none.seconds / row.seconds:.1f}×",
        f"{row.tokens_per_s:.0f}",
        str(row.steps),
        str(row.accepted),
        str(row.rejected),
        "yes" if row.identical else "NO",
    )


def terminal_table(rows: Sequence[Row]) -> Any:
    """Return the rows as a `rich` table that fits 80 columns; the first row is the one without a prediction."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=_CAPTION)
    table.add_column(HEADER[0])
    for name in HEADER[1:]:
        short = name.removeprefix("verification ").replace(" ", "\n")
        table.add_column(short, justify="right", vertical="bottom")
    for row in rows:
        table.add_row(*cells(row, rows[0]), style=None if row.identical else "red")
    return table


def render(rows: Sequence[Row], tokenizer: TextTokenizer, facts: Sequence[str]) -> str:
    """Return the page: what was run, the table, and each row's output with its tokens coloured.

    rows: the first is the one without a prediction.
    tokenizer: the served model's, to spell its tokens.
    facts: paragraphs about the run.
    """
    parts = [
        *(html.note(fact) for fact in facts),
        html.table(HEADER, [cells(row, rows[0]) for row in rows]),
        html.legend(origin for row in rows for origin in row.origins),
        html.note("Hover over a token to see the verification step that produced it."),
    ]
    for number, row in enumerate(rows):
        texts = token_texts(tokenizer, row.token_ids)
        summary = f"{row.steps} verification steps, {row.seconds:.2f} s"
        coloured = html.tokens(texts, row.origins, row.token_steps)
        # Without a prediction every token has the same colour, so that part is folded.
        parts.append(html.details(row.name, summary, coloured, opened=number > 0))
    return html.page("Predicted outputs: where every token came from", parts)

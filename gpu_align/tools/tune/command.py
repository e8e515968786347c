"""``gpu-align tune``: a survival table from one's own traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..console import counted, print_table, progress_bar, refusing, tokenizer_option

if TYPE_CHECKING:
    from .tuning import Report


HEADER = ("", "tokens a step", "rejected per accepted", "steps", "confidence off by")
#: Less than this is no reason to change the table.
WORTH = 0.005


def tune_command(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="LOGS_OR_PAIRS...", help="step logs, folders of them, or PAIRS.jsonl[.gz]"),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TABLE.json", help="for the table")],
    tokenizer: Annotated[str | None, tokenizer_option("for pairs with text")] = None,
    trust_remote_code: console.TrustRemoteCode = False,
) -> None:
    """Learn a survival table from your own requests, and report what it is worth on others of them."""
    from . import tuning  # imports torch

    console.check_ending("--out", out, ".json")
    with refusing():
        files = tuning.files_of(places)
        console.check_outputs({"--out": out}, files)
        with progress_bar("reading", len(files)) as advance:
            records, skipped = tuning.read_traffic(files, tokenizer, advance)
    num_tokens = sum(len(record.output) for record in records)
    typer.echo(f"read {counted(len(records), 'request')}, {counted(num_tokens, 'output token')}")
    for reason, count in skipped.most_common():
        typer.echo(f"skipped {counted(count, 'request')}: {reason}")
    with refusing(), progress_bar("", None) as advance:
        tuned = tuning.tune(records, advance)
    _print(tuned.report)
    with refusing():
        tuning.write_table(tuned.table, out)
    typer.echo(f"wrote {out}, {out.stat().st_size:,} bytes; use it with GPU_ALIGN_SURVIVAL_TABLE={out}")


def _print(report: Report) -> None:
    points = {"shipped table": report.before, "new table": report.after}
    settings = ", ".join(f"{name} {value:g}" for name, value in report.settings.items())
    held = f"{counted(report.held_back, 'request')} held back, learned from {report.learned_from:,}"
    title = f"{held}; {settings}"
    rows = [
        (name, f"{p.tokens_per_step:.2f}", f"{p.rejected_per_accepted:.2f}", f"{p.steps:,}", f"{p.gap:.3f}")
        for name, p in points.items()
    ]
    print_table(title, HEADER, rows, words=[""], folded="")
    if report.gain is None:
        typer.echo("the new table does not reach the shipped one's rejections: no comparison at equal ones")
    else:
        typer.echo(f"at equal rejections: {report.gain:+.1%} tokens a step")
    if report.gain is None or report.gain < WORTH:
        typer.echo("not worth a change: the shipped table does as well on these requests")

"""``gpu-align tune``: a survival table from one's own traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpu_align.cli.console import check_outputs, counted, print_table, progress_bar, refuse, tokenizer_option

if TYPE_CHECKING:
    from gpu_align.tune import Report
    from gpu_align.tune.tuning import Point

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
) -> None:
    """Learn a survival table from your own requests, and report what it is worth on others of them."""
    from gpu_align import tune  # imports torch

    if out.suffix != ".json":
        # Files in the wrong order would otherwise cost one of them.
        refuse(f"--out: expected a name that ends in .json, found {out}")
    try:
        files = tune.files_of(places)
        check_outputs({"--out": out}, files)
        with progress_bar("reading", len(files)) as advance:
            traffic = tune.Traffic()
            for file in files:
                traffic.add(tune.read_traffic([file], tokenizer))
                advance("", 1)
    except OSError as error:
        refuse(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except ValueError as error:
        refuse(str(error))
    typer.echo(
        f"read {counted(len(traffic.records), 'request')}, {counted(traffic.num_tokens, 'output token')}"
    )
    for reason, count in traffic.skipped.most_common():
        typer.echo(f"skipped {counted(count, 'request')}: {reason}")
    try:
        with progress_bar("", tune.replays(traffic.records)) as advance:
            tuned = tune.tune(traffic.records, progress=advance)
    except ValueError as error:
        refuse(str(error))
    _print(tuned.report)
    try:
        tune.write_table(tuned.table, out)
    except OSError as error:
        refuse(f"{out}: {error.strerror or error}")
    typer.echo(f"wrote {out}, {out.stat().st_size:,} bytes; use it with GPU_ALIGN_SURVIVAL_TABLE={out}")


def _print(report: Report) -> None:
    rows = [_row("shipped table", report.before), _row("new table", report.after)]
    title = (
        f"{counted(report.held_back, 'request')} held back, learned from {report.learned_from:,}; "
        f"length_factor {report.settings['length_factor']:g}, min_survival {report.settings['min_survival']:g}"
    )
    print_table(title, HEADER, rows, words=[""], folded="")
    if report.gain is None:
        typer.echo(
            "the new table does not reach the rejections of the shipped one: no comparison at equal ones"
        )
    else:
        typer.echo(f"at equal rejections: {report.gain:+.1%} tokens a step")
    if report.gain is None or report.gain < WORTH:
        typer.echo("not worth a change: the shipped table does as well on these requests")


def _row(name: str, point: Point) -> tuple[str, ...]:
    return (
        name,
        f"{point.tokens_per_step:.2f}",
        f"{point.rejected_per_accepted:.2f}",
        f"{point.steps:,}",
        f"{point.gap:.3f}",
    )

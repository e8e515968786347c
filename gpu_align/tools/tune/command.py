"""``gpu-align tune``: a survival table, and a recipe pack, from one's own traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..console import counted, print_table, progress_bar, refuse, refusing, tokenizer_option

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
    pack: Annotated[
        Path | None,
        typer.Option(
            metavar="PACK.json[.gz]",
            help="also learn a recipe pack; unlike the table it holds words of your predictions and outputs",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, tokenizer_option("for pairs with text, and with --pack that of the model")
    ] = None,
    trust_remote_code: console.TrustRemoteCode = False,
) -> None:
    """Learn a survival table from your own requests, and report what it is worth on others of them."""
    from . import tuning  # imports torch

    console.check_ending("--out", out, ".json")
    if pack is not None:
        console.check_ending("--pack", pack, ".json", ".json.gz")
        if pack.name.startswith("base.json"):
            refuse(f"--pack: expected a name of its own, found {pack}: base comes with the library")
    with refusing():
        files = tuning.files_of(places)
        console.check_outputs({"--out": out, "--pack": pack}, files)
        with progress_bar("reading", len(files)) as advance:
            records, skipped = tuning.read_traffic(files, tokenizer, advance)
    num_tokens = sum(len(record.output) for record in records)
    typer.echo(f"read {counted(len(records), 'request')}, {counted(num_tokens, 'output token')}")
    for reason, count in skipped.most_common():
        typer.echo(f"skipped {counted(count, 'request')}: {reason}")
    with refusing():
        tokens = None if pack is None else tuning.Tokens.of(records, tokenizer)
        with progress_bar("", None) as advance:
            tuned = tuning.tune(records, advance, tokens)
    _print(tuned.report)
    with refusing():
        tuning.write_table(tuned.table, out)
        if pack is not None and tuned.pack is not None:
            tuned.pack.save(pack)
    use, wrote = f"GPU_ALIGN_SURVIVAL_TABLE={out}", f"wrote {out}, {out.stat().st_size:,} bytes"
    if pack is not None and tuned.pack is not None:
        parts = f"{len(tuned.pack.words):,} words of your texts, {len(tuned.pack.recipes):,} recipes"
        typer.echo(f"{wrote}\nwrote {pack}, {pack.stat().st_size:,} bytes: {parts}")
        typer.echo(f"use both with {use} GPU_ALIGN_RECIPES={pack},base")
    else:
        typer.echo(f"{wrote}; use it with {use}")


def _print(report: Report) -> None:
    if report.without_pack is None:
        what, points = "the new table", {"shipped table": report.before, "new table": report.after}
    else:
        what = "what was learned"
        points = {
            "shipped table, shipped pack": report.before,
            "new table, shipped pack": report.without_pack,
            "new table, own pack before it": report.after,
        }
    settings = ", ".join(f"{name} {value:g}" for name, value in report.settings.items())
    held = f"{counted(report.held_back, 'request')} held back, learned from {report.learned_from:,}"
    title = f"{held}; {settings}"
    rows = [
        (name, f"{p.tokens_per_step:.2f}", f"{p.rejected_per_accepted:.2f}", f"{p.steps:,}", f"{p.gap:.3f}")
        for name, p in points.items()
    ]
    print_table(title, HEADER, rows, words=[""], folded="")
    if report.gain is None:
        typer.echo(f"{what} does not reach the rejections of the shipped table: no comparison at equal ones")
    else:
        typer.echo(f"at equal rejections: {report.gain:+.1%} tokens a step")
    if report.gain is None or report.gain < WORTH:
        typer.echo("not worth a change: what is shipped does as well on these requests")

"""What ``gpu-align report`` prints and writes: of one step log, and of a folder of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from gpu_align import __version__, step_log, step_logs_report, step_report
from gpu_align.cli.console import print_table, progress_bar, refuse


def show_file(log: Path, tokenizer: str | None, html_out: Path | None, json_out: Path | None) -> None:
    """The steps of one request."""
    try:
        found = step_log.read_step_log(log)
    except OSError as error:
        refuse(f"{log}: {error.strerror or error}")
    except step_log.StepLogError as error:
        refuse(f"{log}: {error}")
    if tokenizer is not None:
        from gpu_align import simulate

        try:
            texts = simulate.load_tokenizer(tokenizer)
            found = found.with_texts(lambda ids: "".join(simulate.token_texts(texts, ids)))
        except (OSError, ValueError) as error:
            refuse(f"--tokenizer: {error}")
    title = f"request {escape(found.request_id)}"
    rows = step_report.table_rows(found.steps)
    console = print_table(title, step_report.TABLE_HEADER, rows, words=["source", "why"], folded="why")
    console.print(step_report.summary(found), soft_wrap=True, highlight=False)
    figures = {"request_id": found.request_id, **found.usage()}
    _write(figures, {"log": str(log), "tokenizer": tokenizer}, json_out)
    _write_page(step_report.page(found), html_out)


def show_folder(folder: Path, top: int, html_out: Path | None, json_out: Path | None) -> None:
    """All requests of a folder: sums, sources, reasons, the worst requests."""
    try:
        files = step_logs_report.log_files(folder)
        with progress_bar("reading", len(files)) as advance:
            found = step_logs_report.read_folder(folder, advance)
    except OSError as error:
        refuse(f"{folder}: {error.strerror or error}")
    for name, why in found.skipped[:3]:
        typer.echo(f"note: {name}: {why}", err=True)
    if len(found.skipped) > 3:
        typer.echo(f"note: {len(found.skipped) - 3} more files are no step logs", err=True)
    if not found.requests:
        refuse(f"{folder}: expected step logs (*.yaml), found none")
    shown = step_logs_report
    print_table("by source", shown.SOURCE_HEADER, shown.source_rows(found), words=["source"], folded="source")
    if losses := shown.loss_rows(found, top):
        title = "draft tokens that were lost"
        print_table(title, shown.LOSS_HEADER, losses, words=["source", shown.LOSS_HEADER[-1]],
                    folded=shown.LOSS_HEADER[-1])  # fmt: skip
    if worst := shown.request_rows(found, top):
        title = "requests with the most steps beyond a perfect prediction"
        words = ["request", shown.REQUEST_HEADER[-1]]
        print_table(title, shown.REQUEST_HEADER, worst, words=words, folded=words)
    typer.echo(shown.summary(found))
    _write(shown.to_json(found, top), {"log": str(folder), "tokenizer": None}, json_out)
    _write_page(shown.page(found, top), html_out)


def _write(figures: dict[str, Any], about: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        report = {"version": __version__, **about, **figures}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {out}")


def _write_page(page: str, out: Path | None) -> None:
    if out is not None:
        out.write_text(page, encoding="utf-8")
        typer.echo(f"wrote {out}")

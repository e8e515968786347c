"""``gpu-align demo``, which the command line finds through the entry point group ``gpu_align.commands``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpu_align.tools.console import refuse

EXAMPLE = "gpu-align demo --out demo_out"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog=f"Examples:\n\n  {EXAMPLE}")(demo_command)


def demo_command(
    model: Annotated[
        str | None,
        typer.Option("--model", envvar="MODEL", metavar="ORG/NAME", help="instead of a tiny model made here"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="for the page")] = Path("demo_out"),
    ngram: Annotated[
        bool, typer.Option("--ngram/--no-ngram", help="also vLLM's n-gram, in a second server")
    ] = True,
) -> None:
    """Serve a model with the plugin, edit a file with and without a prediction, and compare."""
    from . import run_demo, wrong_use

    if found := wrong_use(model, out):
        refuse(found)
    raise typer.Exit(run_demo(model, out, ngram))

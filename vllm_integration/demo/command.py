"""``gpu-align demo``, which the command line finds through the entry point group ``gpu_align.commands``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gpu_align.tools.console import option, refuse, refusing

from . import run

EXAMPLE = "gpu-align demo --out demo_out"
#: How the hub writes a model: `name` or `organisation/name`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog=f"Examples:\n\n  {EXAMPLE}")(demo_command)


def demo_command(
    model: Annotated[
        str | None, option("ORG/NAME", "instead of a tiny model made here", "--model", envvar="MODEL")
    ] = None,
    out: Annotated[Path, option("FOLDER", "for the page", "--out")] = Path("demo_out"),
    ngram: Annotated[
        bool, typer.Option("--ngram/--no-ngram", help="also vLLM's n-gram, in a second server")
    ] = True,
) -> None:
    """Serve a model with the plugin, edit a file with and without a prediction, and compare."""
    with refusing():  # a name that is too long, a folder that may not be read
        if model is not None:
            folder = Path(model)
            if folder.is_dir():
                if not (folder / "config.json").is_file():
                    refuse(f"the model {model} is a folder without a config.json")
            elif folder.exists() or not _HUB_NAME.fullmatch(model):
                refuse(f"expected a model as its folder or its Hugging Face name, found {model!r}")
        out.mkdir(parents=True, exist_ok=True)
    raise typer.Exit(run.run_demo(model, out, ngram))

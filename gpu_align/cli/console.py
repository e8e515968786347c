"""What commands share: refusing bad input, checking output files, a progress bar, tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from gpu_align.simulate.replay import Progress as Advance


def refuse(message: str) -> NoReturn:
    """Bad input: one line on stderr, exit code 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def tokenizer_option(help_text: str) -> Any:
    """``--tokenizer``."""
    return typer.Option(metavar="NAME_OR_PATH", help=f"{help_text}: a transformers tokenizer, or tekken")


def check_outputs(outputs: dict[str, Path | None], sources: Sequence[Path]) -> None:
    """Refuse, before a long run, a file that cannot be written after it."""
    taken = {source.resolve(): "the input" for source in sources}
    for option, path in outputs.items():
        if path is None:
            continue
        if path.resolve() in taken:
            refuse(f"{option}: {path} is also {taken[path.resolve()]}")
        if path.is_dir():
            refuse(f"{option}: expected a file name, found the folder {path}")
        if not path.parent.is_dir():
            refuse(f"{option}: the folder {path.parent} does not exist")
        taken[path.resolve()] = f"the file of {option}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@contextlib.contextmanager
def progress_bar(doing: str, total: int) -> Iterator[Advance]:
    """A bar on stderr, in the unit of `total`, where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda name, done: bar.update(task, advance=done, description=f"{doing} {escape(name)}")


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[str],
    folded: str | Sequence[str],
) -> Console:
    """Print a table; the columns in `words` hold text, and `folded` are those that a narrow terminal narrows."""
    narrowed = [folded] if isinstance(folded, str) else folded
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in header:
        justify: Any = "left" if column in words else "right"
        table.add_column(column, justify=justify, no_wrap=column not in narrowed, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a pipe has no width of its own
    console.print(table)
    return console

"""Shared by commands: refusing bad input, checking output files, a progress bar, tables."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import inputs

#: Seconds between two lines of progress where stderr is no terminal.
TELL_S = 15.0
#: The folder that holds the package: a checkout, or site-packages.
ROOT = Path(__file__).resolve().parents[2]


class Advance(Protocol):
    """Told what is being done, how much of it just was, and how much there is in all once that is known."""

    def __call__(self, name: str, done: int, total: int | None = None, /) -> None: ...


def plugins(group: str) -> list[EntryPoint]:
    """The entry points of a group: what other packages add to the command line.

    A checkout that is not installed, or newer than its installation, has those of its pyproject.toml.
    """
    project = ROOT / "pyproject.toml"
    if (found := list(entry_points(group=group))) or not project.is_file():
        return found
    _, _, section = project.read_text(encoding="utf-8").partition(f'[project.entry-points."{group}"]\n')
    lines = (line.split(" = ") for line in section.partition("\n[")[0].splitlines() if " = " in line)
    return [EntryPoint(name, value.strip('"'), group) for name, value in lines]


def refuse(message: str) -> NoReturn:
    """Bad input: one line on stderr, exit code 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def refusing(path: Path | None = None, named: str = "") -> Iterator[None]:
    """Refuse what is wrong with a file. path: which one; None where an OSError names it. named: stands before a
    ValueError that does not."""
    try:
        yield
    except OSError as error:
        place = error.filename if path is None else path
        refuse(f"{place}: {error.strerror or error}" if place else str(error))
    except ValueError as error:
        refuse(f"{named}{error}")


def refuse_others(ways: Mapping[str, object], needs: Mapping[str, tuple[object, str]]) -> None:
    """Refuse two of the `ways` to give one thing, and an option (name → value, the way that it belongs to)
    without its way. What was not given is None."""
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        refuse(f"expected one of {', '.join(ways)}, found {' and '.join(given)}")
    for name, (value, way) in needs.items():
        if value is not None and way not in given:
            refuse(f"{name}: expected with {way} only")


def option(metavar: str, help_text: str, *names: str, **more: Any) -> Any:
    """An option of a command, named as its parameter if `names` are not given."""
    return typer.Option(*names, metavar=metavar, help=help_text, **more)


def tokenizer_option(help_text: str) -> Any:
    return option("NAME_OR_PATH", f"{help_text}: a transformers tokenizer, or tekken")


def _trust(wanted: bool) -> None:
    inputs.trusts_code = wanted


_TRUST = "run a tokenizer's own code"
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", callback=_trust, help=_TRUST)]
JsonOut = Annotated[Path | None, option("OUT", "write the figures as JSON", "--json")]
HtmlOut = Annotated[Path | None, option("OUT", "write a page", "--html")]
DraftTokens = Annotated[
    int, option("K", "most a step, 1 to 256 (vLLM's V1: 128)", "--num-draft-tokens", "-k", min=1, max=256)
]
Before = Annotated[
    Path | None, option("OLD", "one edit: the text before it, which predicts the one of --after")
]
After = Annotated[Path | None, option("NEW", "and the text after it")]
Git = Annotated[str | None, option("RANGE", "edits: the files that these commits modify")]
Repo = Annotated[Path | None, option("DIR", "the repository of --git; this folder if none is given")]


def limit_option(default: int) -> Any:
    return option("N", "of --git, at most so many edits", min=1, show_default=str(default))


def check_ending(name: str, path: Path, *endings: str) -> None:
    """Refuse an output of another name: files in the wrong order would otherwise cost one of them."""
    if not path.name.endswith(endings):
        refuse(f"{name}: expected a name that ends in {' or '.join(endings)}, found {path}")


def check_outputs(outputs: dict[str, Path | None], sources: Sequence[Path]) -> None:
    """Refuse, before a long run, a file that cannot be written after it."""
    taken = {realpath(source): "the input" for source in sources}
    for option, path in outputs.items():
        if path is None:
            continue
        if realpath(path) in taken:
            refuse(f"{option}: {path} is also {taken[realpath(path)]}")
        if path.is_dir():
            refuse(f"{option}: expected a file name, found the folder {path}")
        if not path.parent.is_dir():
            refuse(f"{option}: the folder {path.parent} does not exist")
        taken[realpath(path)] = f"the file of {option}"


def server_url(option: str, given: str) -> str:
    """The address of an OpenAI-compatible server, as an option gives it."""
    if not re.fullmatch(r"\s*https?://.*/v1/*\s*", given):
        refuse(
            f"{option}: expected a URL that ends in /v1, such as http://localhost:8000/v1, found {given!r}"
        )
    return given.strip().rstrip("/")


def write(path: Path | None, make: Callable[[], Any]) -> None:
    """Write what `make` returns, a page or figures as JSON, where there is a path, and say so."""
    if path is not None:
        made = make()
        text = made if isinstance(made, str) else json.dumps(made, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {path}")


def counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def lasting(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextlib.contextmanager
def progress_bar(doing: str, total: int | None) -> Iterator[Advance]:
    """A bar on stderr, which shows a share where there is no `total`; without a terminal a line every `TELL_S`."""
    console, told = Console(stderr=True), time.monotonic()
    done_of = TextColumn("{task.percentage:.0f} %") if total is None else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done_of, TimeRemainingColumn())
    quiet = not console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=quiet, speed_estimate_period=3600.0
    ) as bar:
        task = bar.add_task(doing, total=total)

        def advance(name: str, done: int, total: int | None = None) -> None:
            nonlocal told
            bar.update(task, advance=done, total=total, description=f"{doing} {escape(name)}")
            if quiet and time.monotonic() - told >= TELL_S:
                (now,), told = bar.tasks, time.monotonic()
                share = f": {now.percentage:.0f} %" if now.total else ""
                left = f", about {lasting(now.time_remaining)} left" if now.time_remaining else ""
                typer.echo(f"{now.description.strip()}{share}{left}", err=True)

        yield advance


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


#: Of all commands, one a line.
EXAMPLES = """\
gpu-align bench --base-url http://localhost:8000/v1 --concurrency 1,8 --html bench.html
gpu-align bench --base-url http://localhost:8000/v1 --git HEAD~1.. --json bench.json
gpu-align bench --serve Qwen/Qwen2.5-Coder-1.5B-Instruct --concurrency 1,8
gpu-align simulate pairs.jsonl
gpu-align simulate pairs.jsonl --policy gpu_align --policy prompt_lookup -k 32 --json out.json
gpu-align simulate --before old.py --after new.py --policy gpu_align --html page.html
gpu-align simulate --git HEAD~2..HEAD --repo project --suffix .py --policy gpu_align
gpu-align policies
gpu-align policies openai
gpu-align recipes learn projects/one projects/two --out own.json.gz --suffix .py
gpu-align recipes observe samples.jsonl --tokenizer tekken --out observed.json.gz
gpu-align recipes merge one.json.gz two.json.gz --out both.json.gz
gpu-align recipes report base outputs.jsonl --tokenizer tekken --json worth.json
gpu-align recipes show base --top 5
gpu-align tune traffic.jsonl --out table.json
gpu-align tune traffic.jsonl logs --out table.json --tokenizer tekken
gpu-align report logs/chatcmpl-1.yaml --html page.html
gpu-align report logs --top 3 --json requests.json
gpu-align doctor
gpu-align doctor -v
gpu-align doctor --json doctor.json
gpu-align doctor --base-url http://localhost:8000/v1
""".splitlines()


def epilog(command: str) -> str:
    """The examples of a command, for ``@app.command(..., epilog=...)``."""
    found = [line for line in EXAMPLES if f"{line} ".startswith(f"gpu-align {command} ")]
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in found)])

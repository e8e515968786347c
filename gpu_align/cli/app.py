"""The commands and their options."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpu_align import RecipePack, simulate, step_log, step_report
from gpu_align.cli import doctor
from gpu_align.cli.texts import find_texts
from gpu_align.errors import MissingExtraError
from gpu_align.simulate.replay import Progress as Advance
from gpu_align.simulate.report import TABLE_HEADER, table_rows

app = typer.Typer(
    name="gpu-align",
    help="Predicted outputs for LLM serving: replay, check and show what a prediction is worth.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback that prints local variables would print predictions.
    pretty_exceptions_enable=False,
)


def _refuse(message: str) -> NoReturn:
    """Bad input: one line on stderr, exit code 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _setting(metavar: str) -> Any:
    return typer.Option(metavar=metavar, help="a setting of gpu_align; repeatable: each is run")


def _tokenizer(help_text: str) -> Any:
    return typer.Option(metavar="NAME_OR_PATH", help=f"{help_text}: a transformers tokenizer, or tekken")


@app.command("simulate")
def simulate_command(
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS.jsonl[.gz]", help="records to replay")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|MODULE:CLASS",
            help="a drafter to run, or a predictor of your own; repeatable; all if none is given",
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int, typer.Option("--num-draft-tokens", "-k", min=1, metavar="K", help="most draft tokens a step")
    ] = 64,
    draft_in_prefill: Annotated[
        bool, typer.Option("--draft-in-prefill", help="let the prefill step verify drafts too")
    ] = False,
    length_factor: Annotated[list[int] | None, _setting("F")] = None,
    min_survival: Annotated[list[float] | None, _setting("P")] = None,
    min_survival_recipe: Annotated[list[float] | None, _setting("P")] = None,
    recipes: Annotated[
        str,
        typer.Option(
            metavar="PATH|base|off",
            help="a recipe pack for gpu_align and recipe_pack; base is the one that comes with it",
        ),
    ] = simulate.SHIPPED_PACK,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="run gpu_align all along its trade-off, beside its default")
    ] = False,
    tokenizer: Annotated[str | None, _tokenizer("for records with text, and to show ids as text")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="write the figures as JSON")
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="write a page of coloured outputs")
    ] = None,
) -> None:
    """Replay known outputs and count the verification steps that each drafter takes."""
    names = list(dict.fromkeys(policy or ()))
    known_names = simulate.policy_names()
    if unknown := [name for name in names if name not in known_names and not simulate.is_import_path(name)]:
        _refuse(f"--policy: expected one of {', '.join(known_names)}, or module:Class, found {unknown[0]!r}")
    if any(map(simulate.is_import_path, names)) and "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: a module of one's own is usually in this folder
    given = {
        "length_factor": length_factor,
        "min_survival": min_survival,
        "min_survival_recipe": min_survival_recipe,
    }
    settings = _settings(given, sweep)
    _check_outputs({"--json": json_out, "--html": html_out}, [pairs])
    try:
        records = simulate.read_records(pairs, tokenizer)
        if tokenizer is not None:
            simulate.load_tokenizer(tokenizer)  # records with ids alone have not needed it yet
    except OSError as error:
        _refuse(f"{pairs}: {error.strerror or error}")
    except simulate.RecordError as error:
        _refuse(f"{pairs}: {error}" if error.line else str(error))
    except ValueError as error:
        _refuse(str(error))

    names = _runnable(recipes, records, names)
    try:
        policies = simulate.make_policies(names, records, num_draft_tokens, settings, recipes)
    except OSError as error:
        _refuse(f"--recipes: {recipes}: {error.strerror or error}")
    except ValueError as error:
        _refuse(str(error))
    total = sum(len(record.output) for record in records) * len(policies)
    with _progress("replaying", total) as advance:
        results = simulate.simulate(records, policies, num_draft_tokens, draft_in_prefill, advance)

    if json_out is not None:
        simulate.write_json(results, num_draft_tokens, json_out)
    if html_out is not None:
        simulate.write_html(records, results, num_draft_tokens, html_out)
    title = f"up to {num_draft_tokens} draft tokens a step"
    _print_table(title, TABLE_HEADER, table_rows(results), words=["policy"], folded="policy")
    for written in (json_out, html_out):
        if written is not None:
            typer.echo(f"wrote {written}")


def _runnable(pack: str, records: Sequence[simulate.Record], names: list[str]) -> list[str]:
    """The policies to run: `names`, or else all that can run with this pack."""
    known = simulate.tokenizer_of(records) is not None
    why = "the records do not all name one tokenizer, and --tokenizer gives none"
    if not known and pack not in (simulate.SHIPPED_PACK, simulate.NO_PACK):
        _refuse(f"--recipes: {why}")
    names = names or simulate.runnable_policy_names(with_recipes=known and pack != simulate.NO_PACK)
    if not known and pack != simulate.NO_PACK and simulate.OURS in names:
        typer.echo(f"note: {simulate.OURS} runs without recipes: {why}", err=True)
    return names


def _settings(given: Mapping[str, Sequence[float] | None], sweep: bool) -> list[dict[str, Any]]:
    """The settings of our drafter to run: every combination of the given values, or the default alone."""
    fields = [[(name, value) for value in dict.fromkeys(values)] for name, values in given.items() if values]
    settings = [dict(combination) for combination in itertools.product(*fields)]
    settings += [setting for setting in simulate.SWEEP if sweep and setting not in settings]
    for setting in settings:
        try:
            simulate.config_of(setting)
        except ValueError as error:
            field, _, message = str(error).partition(":")
            _refuse(f"--{field.replace('_', '-')}:{message}")
    return settings


def _check_outputs(outputs: dict[str, Path | None], sources: Sequence[Path]) -> None:
    """Refuse, before a long run, a file that cannot be written after it."""
    taken = {source.resolve(): "the input" for source in sources}
    for option, path in outputs.items():
        if path is None:
            continue
        if path.resolve() in taken:
            _refuse(f"{option}: {path} is also {taken[path.resolve()]}")
        if path.is_dir():
            _refuse(f"{option}: expected a file name, found the folder {path}")
        if not path.parent.is_dir():
            _refuse(f"{option}: the folder {path.parent} does not exist")
        taken[path.resolve()] = f"the file of {option}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@contextlib.contextmanager
def _progress(doing: str, total: int) -> Iterator[Advance]:
    """A bar on stderr, in the unit of `total`, where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda name, done: bar.update(task, advance=done, description=f"{doing} {escape(name)}")


def _print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str], folded: str
) -> Console:
    """Print a table; the columns in `words` hold text, and `folded` is the one that a narrow terminal narrows."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in header:
        justify: Any = "left" if column in words else "right"
        table.add_column(column, justify=justify, no_wrap=column != folded, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a pipe has no width of its own
    console.print(table)
    return console


@app.command("recipes")
def recipes_command(
    out: Annotated[Path, typer.Argument(metavar="OUT.json.gz", help="for the pack")],
    places: Annotated[
        list[Path],
        typer.Argument(metavar="FILE_OR_FOLDER...", help="texts to learn from; each place is one source"),
    ],
    suffix: Annotated[
        list[str] | None,
        typer.Option(metavar=".py", help="of folders, only files that end in this; repeatable"),
    ] = None,
) -> None:
    """Learn a recipe pack from texts of your own: what usually follows what."""
    if not out.name.endswith(".json.gz"):
        # Two files in the wrong order would otherwise cost one of them.
        _refuse(f"expected a name that ends in .json.gz for the pack, found {out}")
    _check_outputs({"OUT.json.gz": out}, places)
    try:
        texts = find_texts(places, suffix or [])
    except FileNotFoundError as error:
        _refuse(str(error))

    with _progress("learning from", len(texts.files)) as advance:
        pack = RecipePack.learn(texts.read(advance), made_by="gpu-align recipes")
    read = f"{_counted(texts.num_read, 'file')}, {_counted(texts.num_bytes, 'byte')}"
    notes = [f"; {count:,} skipped: {why}" for why, count in texts.skipped.items() if count]
    typer.echo(f"read {read}, of {_counted(len(texts.sources), 'source')}{''.join(notes)}")
    if not texts.num_read:
        _refuse("expected texts to learn from, found none")
    if not pack.recipes:
        _refuse("too little text: no word follows others often enough to make a recipe")
    try:
        pack.calibrated(RecipePack.load().calibration).save(out)
    except OSError as error:
        _refuse(f"{out}: {error.strerror or error}")
    size = out.stat().st_size
    typer.echo(f"wrote {out}: {len(pack.words):,} words, {len(pack.recipes):,} recipes, {size:,} bytes")


@app.command("demo")
def demo_command(
    model: Annotated[
        str | None,
        typer.Option("--model", envvar="MODEL", metavar="ORG/NAME", help="instead of a tiny model made here"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="for the page")] = Path("demo_out"),
) -> None:
    """Serve a model with the plugin, edit a file with and without a prediction, and compare."""
    try:
        from vllm_integration.demo import run_demo
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("gpu_align", "vllm_integration"):
            raise
        raise MissingExtraError("gpu-align demo", error.name, "demo") from error
    raise typer.Exit(run_demo(model, out))


@app.command("report")
def report_command(
    log: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="a file of GPU_ALIGN_DEBUG_DIR")],
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="write the output as a coloured page")
    ] = None,
    tokenizer: Annotated[str | None, _tokenizer("for a file without texts")] = None,
) -> None:
    """Show one request's verification steps: what was drafted, why, and what the model made of it."""
    _check_outputs({"--html": html_out}, [log])
    try:
        found = step_log.read_step_log(log)
    except OSError as error:
        _refuse(f"{log}: {error.strerror or error}")
    except step_log.StepLogError as error:
        _refuse(f"{log}: {error}")
    if tokenizer is not None:
        try:
            texts = simulate.load_tokenizer(tokenizer)
            found = found.with_texts(lambda ids: "".join(simulate.token_texts(texts, ids)))
        except (OSError, ValueError) as error:
            _refuse(f"--tokenizer: {error}")
    title = f"request {escape(found.request_id)}"
    rows = step_report.table_rows(found.steps)
    console = _print_table(title, step_report.TABLE_HEADER, rows, words=["source", "why"], folded="why")
    console.print(step_report.summary(found), soft_wrap=True, highlight=False)
    if html_out is not None:
        html_out.write_text(step_report.page(found), encoding="utf-8")
        typer.echo(f"wrote {html_out}")


@app.command("doctor")
def doctor_command() -> None:
    """Print versions and what would work here; exit code 1 when drafting would not."""
    findings = doctor.examine()
    table = Table(show_header=False, box=None, pad_edge=False)
    marks = {True: "[green]ok[/]", False: "[red]FAIL[/]", None: ""}
    for finding in findings:
        table.add_row(marks[finding.ok], escape(finding.what), escape(finding.found))
    Console(soft_wrap=True).print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)

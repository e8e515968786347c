"""The commands and their options."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_align import simulate, step_log, step_report
from gpu_align.cli import doctor
from gpu_align.cli.console import check_outputs, print_table, progress_bar, refuse, tokenizer_option
from gpu_align.cli.recipes import recipes_app
from gpu_align.errors import MissingExtraError
from gpu_align.simulate.report import TABLE_HEADER, table_rows

app = typer.Typer(
    name="gpu-align",
    help="Predicted outputs for LLM serving: replay, check and show what a prediction is worth.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback that prints local variables would print predictions.
    pretty_exceptions_enable=False,
)
app.add_typer(recipes_app, name="recipes")


def _setting(metavar: str) -> Any:
    return typer.Option(metavar=metavar, help="a setting of gpu_align; repeatable: each is run")


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
    tokenizer: Annotated[
        str | None, tokenizer_option("for records with text, and to show ids as text")
    ] = None,
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
        refuse(f"--policy: expected one of {', '.join(known_names)}, or module:Class, found {unknown[0]!r}")
    if any(map(simulate.is_import_path, names)) and "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: a module of one's own is usually in this folder
    given = {
        "length_factor": length_factor,
        "min_survival": min_survival,
        "min_survival_recipe": min_survival_recipe,
    }
    settings = _settings(given, sweep)
    check_outputs({"--json": json_out, "--html": html_out}, [pairs])
    try:
        records = simulate.read_records(pairs, tokenizer)
        if tokenizer is not None:
            simulate.load_tokenizer(tokenizer)  # records with ids alone have not needed it yet
    except OSError as error:
        refuse(f"{pairs}: {error.strerror or error}")
    except simulate.RecordError as error:
        refuse(f"{pairs}: {error}" if error.line else str(error))
    except ValueError as error:
        refuse(str(error))

    names = _runnable(recipes, records, names)
    try:
        policies = simulate.make_policies(names, records, num_draft_tokens, settings, recipes)
    except OSError as error:
        refuse(f"--recipes: {recipes}: {error.strerror or error}")
    except ValueError as error:
        refuse(str(error))
    total = sum(len(record.output) for record in records) * len(policies)
    with progress_bar("replaying", total) as advance:
        results = simulate.simulate(records, policies, num_draft_tokens, draft_in_prefill, advance)

    if json_out is not None:
        simulate.write_json(results, num_draft_tokens, json_out)
    if html_out is not None:
        simulate.write_html(records, results, num_draft_tokens, html_out)
    title = f"up to {num_draft_tokens} draft tokens a step"
    print_table(title, TABLE_HEADER, table_rows(results), words=["policy"], folded="policy")
    for written in (json_out, html_out):
        if written is not None:
            typer.echo(f"wrote {written}")


def _runnable(pack: str, records: Sequence[simulate.Record], names: list[str]) -> list[str]:
    """The policies to run: `names`, or else all that can run with this pack."""
    known = simulate.tokenizer_of(records) is not None
    why = "the records do not all name one tokenizer, and --tokenizer gives none"
    if not known and pack not in (simulate.SHIPPED_PACK, simulate.NO_PACK):
        refuse(f"--recipes: {why}")
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
            refuse(f"--{field.replace('_', '-')}:{message}")
    return settings


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
    tokenizer: Annotated[str | None, tokenizer_option("for a file without texts")] = None,
) -> None:
    """Show one request's verification steps: what was drafted, why, and what the model made of it."""
    check_outputs({"--html": html_out}, [log])
    try:
        found = step_log.read_step_log(log)
    except OSError as error:
        refuse(f"{log}: {error.strerror or error}")
    except step_log.StepLogError as error:
        refuse(f"{log}: {error}")
    if tokenizer is not None:
        try:
            texts = simulate.load_tokenizer(tokenizer)
            found = found.with_texts(lambda ids: "".join(simulate.token_texts(texts, ids)))
        except (OSError, ValueError) as error:
            refuse(f"--tokenizer: {error}")
    title = f"request {escape(found.request_id)}"
    rows = step_report.table_rows(found.steps)
    console = print_table(title, step_report.TABLE_HEADER, rows, words=["source", "why"], folded="why")
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

"""The top command: every error that a user can cause ends in one line on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .. import __version__
from ..errors import MissingExtraError
from .bench.command import bench_command
from .console import JsonOut, check_outputs, epilog, option, plugins, refuse, tokenizer_option
from .recipes.command import recipes_app
from .tune.command import tune_command


class OneLineErrors(TyperGroup):
    """Prints ``error: …`` and ends with exit code 2 for bad input, 1 for work that failed, 130 for Ctrl-C."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        kwargs["standalone_mode"] = False
        if not standalone:
            return super().main(*args, **kwargs)
        given = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        if "" in given:  # as a path it would stand for the current folder
            after = f" after {given[given.index('') - 1]}" if given[0] else ""
            sys.exit(_told(f"expected no empty argument, found one{after}; is a shell variable unset?", 2))
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            sys.exit(130)
        except BrokenPipeError:
            raise
        except (MissingExtraError, OSError) as error:
            sys.exit(_told(str(error), 1))
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                if str(error).strip():  # newer versions of Typer have printed the help by now
                    typer.echo(error, err=True)
                sys.exit(2)
            # Older versions of Typer raise Click's errors, newer ones their own.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            sys.exit(_told(message() + _found(error), getattr(error, "exit_code", 2)))
        sys.exit(code if isinstance(code, int) else 0)


def _found(error: BaseException) -> str:
    """The value that newer versions of Typer refuse without naming it."""
    errors: list[Any] = getattr(error.__cause__, "errors", list)()
    return f", found {errors[0]['input']!r}" if errors else ""


def _told(message: str, code: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code


app = typer.Typer(
    name="gpu-align",
    cls=OneLineErrors,
    no_args_is_help=True,
    # A traceback that prints local variables would print predictions.
    pretty_exceptions_enable=False,
)
app.add_typer(recipes_app, name="recipes")
app.command("bench")(bench_command)
app.command("tune", epilog=epilog("tune"))(tune_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpu-align {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version, and exit"),
    ] = False,
) -> None:
    """Predicted outputs for LLM serving: replay, check and show what a prediction is worth."""


def _setting(metavar: str) -> Any:
    return option(metavar, "a setting of gpu_align; repeatable: each is run")


@app.command("simulate", epilog=epilog("simulate"))
def simulate_command(
    pairs: Annotated[
        Path | None, typer.Argument(metavar="PAIRS.jsonl", help="records to replay, plain or gzipped")
    ] = None,
    before: Annotated[Path | None, option("OLD", "a text that predicts the one of --after")] = None,
    after: Annotated[Path | None, option("NEW", "the text that a model would write")] = None,
    git: Annotated[
        str | None,
        option("RANGE", "the edits of these commits: each old file predicts the new one"),
    ] = None,
    repo: Annotated[
        Path | None, option("DIR", "the repository of --git; this folder if none is given")
    ] = None,
    suffix: Annotated[
        list[str] | None, option(".py", "of --git, only files that end in this; repeatable")
    ] = None,
    limit: Annotated[int | None, option("N", "of --git, at most so many edits (100)", min=1)] = None,
    policy: Annotated[
        list[str] | None,
        option(
            "NAME|MODULE:CLASS",
            "a drafter to run (gpu-align policies), or a predictor of your own; repeatable; "
            "all if none is given",
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int,
        option(
            "K",
            "most draft tokens a step, 1 to 256 (vLLM's V1 runner takes 128)",
            *("--num-draft-tokens", "-k"),
            min=1,
            max=256,
        ),
    ] = 64,
    draft_in_prefill: Annotated[
        bool, typer.Option("--draft-in-prefill", help="let the prefill step verify drafts too")
    ] = False,
    length_factor: Annotated[list[float] | None, _setting("F")] = None,
    min_survival: Annotated[list[float] | None, _setting("P")] = None,
    min_survival_recipe: Annotated[list[float] | None, _setting("P")] = None,
    recipes: Annotated[
        str,
        option(
            "PATH|base|off", "a recipe pack for gpu_align and recipe_pack; base is the one that comes with it"
        ),
    ] = "base",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="run gpu_align all along its trade-off, beside its default")
    ] = False,
    tokenizer: Annotated[
        str | None, tokenizer_option("for records with text, and to show ids as text")
    ] = None,
    json_out: JsonOut = None,
    html_out: Annotated[Path | None, option("OUT", "write a page of coloured outputs", "--html")] = None,
) -> None:
    """Replay known outputs and count the verification steps that each drafter takes.

    Give a file of records, or two texts (--before, --after), or commits of a repository (--git).
    """
    from .simulate import command as simulate

    simulate.run(
        simulate.Input(pairs, before, after, git, repo, suffix or [], limit),
        policy or [],
        num_draft_tokens,
        draft_in_prefill,
        {
            "length_factor": length_factor,
            "min_survival": min_survival,
            "min_survival_recipe": min_survival_recipe,
        },
        sweep,
        recipes,
        tokenizer,
        simulate.Outputs(json_out, html_out),
    )


@app.command("policies", epilog=epilog("policies"))
def policies_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="show these in full: options and source")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all fields as JSON")] = False,
) -> None:
    """List the drafters that simulate can run: what each does, its options, and who published it."""
    from .simulate import command as policies

    found = {info.name: info for info in policies.describe()}
    for name in names or ():
        if name not in found:
            refuse(f"NAME: expected one of {', '.join(found)}, found {name!r}")
    chosen = [found[name] for name in dict.fromkeys(names or found)]
    if as_json:
        report = {"version": __version__, "policies": [info._asdict() for info in chosen]}
        typer.echo(json.dumps(report, indent=1))
        return
    for info in chosen:
        typer.echo("\n".join(policies.lines_of(info)))


for plugin in plugins("gpu_align.commands"):
    with contextlib.suppress(ModuleNotFoundError):  # its package is gone; `doctor` says so
        plugin.load()(app)


@app.command("report", epilog=epilog("report"))
def report_command(
    log: Annotated[
        Path, typer.Argument(metavar="FILE.yaml|DIR", help="a file of GPU_ALIGN_DEBUG_DIR, or the folder")
    ],
    html_out: Annotated[Path | None, option("OUT", "write a page", "--html")] = None,
    json_out: JsonOut = None,
    tokenizer: Annotated[str | None, tokenizer_option("for a file without texts")] = None,
    top: Annotated[int | None, option("N", "of a folder, so many requests and reasons (10)", min=0)] = None,
) -> None:
    """Show what was drafted, why, and what the model made of it: of one request, or of a folder of requests.

    Of a folder: the worst requests, why draft tokens were lost, and the worth of each source.
    """
    from . import report

    check_outputs({"--html": html_out, "--json": json_out}, [log])
    if log.is_dir():
        if tokenizer is not None:
            refuse("--tokenizer: expected with a file only, found a folder")
        report.show_folder(log, 10 if top is None else top, html_out, json_out)
        return
    if top is not None:
        refuse(f"--top: expected with a folder only, found the file {log}")
    report.show_file(log, tokenizer, html_out, json_out)


@app.command("doctor", epilog=epilog("doctor"))
def doctor_command(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="every line: each private name of vLLM, too")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="import vLLM (a minute) instead of reading its sources")
    ] = False,
) -> None:
    """Examine this machine: what is installed, whether drafting works, and the command that mends what does not.

    Exit code 0: usable. 1: not usable.
    """
    from . import doctor

    findings = doctor.examine(deep)
    if as_json:
        report = doctor.as_json(findings, __version__)
        typer.echo(json.dumps(report, indent=1))
    if not (report["usable"] if as_json else doctor.show(findings, Console(), verbose)):
        raise typer.Exit(1)

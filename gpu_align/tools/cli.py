"""The top command: every error that a user can cause ends in one line on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..ops.errors import MissingExtraError
from .bench.command import bench_command
from .console import epilog, plugins
from .doctor import doctor_command
from .recipes.command import recipes_app
from .report import report_command
from .simulate.command import policies_command, simulate_command
from .tune.command import tune_command


class OneLineErrors(TyperGroup):
    """Prints ``error: …`` and ends with exit code 2 for bad input, 1 for work that failed, 130 for Ctrl-C."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _without_types(self)
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
            # Newer versions refuse a value without naming it.
            errors: list[Any] = getattr(error.__cause__, "errors", list)()
            found = f", found {errors[0]['input']!r}" if errors else ""
            sys.exit(_told(message() + found, getattr(error, "exit_code", 2)))
        sys.exit(code if isinstance(code, int) else 0)


def _without_types(command: Any) -> None:
    """Newer versions of Typer write the Python type of an argument, ``<list[Path]>``, into the help."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
    for inner in getattr(command, "commands", {}).values():
        _without_types(inner)


def _told(message: str, code: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code


app = typer.Typer(
    name="gpu-align",
    cls=OneLineErrors,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": 115},
    # A traceback that prints local variables would print predictions.
    pretty_exceptions_enable=False,
)
app.add_typer(recipes_app, name="recipes")
app.command("bench", epilog=epilog("bench"))(bench_command)
app.command("tune", epilog=epilog("tune"))(tune_command)
app.command("simulate", epilog=epilog("simulate"))(simulate_command)
app.command("policies", epilog=epilog("policies"))(policies_command)
for plugin in plugins("gpu_align.commands"):
    with contextlib.suppress(ModuleNotFoundError):  # its package is gone; `doctor` says so
        plugin.load()(app)
app.command("report", epilog=epilog("report"))(report_command)
app.command("doctor", epilog=epilog("doctor"))(doctor_command)


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

"""The top command: every error that a user can cause ends in one line on stderr."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from gpu_align.errors import MissingExtraError


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

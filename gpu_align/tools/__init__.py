"""The ``gpu-align`` command.

The core of gpu-align needs neither typer nor rich; `main` is what says so when they are missing.
"""

from __future__ import annotations

import sys

from ..errors import MissingExtraError


def main() -> int:
    """Console entry point: run the command line, and turn a missing extra into one line on stderr."""
    try:
        try:
            from .cli import app
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in ("typer", "rich", "click"):
                raise
            raise MissingExtraError("the gpu-align command", package, "cli") from error
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        app(prog_name="gpu-align")
    except SystemExit as ended:  # how every command ends
        return ended.code if isinstance(ended.code, int) else 0
    return 0

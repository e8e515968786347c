"""The ``gpu-align`` command.

The core of gpu-align needs none of the packages of the extra ``cli``; `main` is what says so when one is missing.
"""

from __future__ import annotations

import io
import sys

from ..ops.errors import MissingExtraError

_EXTRA = ("typer", "rich", "click", "httpx", "prometheus_client")


def main() -> int:
    """Console entry point: run the command line, and turn a missing extra into one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        # A console that is not UTF-8 shows a replacement for what it cannot.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    try:
        from .cli import app

        app(prog_name="gpu-align")
    except SystemExit as ended:  # how every command ends
        return ended.code if isinstance(ended.code, int) else 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(f"error: {MissingExtraError('the gpu-align command', package, 'cli')}", file=sys.stderr)
        return 1
    return 0

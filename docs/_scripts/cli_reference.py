"""The commands of docs/cli.md, from the command line itself: each with its arguments and options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typer.main import get_command

from gpu_align.tools.cli import app

#: Where the commands go in docs/cli.md.
MARK = "<!-- commands -->"


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that runs, by its words after ``gpu-align``, in the order of ``--help``."""
    command = get_command(app) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, member in inner.items():
        yield from commands(member, (*path, name))


def reference() -> str:
    """A section for each command."""
    parts = ["## gpu-align\n", _list(_parameters(get_command(app))), ""]
    for path, command in commands():
        parts += _section(path, command)
    return "\n".join(parts).rstrip("\n") + "\n"


def _section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    yield f"## {' '.join(path)}\n"
    told, _, _ = inspect.cleandoc(command.help or "").partition("Examples:")
    yield told.strip() + "\n"
    yield _list(_parameters(command)) + "\n"


def _parameters(command: Any) -> Iterator[tuple[str, str]]:
    """``(how it is written, what it is for)``."""
    for parameter in command.params:
        # Completion has a section of its own.
        if parameter.name in ("help", "install_completion", "show_completion") or parameter.hidden:
            continue
        is_option = parameter.param_type_name == "option"
        metavar = parameter.metavar or ""
        told = (getattr(parameter, "help", None) or "").rstrip(".")
        if is_option:
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            label = f"{names} {metavar}".rstrip() if not parameter.is_flag else names
            default = parameter.default
            if isinstance(parameter.show_default, str):
                default = parameter.show_default
            if default not in (None, False, (), "") and not callable(default):
                told += f"; default: {default}"
            if parameter.required:
                told += "; required"
        else:
            label = metavar if parameter.required else f"[{metavar}]"
        yield label, told


def _list(parameters: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{label}`: {told}" for label, told in parameters)

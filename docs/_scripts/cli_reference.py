"""Writes docs/cli.md from the command line itself: every command with its arguments and options.

::

    python docs/_scripts/cli_reference.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typer.main import get_command

from gpu_align.tools.cli import app

PAGE = Path(__file__).resolve().parents[1] / "cli.md"

HEAD = """<!-- Written by docs/_scripts/cli_reference.py. Do not edit. -->
# The command line

`gpu-align` comes with the extra `cli`, which `vllm` and `cpu` contain. `gpu-align COMMAND --help` prints what this
page says of a command, and examples.

- **Exit codes**: 0; 1 if the work failed or an extra is missing; 2 for bad input; 130 for Ctrl-C.
- **Errors** are one line on stderr, `error: …`, and name the option or the file. Notes and progress go to stderr,
  too, results to stdout.
- **Texts** may begin with a byte order mark; files of JSON lines may be gzipped.
- **JSON** files name the version of gpu-align, the settings and the tokenizer.
- **Tokenizers** are `tekken`, which needs no network, a folder, or a name on the Hugging Face hub. If the hub does
  not answer within 5 seconds, only what is in its cache is loaded.

**Shell completion**: `gpu-align --install-completion` for the shell that runs it (Bash, Zsh, Fish or PowerShell),
`gpu-align --show-completion` prints the script.
"""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that runs, by its words after ``gpu-align``, in the order of ``--help``."""
    command = get_command(app) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, member in inner.items():
        yield from commands(member, (*path, name))


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## gpu-align\n", _list(_parameters(get_command(app))), ""]
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Scripts of the documentation and its examples as modules; the command, Python and Git, run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """The file at this path of the checkout; twice in a process it is the same."""
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # FastAPI looks annotations up there
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def command(*arguments: object, **more: Any) -> Any:
    """Run ``gpu-align`` with these arguments: exit code, output and standard error."""
    from typer.testing import CliRunner

    from gpu_align.tools.cli import app

    return CliRunner().invoke(app, [*map(str, arguments)], **more)


def python(code: str, *arguments: str, folder: Path = ROOT, code_of: int = 0, **env: str) -> tuple[str, str]:
    """Standard output and error of a Python of its own, with the checkout; `code_of` is its exit code."""
    path = os.pathsep.join([*filter(None, [env.pop("PYTHONPATH", "")]), str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code_of, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def git(repo: Path, *arguments: str) -> str:
    """What Git prints, as an author of no configuration."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(repo), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

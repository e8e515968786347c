"""Scripts of the documentation and its examples as modules; repositories to read edits from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def git(repo: Path, *arguments: str) -> str:
    """What Git prints, as an author of no configuration."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(repo), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

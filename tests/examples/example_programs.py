"""How tests run the examples: in this process, with the environment of one server."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load(name: str) -> ModuleType:
    """An example as a module; twice in a process it is the same."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # FastAPI looks annotations up there
    spec.loader.exec_module(module)
    return module


def point_to(patch: pytest.MonkeyPatch, url: str, model: str = "", **extra_body: Any) -> None:
    patch.setenv("OPENAI_BASE_URL", url)
    patch.setenv("MODEL", model)
    patch.setenv("EXTRA_BODY", json.dumps(extra_body))


def main(patch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    patch.setattr(sys, "argv", [name, *arguments])
    status: int = load(name).main()
    return status


def run_notebook() -> dict[str, Any]:
    """Its cells, one after the other; what they defined."""
    notebook = json.loads((EXAMPLES / "predicted_outputs.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # they would be of some other server
            exec(compile("".join(cell["source"]), cell["id"], "exec", dont_inherit=True), names)
    return names

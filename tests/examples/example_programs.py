"""How tests run the examples: in this process, with the environment of one server."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.modules import ROOT, load

EXAMPLES = ROOT / "docs" / "examples"


def point_to(patch: pytest.MonkeyPatch, url: str, model: str = "", **extra_body: Any) -> None:
    patch.setenv("OPENAI_BASE_URL", url)
    patch.setenv("MODEL", model)
    patch.setenv("EXTRA_BODY", json.dumps(extra_body))


def main(patch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    patch.setattr(sys, "argv", [name, *arguments])
    status: int = load(f"docs/examples/{name}.py").main()
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

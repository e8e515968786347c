"""The examples against vLLM with the plugin. The tiny model writes what a grammar lets it: exactly the edit.

It is a random model, and writes the text in other tokens than the tokenizer would: few drafts are accepted. How
many are is tested elsewhere; here the server must have counted them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vllm_harness import Server

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from example_programs import main, point_to, run_notebook

from tests.modules import load

pytestmark = pytest.mark.vllm

OLD = "def get(name):\n    return store[name]\n"
NEW = OLD.replace("get", "fetch")


def only(text: str) -> dict[str, object]:
    """In the body of a request: the model can write nothing but this."""
    return {"structured_outputs": {"choice": [text]}}


def accepted_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What an example says of its prediction: a number where the server counted."""
    return capsys.readouterr().err.split("accepted=")[1].split()[0]


def test_the_agent_edits_a_file(
    byte_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.py"
    file.write_text(OLD)
    point_to(monkeypatch, f"{byte_server.url}/v1", **only(NEW))
    assert main(monkeypatch, "code_edit_agent", str(file), "Rename get to fetch") == 0
    assert file.read_text() == NEW
    assert int(accepted_of(capsys)) >= 1


def test_the_service_merges(byte_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    client = TestClient(load("docs/examples/fast_apply.py").app)
    point_to(monkeypatch, f"{byte_server.url}/v1", **only(NEW))
    answer = client.post("/apply", json={"original": OLD, "snippet": "def fetch(name):\n# existing code"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["merged"] == NEW
    assert 0 <= found["accepted_prediction_tokens"] < found["completion_tokens"]
    assert found["rejected_prediction_tokens"] >= 0


def test_the_state_keeps_its_schema(
    byte_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example's own schema is the grammar: a random model flips the switches as it likes, within it."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"kettle": False, "lamp": True}))
    point_to(monkeypatch, f"{byte_server.url}/v1")
    assert main(monkeypatch, "json_state", str(path), "The kettle was switched on") == 0
    state = json.loads(path.read_text())
    assert [*state] == ["kettle", "lamp"]
    assert all(isinstance(value, bool) for value in state.values())
    assert int(accepted_of(capsys)) >= 0


def test_the_notebook_runs(
    byte_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_to(monkeypatch, f"{byte_server.url}/v1")
    run_notebook()
    shown = capsys.readouterr().out
    assert shown.count("same answer: True") == 3
    assert "None" not in shown.split("same answer")[1]  # the server counted

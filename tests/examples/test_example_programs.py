"""The examples against a server that answers as it is told: what they send, what they do with the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_programs import main, point_to, run_notebook
from example_server import serve

from tests.modules import load

pytest.importorskip("openai")

OLD = "def get(name):\n    return store[name]\n"
NEW = OLD.replace("get", "fetch")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.py"
    path.write_text(OLD)
    return path


def test_the_agent_sends_the_file_as_prediction_and_writes_the_answer(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(lambda body: (NEW, "stop")) as server:
        point_to(monkeypatch, server.url, top_k=1)
        assert main(monkeypatch, "code_edit_agent", str(file), "Rename get to fetch") == 0
    assert file.read_text() == NEW
    [body] = server.bodies
    assert body["prediction"] == {"type": "content", "content": OLD}
    assert OLD in body["messages"][-1]["content"]
    assert (body["model"], body["top_k"]) == ("fake", 1)
    shown = capsys.readouterr()
    assert "-def get(name):\n+def fetch(name):\n" in shown.out
    assert "accepted=3 rejected=1" in shown.err


def test_the_service_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    testclient = pytest.importorskip("fastapi.testclient")  # comes with vLLM
    client = testclient.TestClient(load("docs/examples/fast_apply.py").app)
    snippet = "# ... existing code ...\n"
    with serve(lambda body: (NEW, "stop")) as server:
        point_to(monkeypatch, server.url)
        answer = client.post("/apply", json={"original": OLD, "snippet": snippet})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "merged": NEW,
        "completion_tokens": 4,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 1,
    }
    [body] = server.bodies
    assert body["prediction"]["content"] == OLD
    assert OLD in body["messages"][0]["content"]
    assert snippet in body["messages"][0]["content"]


def test_the_state_goes_through_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"n": 0, "on": False, "who": [{"name": "ö"}], "note": None}))

    def count(body: dict[str, Any]) -> tuple[str, str]:
        state = json.loads(body["prediction"]["content"])
        return json.dumps({**state, "n": state["n"] + 1}), "stop"

    with serve(count) as server:
        point_to(monkeypatch, server.url)
        assert main(monkeypatch, "json_state", str(path), "one", "two") == 0
    assert json.loads(path.read_text()) == {"n": 2, "on": False, "who": [{"name": "ö"}], "note": None}
    first, second = server.bodies
    assert '"n": 1' in second["prediction"]["content"]
    assert second["prediction"]["content"] in second["messages"][-1]["content"]
    assert first["response_format"]["json_schema"]["schema"] == {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "on": {"type": "boolean"},
            "who": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "note": {"type": "null"},
        },
        "required": ["n", "on", "who", "note"],
        "additionalProperties": False,
    }


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda body: ("def surface(w, h):", "stop")) as server:
        point_to(monkeypatch, server.url)
        run_notebook()
    assert len(server.bodies) == 4
    assert "prediction" not in server.bodies[0]
    assert capsys.readouterr().out.count("same answer: True") == 3

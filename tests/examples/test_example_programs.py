"""The examples against a server that answers as it is told: what they send, what they do with the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.modules import ROOT, load

pytest.importorskip("openai")

OLD = "def get(name):\n    return store[name]\n"
NEW = OLD.replace("get", "fetch")


class Server:
    """OpenAI's chat API. answer: the text for a body; words of it that the prediction has are accepted."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], str] = lambda body: NEW

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        text = self.answer(body)
        predicted = body.get("prediction", {}).get("content", "").split()
        accepted = sum(word in predicted for word in text.split())
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 1}
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [choice], "usage": {**usage, "completion_tokens_details": details},
        }  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One to which the environment points."""
    fake = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send({"object": "list", "data": [{"id": "fake", "object": "model"}]})

        def do_POST(self) -> None:
            self.send(fake.reply(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def send(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{http.server_port}/v1")
    monkeypatch.setenv("MODEL", "")
    monkeypatch.setenv("EXTRA_BODY", '{"top_k": 1}')
    yield fake
    http.shutdown()
    http.server_close()


def run(patch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    patch.setattr(sys, "argv", [name, *arguments])
    assert load(f"docs/examples/{name}.py").main() == 0


def test_the_agent_sends_the_file_as_prediction_and_writes_the_answer(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.py"
    file.write_text(OLD)
    run(monkeypatch, "code_edit_agent", str(file), "Rename get to fetch")
    assert file.read_text() == NEW
    [body] = server.bodies
    assert body["prediction"] == {"type": "content", "content": OLD}
    assert OLD in body["messages"][-1]["content"]
    assert (body["model"], body["top_k"]) == ("fake", 1)
    shown = capsys.readouterr()
    assert "-def get(name):\n+def fetch(name):\n" in shown.out
    assert "accepted=3 rejected=1" in shown.err


def test_the_service_merges(server: Server) -> None:
    testclient = pytest.importorskip("fastapi.testclient")  # comes with vLLM
    client = testclient.TestClient(load("docs/examples/fast_apply.py").app)
    answer = client.post("/apply", json={"original": OLD, "snippet": "# ... existing code ...\n"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["merged"], answer.json()["accepted_prediction_tokens"]) == (NEW, 3)
    [body] = server.bodies
    assert body["prediction"]["content"] == OLD
    assert all(text in body["messages"][0]["content"] for text in (OLD, "# ... existing code ...\n"))


def test_the_state_goes_through_the_events(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(body: dict[str, Any]) -> str:
        state = json.loads(body["prediction"]["content"])
        return json.dumps({**state, "n": state["n"] + 1})

    path, server.answer = tmp_path / "state.json", count
    path.write_text(json.dumps({"n": 0, "who": [{"name": "ö"}]}))
    run(monkeypatch, "json_state", str(path), "one", "two")
    assert json.loads(path.read_text()) == {"n": 2, "who": [{"name": "ö"}]}
    first, second = server.bodies
    assert '"n": 1' in second["prediction"]["content"]
    assert second["prediction"]["content"] in second["messages"][-1]["content"]

    def of_object(**properties: Any) -> dict[str, Any]:
        more = {"required": list(properties), "additionalProperties": False}
        return {"type": "object", "properties": properties, **more}

    names = {"type": "array", "items": of_object(name={"type": "string"})}
    schema = first["response_format"]["json_schema"]["schema"]
    assert schema == of_object(n={"type": "integer"}, who=names)


def test_the_notebook_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body: "def surface(w, h):"
    file = ROOT / "docs" / "examples" / "predicted_outputs.ipynb"
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # they would be of some other server
            exec(compile("".join(cell["source"]), cell["id"], "exec", dont_inherit=True), names)
    assert ["prediction" in body for body in server.bodies] == [False, True, True, True]
    assert capsys.readouterr().out.count("same answer: True") == 3

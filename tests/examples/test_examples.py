"""Examples against servers that answer as they are told, and the deployment files beside the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
from gpu_align import __version__
from tests.gpu_align.bench.fake_openai import Fake
from tests.modules import ROOT, load

OLD = "def get(name):\n    return store[name]\n"
NEW = OLD.replace("get", "fetch")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """One to which the environment points."""
    with Fake(models=("fake",), answer=lambda body: NEW) as fake:
        monkeypatch.setenv("OPENAI_BASE_URL", fake.url)
        monkeypatch.setenv("MODEL", "")
        monkeypatch.setenv("EXTRA_BODY", '{"top_k": 1}')
        yield fake


def run(patch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    patch.setattr(sys, "argv", [name, *arguments])
    assert load(f"docs/examples/{name}.py").main() == 0


def test_the_agent_sends_the_file_as_prediction_and_writes_the_answer(
    server: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert "accepted=3 rejected=0" in shown.err


def test_the_service_merges(server: Fake) -> None:
    testclient = pytest.importorskip("fastapi.testclient")  # comes with vLLM
    client = testclient.TestClient(load("docs/examples/fast_apply.py").app)
    answer = client.post("/apply", json={"original": OLD, "snippet": "# ... existing code ...\n"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["merged"], answer.json()["accepted_prediction_tokens"]) == (NEW, 3)
    [body] = server.bodies
    assert body["prediction"]["content"] == OLD
    assert all(text in body["messages"][0]["content"] for text in (OLD, "# ... existing code ...\n"))


def test_the_state_goes_through_the_events(
    server: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_the_notebook_runs(server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body: "def surface(w, h):"
    file = ROOT / "docs" / "examples" / "predicted_outputs.ipynb"
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # they would be of some other server
            exec(compile("".join(cell["source"]), cell["id"], "exec", dont_inherit=True), names)
    assert ["prediction" in body for body in server.bodies] == [False, True, True, True]
    assert capsys.readouterr().out.count("same answer: True") == 3


yaml = pytest.importorskip("yaml")


DEPLOY = ROOT / "docs" / "deploy"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert f'version = "{__version__}"' in PROJECT
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def kubernetes() -> dict[str, Any]:
    """The objects of the manifest by their kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.mark.parametrize("where", ["Compose", "Kubernetes"])
def test_the_server_is_started_as_the_pages_say(where: str) -> None:
    if where == "Compose":
        command = read(DEPLOY / "compose.yaml")["services"]["vllm"]["command"]
    else:
        [container] = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
        command = container["args"]
    command = [part.strip() for part in command]
    assert "--port=8000" in command
    [flag] = [part for part in command if part.startswith("--speculative-config=")]
    assert json.loads(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", flag.partition("=")[2])) == {
        "method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": 32,
    }  # fmt: skip


def test_each_alert_reads_metrics_that_exist_and_names_its_section() -> None:
    pytest.importorskip("pydantic")
    from vllm_integration.frontend.metrics import SPECS

    known = {spec.name + ("_total" if spec.kind == "Counter" else "") for spec in SPECS.values()}
    site = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    assert site is not None
    [group] = read(DEPLOY / "alerts.yml")["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"gpu_align_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= known, rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"{site[1]}operate.html#{rule['alert'].lower()}"
        assert f"### {rule['alert']}\n" in page
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "test", "rules", DEPLOY / "alerts_test.yml"], check=True)


def test_the_container_file_copies_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    assert {"gpu_align", "vllm_integration", "pyproject.toml"} <= copied
    sent = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert copied == set(sent)
    assert all((ROOT / path).exists() for path in copied)
    version = text.split("ARG VLLM_VERSION=")[1].split()[0]
    assert f"VLLM_VERSION:-{version}" in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"VLLM   ?= {version}\n" in makefile  # the newest that is tested

"""What people expect beside the code: the files parse, and agree with each other and with the checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpu_align import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
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


def test_prometheus_and_kubernetes_reach_the_server() -> None:
    config = read(DEPLOY / "prometheus.yml")
    [scrape] = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
    mounted = "".join(read(DEPLOY / "compose.yaml")["services"]["prometheus"]["volumes"])
    assert all(
        f"./{name}:/etc/prometheus/{name}" in mounted for name in ("prometheus.yml", *config["rule_files"])
    )
    found = kubernetes()
    pod = found["Deployment"]["spec"]["template"]
    service = found["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in [
        port["name"] for port in pod["spec"]["containers"][0]["ports"]
    ]
    assert pod["spec"]["enableServiceLinks"] is False  # else VLLM_PORT is the address of the Service
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"][:1]]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]


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
    extra = re.search(r"^cli = \[(.*)\]$", PROJECT, re.MULTILINE)
    assert extra is not None
    command = text.split("--system ")[1].split("\n\n")[0]
    wanted = re.findall(r'"([^"]+)"', extra[1])
    assert ["gpu-align[numba]", *re.findall(r'"([^"]+)"', command)] == wanted
    version = text.split("ARG VLLM_VERSION=")[1].split()[0]
    assert f"VLLM_VERSION:-{version}" in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"VLLM   ?= {version}\n" in makefile  # the newest that is tested

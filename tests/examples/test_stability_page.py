"""docs/stability.md says of every public name how stable it is, and of each once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import gpu_align

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
LEVELS = ("stable", "provisional", "internal")


def listed(pattern: str) -> Counter[str]:
    """Names of the tables, in whole code spans."""
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    return Counter(re.findall(rf"`({pattern})`", rows))


def test_every_name_of_the_python_reference_is_listed() -> None:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {f"gpu_align.{name}" for name in gpu_align.__all__}
    names |= set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE))
    found = listed(r"gpu_align\.[\w.]+")
    assert names - set(found) == set()
    assert set(found) - names == set()  # no name that does not exist
    once = {name: count for name, count in found.items() if name != "gpu_align.Drafter"}  # its methods differ
    assert set(once.values()) == {1}


def test_every_setting_is_listed() -> None:
    pytest.importorskip("pydantic")
    from vllm_integration.config.settings import PREFIX, Settings

    names = {PREFIX + name.upper() for name in Settings.model_fields}
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(GPU_ALIGN_\w+)`", page, re.MULTILINE))
    assert documented >= names
    assert listed(r"GPU_ALIGN_\w+") == Counter(names | documented)


def test_every_metric_is_listed() -> None:
    from vllm_integration.frontend.metrics import SPECS

    names = {spec.name + ("_total" if spec.kind == "Counter" else "") for spec in SPECS.values()}
    metrics = PAGE.split("## Metrics")[1].split("\n## ")[0]
    assert Counter(re.findall(r"`(gpu_align_\w+)`", metrics)) == Counter(names)


def test_every_command_is_listed() -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from gpu_align.tools.cli import app

    def commands(command: object, words: str) -> set[str]:
        inner = getattr(command, "commands", None)
        if inner is None:
            return {words}
        return {found for name, member in inner.items() for found in commands(member, f"{words} {name}")}

    assert set(listed(r"gpu-align [a-z ]+")) >= commands(get_command(app), "gpu-align")


def test_the_fields_over_http_are_listed() -> None:
    from gpu_align.step_log import FORMAT

    http = PAGE.split("## HTTP")[1].split("\n## ")[0]
    reference = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"^\| `(/v1/[\w/]+)` \|", reference, re.MULTILINE))
    assert len(paths) >= 4
    assert {path for path in paths if f"`{path}`" not in http} == set()
    for name in (
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
        "vllm_xargs.gpu_align_prediction",
    ):
        assert f"`{name}`" in http
    assert f"`{FORMAT}`" in PAGE


def test_every_row_has_a_level() -> None:
    tables = PAGE.split("## HTTP")[1].split("Provisional names, by module")[0]
    first = re.findall(r"^\| (\w+) \|", tables, re.MULTILINE)
    assert len(first) >= 18
    assert set(first) == set(LEVELS)

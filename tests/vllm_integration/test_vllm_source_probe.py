"""Seams looked up in sources. (One of each group that is missing in an engine: `tests/vllm/test_extras.py`.)"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from vllm_integration import doctor, plugin
from vllm_integration.config import engine_config
from vllm_integration.seams import install as compat
from vllm_integration.seams import source_probe
from vllm_integration.seams.install import wrapped_by
from vllm_integration.seams.source_probe import installed_root
from vllm_integration.seams.table import GROUPS, SEAMS, SeamStatus


def installed() -> Path:
    found = installed_root()
    if found is None:
        pytest.skip("vLLM is not installed")
    return found


def test_every_seam_is_in_the_installed_vllm_and_this_is_found_without_importing_it() -> None:
    code = (
        "import sys; from vllm_integration.seams.source_probe import installed_root, probe_sources;"
        "bad = [s for s in probe_sources(installed_root()) if s.state != 'found'];"
        "print(bad, [m for m in ('vllm', 'torch', 'triton') if m in sys.modules])"
    )
    installed()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] []", done.stderr


def test_the_command_looks_into_a_directory_and_into_a_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, wheel = installed(), tmp_path / "vllm-9.9.9-py3-none-any.whl"
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


class Config:
    """As much of a `VllmConfig` as the wrapped method looks at."""

    def __init__(self, model: str) -> None:
        self.speculative_config = type("S", (), {"method": "custom_class", "model": model})()

    @wrapped_by(engine_config.unsupported_features)
    def unsupported(self) -> list[str]:
        speculative = [] if self.speculative_config is None else ["a speculative method"]
        return [*speculative, "something else"]


@functools.cache
def shared_sources() -> source_probe.Sources:
    """Those of the installed vLLM, parsed once."""
    return source_probe.Sources(installed())


@pytest.fixture
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing looked up, nothing told."""
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    looked_up = source_probe.probe_installed
    looked_up.cache_clear()
    engine_config._warn_once.cache_clear()
    yield
    looked_up.cache_clear()


@pytest.mark.usefixtures("plugin_on", "as_at_the_start")
def test_v2_takes_our_class_only_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    ours = Config("vllm_integration.PredictedOutputs")
    assert ours.unsupported() == ["something else"]
    assert Config("somebody.Else").unsupported() == ["a speculative method", "something else"]

    gone = SeamStatus(next(seam for seam in SEAMS if seam.groups[0] == "v2"), "missing", "no such thing")
    monkeypatch.setattr(source_probe, "probe_installed", lambda *_: (gone,))
    for _ in range(2):
        assert ours.unsupported() == ["a speculative method", "something else"]
    (line,) = plugin_log
    assert "no such thing" in line
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(compat.SeamError, match="no such thing"):
        ours.unsupported()


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


@pytest.mark.usefixtures("plugin_on", "as_at_the_start")
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
    source_probe.main([str(installed())])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(says) for line in lines), [x for x in lines if not x.startswith("found")]
    statuses = source_probe.probe_sources()
    bad = {each for status in statuses if status.state != "found" for each in status.seam.groups}
    assert group in bad or not (group or bad)
    last = [*doctor.names(statuses, "fix", "start")][-1]
    assert last.found.startswith(runners)
    assert last.ok is not (bool(group) and not GROUPS[group].costs)
    runs = Config("vllm_integration.PredictedOutputs").unsupported() == ["something else"]
    assert runs is not bool(bad & {"v2_start", "v2", "scheduler"})
    assert group or bool(source_probe.difference()) is says.startswith("differs")
    plugin_log.clear()
    if group and GROUPS[group].costs:
        reason = compat.missing(group)
        monkeypatch.setattr(compat.importlib, "import_module", lambda name: None)
        assert compat.install(group) == compat.install(group) == reason
        assert plugin_log == [f"gpu_align {GROUPS[group].costs}: {reason}"]
        assert compat.off_reason() is None


@pytest.mark.usefixtures("plugin_on", "as_at_the_start")
@pytest.mark.parametrize(
    ("version", "off", "says"),
    [
        ("0.31.2", True, "vLLM 0.31.2 is older than "),
        ("0.99.0", False, "not run with this version, 0.99.0, but with "),
        ("", False, "not run with this version, unknown, but with "),
    ],
)
def test_a_version_that_was_not_run_is_said_once(
    version: str, off: bool, says: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(source_probe, "version_of", lambda *_: version)
    for group in ("config", "v1", "usage"):
        assert bool(compat.install(group)) is off
    assert (compat.off_reason() is not None) is off
    if off:
        assert compat.off_reason() is not None
        (line,) = plugin_log
        assert says in line
    else:
        assert source_probe.difference().startswith(says)
        *_, verdict = (f for f in doctor.examine(False) if f.what == "vLLM version")
        assert verdict.caveat.startswith("not run with this version")


@pytest.mark.usefixtures("plugin_on", "as_at_the_start")
def test_two_plugins_of_this_name_are_said(monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    points = [metadata.EntryPoint("gpu_align", value, "vllm.general_plugins") for value in ("a:b", "c:d")]
    monkeypatch.setattr(compat, "entry_points", lambda **_: points)
    for _ in range(2):
        plugin.register()
    assert plugin_log == ["2 plugins are called gpu_align, vLLM loads the last one: a:b of ?, c:d of ?"]
    assert doctor.plugin().ok is False

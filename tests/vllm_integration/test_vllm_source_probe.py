"""Seams looked up in sources. The campaign's `seams` renames every single one."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_integration.config import engine_config
from vllm_integration.seams import install as compat
from vllm_integration.seams import source_probe
from vllm_integration.seams.install import wrapped_by
from vllm_integration.seams.source_probe import installed_root
from vllm_integration.seams.table import SEAMS, SeamStatus


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
    assert f"{len(SEAMS)} of {len(SEAMS)} seams found" in capsys.readouterr().out
    runner = "vllm/v1/worker/gpu/model_runner.py"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = (root / runner).read_text()
        text = text.replace("def add_requests(", "def add_some_requests(")
        text = text.replace("def _remove_request(self, req_id", "def _remove_request(self, name")
        archive.writestr(runner, text)
    assert source_probe.main([str(wheel)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    found = {name: state for state, name, *_ in map(str.split, lines)}
    assert len(found) == len(SEAMS)
    names = ("finish_requests", "add_requests", "_remove_request")
    assert [found[f"v2.{name}"] for name in names] == ["found", "missing", "changed"]
    assert f" of {len(SEAMS)} seams found" in last
    assert source_probe.main([]) == 2


class Config:
    """As much of a `VllmConfig` as the wrapped method looks at."""

    def __init__(self, model: str) -> None:
        self.speculative_config = type("S", (), {"method": "custom_class", "model": model})()

    @wrapped_by(engine_config.unsupported_features)
    def unsupported(self) -> list[str]:
        return ["speculative method 'custom_class'", "something else"]


@pytest.mark.usefixtures("plugin_on")
def test_v2_takes_our_class_only_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    compat.are_whole.cache_clear()
    ours = Config("vllm_integration.PredictedOutputs")
    assert ours.unsupported() == ["something else"]
    assert Config("somebody.Else").unsupported() == ["speculative method 'custom_class'", "something else"]

    gone = SeamStatus(next(seam for seam in SEAMS if seam.group == "v2"), "missing", "no such thing")
    monkeypatch.setattr(source_probe, "probe_sources", lambda **_: [gone])
    compat.are_whole.cache_clear()
    assert ours.unsupported() == ["speculative method 'custom_class'", "something else"]
    assert ours.unsupported() == ["speculative method 'custom_class'", "something else"]
    assert len(plugin_log) == 1
    assert "no such thing" in plugin_log[0]
    compat.are_whole.cache_clear()
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(compat.SeamError, match="no such thing"):
        ours.unsupported()
    compat.are_whole.cache_clear()

"""Seams looked up in sources: what importing finds. The campaign's `seams` renames every single one."""

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
from vllm_integration.seams.source_probe import Sources, installed_root, probe_sources
from vllm_integration.seams.table import SEAMS, Seam, SeamStatus

MODULES = {
    "engine/__init__.py": "from .base import Base as Exported\nfrom engine.lazy import helper\n",
    "engine/base.py": """
if True:
    from dataclasses import dataclass
try:
    OPTIONS = ("a",)
except ImportError:
    OPTIONS = ()
class Parent(Generic[T]):
    def __init__(self, size, dtype, *, device=None):
        self.rows = size
    def step(self, output, *rest, late, later=1): ...
class Base(Parent):
    declared: int
    def update(self):
        self.batch.state = 1
        return self.only_read
@dataclass
class Point:
    x: int
    y: int = 0
""",
    "engine/lazy.py": "from .base import Base as Late\nasync def helper(a, b=1):\n    return a\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "module", "attribute", "parameters", "state"),
    [
        ("wrap", "engine.base", "Base.update", ("self",), "found"),
        ("wrap", "engine.base", "Base.step", ("self", "output"), "found"),
        ("call", "engine.base", "Base.step", ("self", "output"), "changed"),  # `late` is needed too
        ("implement", "engine.base", "Base.step", ("self", "other"), "changed"),
        ("wrap", "engine.base", "Base.gone", ("self",), "missing"),
        ("wrap", "engine.gone", "Base.update", ("self",), "missing"),
        ("wrap", "engine.base", "Gone.update", ("self",), "missing"),
        ("wrap", "engine.base", "OPTIONS.update", ("self",), "missing"),
        ("call", "engine", "helper", ("a",), "found"),
        ("call", "engine", "helper", ("b",), "changed"),
        ("call", "engine", "Exported", ("size", "dtype"), "found"),
        ("call", "engine.lazy", "Late", ("size", "dtype"), "found"),
        ("call", "engine.base", "Base", ("size",), "changed"),
        ("call", "engine.base", "Point", ("x",), "found"),
        ("call", "engine.base", "Point", (), "changed"),
        ("call", "engine.base", "OPTIONS", (), "missing"),
        ("field", "engine", "Exported.rows", (), "found"),
        ("field", "engine.base", "Base.declared", (), "found"),
        ("field", "engine.base", "Base.state", (), "found"),
        ("field", "engine.base", "Base.only_read", (), "missing"),
        ("global", "engine.base", "OPTIONS", (), "found"),
        ("global", "engine.base", "dataclass", (), "found"),
        ("global", "engine.base", "CHOICES", (), "missing"),
    ],
)
def test_what_is_found(
    root: Path, kind: str, module: str, attribute: str, parameters: tuple[str, ...], state: str
) -> None:
    seam = Seam("test", kind, module, attribute, "", parameters)  # type: ignore[arg-type]
    (status,) = probe_sources(root, [seam])
    assert status.state == state, status.detail
    assert bool(status.detail) == (state != "found")


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


def test_the_command_reports_a_deleted_seam_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a directory and on a wheel; the sources are a copy of what the seams need."""
    root = installed()
    sources = Sources(root)
    for seam in SEAMS:
        source_probe.probe_one(sources, seam)
    copies = {}
    for module in sources.modules():
        text = sources.text(module)
        if text is not None:
            copies[f"{module.replace('.', '/')}/__init__.py"] = text
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in copies.items():
            archive.writestr(name, text)
    assert source_probe.main([str(wheel)]) == 0
    assert f"{len(SEAMS)} of {len(SEAMS)} seams found" in capsys.readouterr().out

    directory = source_probe.unpack(wheel, tmp_path / "copy")
    runner = directory / "vllm/v1/worker/gpu/model_runner/__init__.py"
    runner.write_text(runner.read_text().replace("def add_requests(", "def add_some_requests("))
    assert source_probe.main([str(directory)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("missing")] == [
        ["missing", "v2.add_requests"]
    ]
    assert f"{len(SEAMS) - 1} of {len(SEAMS)} seams found" in lines[-1]
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
    monkeypatch.setattr(source_probe, "probe_sources", lambda *_: [gone])
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

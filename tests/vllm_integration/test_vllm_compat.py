"""Seams: wrapped once, all or none. (One that is missing or changed: `test_vllm_source_probe.py`.)"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_integration.seams import install as compat
from vllm_integration.seams import source_probe
from vllm_integration.seams.table import Group, Seam

MODULE = "engine_of_the_compat_tests"
SOURCE = """
class Runner:
    declared: int
    def __init__(self):
        self.batch = []
    def update(self, output, extra=None):
        return ("updated", output, extra)
    def fits(self, metadata):
        return False
def helper(a, b=1):
    return a + b
"""
SEAMS = (
    Seam(("test",), "wrap", MODULE, "Runner.update", "", ("self", "output")),
    Seam(("test",), "wrap", MODULE, "Runner.fits", "", ("self", "metadata")),
    Seam(("test",), "call", MODULE, "helper", "", ("a",)),
    Seam(("test",), "field", MODULE, "Runner.batch", ""),
    Seam(("test",), "field", MODULE, "Runner.declared", ""),
)


@pytest.fixture
def engine_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """A module on disk that stands for vLLM; the fixture imports it."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(source_probe, "installed_root", lambda: tmp_path)
    source_probe.probe_installed.cache_clear()
    yield lambda: importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)
    source_probe.probe_installed.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A group "test" of `SEAMS` that turns off the plugin, each wrapper noting that it was called."""
    seen: list[str] = []
    monkeypatch.setattr(compat, "_wrappers", {})
    use(monkeypatch, SEAMS)

    def update(original: Callable[..., Any], self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("update")
        return original(self, output, *args, **kwargs)

    def fits(original: Callable[..., Any], self: Any, metadata: Any) -> Any:
        seen.append("fits")
        return original(self, metadata)

    compat.seam("test.update")(update)
    compat.seam("test.fits")(fits)
    return seen


def use(monkeypatch: pytest.MonkeyPatch, seams: Sequence[Seam], costs: str = "") -> None:
    monkeypatch.setattr(compat, "SEAMS", tuple(seams))
    monkeypatch.setitem(compat.GROUPS, "test", Group(costs))


@pytest.mark.usefixtures("strict")
def test_wrapping_twice_wraps_once(engine_module: Callable[[], ModuleType], calls: list[str]) -> None:
    assert compat.install("test") == ""
    assert compat.install("test") == ""
    runner = engine_module().Runner()
    assert runner.update(3, extra=4) == ("updated", 3, 4)
    assert runner.fits(None) is False
    assert calls == ["update", "fits"]
    assert getattr(runner.update, compat.MARK) == "test.update"


@pytest.mark.usefixtures("engine_module")
def test_a_parameter_that_must_be_given_is_to_be_known() -> None:
    seams = [SEAMS[2], replace(SEAMS[2], parameters=())]
    assert [status.state for status in source_probe.probe_sources(seams=seams)] == ["found", "changed"]


@pytest.mark.usefixtures("calls", "strict")
def test_a_wrapper_that_nobody_wrote_undoes_the_others(
    engine_module: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = engine_module()
    before = dict(vars(module.Runner))
    monkeypatch.delitem(compat._wrappers, "test.fits")
    with pytest.raises(KeyError):
        compat.install("test")
    assert dict(vars(module.Runner)) == before


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")


def test_a_module_is_watched_until_it_is_imported(engine_module: Callable[[], ModuleType]) -> None:
    seen: list[str] = []
    compat.when_imported(MODULE, lambda: seen.append(sys.modules[MODULE].Runner.__name__))
    assert seen == []
    engine_module()
    assert seen == ["Runner"]
    compat.when_imported(MODULE, lambda: seen.append("again, at once"))
    assert seen == ["Runner", "again, at once"]


def run(code: str, **environment: str) -> str:
    """A fresh interpreter: what `register()` does depends on what has been imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_integration.plugin import register; register(); register();"
        "print([m for m in ('vllm', 'torch', 'numpy', 'pydantic', 'gpu_align') if m in sys.modules])"
    )
    assert run(code) == "[]"

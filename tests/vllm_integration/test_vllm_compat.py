"""Seams: probed, wrapped once, all or none; a missing one turns the plugin off and vLLM serves on."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_integration import plugin
from vllm_integration.seams import install as compat
from vllm_integration.seams.install import Seam

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
    Seam("update", "v1", "wrap", MODULE, "Runner.update", "", ("self", "output")),
    Seam("fits", "v1", "wrap", MODULE, "Runner.fits", "", ("self", "metadata")),
    Seam("helper", "v1", "call", MODULE, "helper", "", ("a",)),
    Seam("batch", "v1", "field", MODULE, "Runner.batch", ""),
    Seam("declared", "v1", "field", MODULE, "Runner.declared", ""),
)


@pytest.fixture
def engine_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """A module on disk that stands for vLLM; the fixture imports it."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield lambda: importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def wrappers(calls: list[str]) -> dict[str, compat.Wrapper]:
    def wrap(name: str) -> compat.Wrapper:
        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return original(*args, **kwargs)

            return replacement

        return wrapper

    return {"update": wrap("update"), "fits": wrap("fits")}


def test_wrapping_twice_wraps_once(engine_module: Callable[[], ModuleType]) -> None:
    calls: list[str] = []
    compat.install("v1", wrappers(calls), SEAMS)
    compat.install("v1", wrappers(calls), SEAMS)
    runner = engine_module().Runner()
    assert runner.update(3, extra=4) == ("updated", 3, 4)
    assert runner.fits(None) is False
    assert calls == ["update", "fits"]


@pytest.mark.parametrize(
    ("index", "change", "state"),
    [
        (0, {"attribute": "Runner.gone"}, "missing"),
        (0, {"attribute": "Gone.update"}, "missing"),
        (0, {"module": "no_such_module_of_vllm"}, "missing"),
        (0, {"parameters": ("self", "scheduler_output")}, "changed"),
        (0, {"parameters": ("self", "output", "extra", "more")}, "changed"),
        (2, {"parameters": ()}, "changed"),
        (3, {"attribute": "Runner.rows"}, "missing"),
    ],
)
def test_one_bad_seam_leaves_everything_as_it_was(
    engine_module: Callable[[], ModuleType], index: int, change: dict[str, Any], state: str
) -> None:
    module = engine_module()
    before = dict(vars(module.Runner))
    seams = list(SEAMS)
    seams[index] = replace(seams[index], **change)
    assert [status.state for status in compat.probe(seams)].count(state) == 1
    with pytest.raises(compat.SeamError, match=seams[index].attribute):
        compat.install("v1", wrappers([]), seams)
    assert dict(vars(module.Runner)) == before


def test_a_wrapper_that_fails_undoes_the_others(engine_module: Callable[[], ModuleType]) -> None:
    module = engine_module()
    before = dict(vars(module.Runner))
    with pytest.raises(KeyError):
        compat.install("v1", {"update": wrappers([])["update"]}, SEAMS)
    assert dict(vars(module.Runner)) == before


@pytest.mark.usefixtures("plugin_on")
def test_a_missing_seam_is_one_error_and_the_plugin_off(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)
    broken = replace(SEAMS[0], module="no_such_module_of_vllm")
    monkeypatch.setattr(compat.install, "__defaults__", ((broken,),))
    assert plugin.guarded_install("v1", {}) is False
    assert plugin.guarded_install("v1", {}) is False
    assert compat.off_reason() is not None
    (line,) = plugin_log
    assert "gpu_align is off" in line
    assert "no_such_module_of_vllm" in line


@pytest.mark.usefixtures("plugin_on")
def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    broken = replace(SEAMS[0], module="no_such_module_of_vllm")
    monkeypatch.setattr(compat.install, "__defaults__", ((broken,),))
    with pytest.raises(compat.SeamError, match="no_such_module_of_vllm"):
        plugin.guarded_install("v1", {})
    assert compat.off_reason() is None


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


def test_every_private_name_is_in_one_group_and_explained() -> None:
    names = [seam.name for seam in compat.SEAMS]
    assert len(set(names)) == len(names)
    for seam in compat.SEAMS:
        assert seam.purpose
        assert seam.tested == ("0.32.0",)
        assert seam.kind in ("field", "global") or seam.parameters

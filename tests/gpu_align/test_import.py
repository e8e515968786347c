"""What the library may touch: torch, triton and numpy; no engine, no tokenizer, and Numba only on the CPU."""

import importlib
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from gpu_align import RecipePack
from gpu_align.recipes.registry import Registry

PACKAGE = Path(__file__).parents[2] / "gpu_align"


MODULES = (
    "gpu_align",
    "gpu_align.policies",
    "gpu_align.predictors",
    "gpu_align.ops.lcs",
    "gpu_align.ops.choose.survival",
)
REFUSED = (
    "vllm", "transformers", "vllm_integration", "typer", "rich", "rapidfuzz", "numba", "mistral_common", "yaml",
)  # fmt: skip


def test_importing_needs_the_core_dependencies_only():
    """Nor does it try Numba, which takes longer to import than the library: a drafter on the CPU does that."""
    imports = "\n".join(f"from {module} import *" for module in MODULES)
    tried = f"import sys\n{imports}\nassert 'numba' not in sys.modules"
    refused = f"import sys\nfor name in {REFUSED}: sys.modules[name] = None\n{imports}\n"
    refused += f"loaded = [n for n in {REFUSED} if sys.modules.get(n)]\nassert not loaded, loaded"
    for code in (tried, refused):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("draft", "layout", ["Draft", "Source", "allocate_draft"]),
        ("draft", "choose.survival", ["SurvivalTables"]),
        ("state", "layout", ["StepSettings", "StepState", "allocate_state"]),
        ("suffix_match", "index", ["build_index"]),
    ],
)
def test_old_places_hold_the_same_names(old, new, names):
    before, now = (importlib.import_module(f"gpu_align.ops.{place}") for place in (old, new))
    assert [getattr(before, name) is getattr(now, name) for name in names] == [True] * len(names)


def test_data_files_are_packaged():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["gpu_align"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    read = {*PACKAGE.rglob("*.json"), PACKAGE / "py.typed"}
    assert read <= packaged
    assert any(path.name == "survival.json" for path in read)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("learn", lambda p: p.learn([("a", "x y " * 9)])),
        (
            "observe",
            lambda p: p.observe([], lambda texts: [[1] for _ in texts], lambda ids: ["a" for _ in ids]),
        ),
        ("merge", lambda p: {"a", "b"} <= set(p.merge(RecipePack({"a": 1}, [])).words) or None),
        ("shapes_only", lambda p: p.shapes_only()),
        ("update_index", lambda p: Registry(mkdtemp()).update()),
        (
            "report",
            lambda p: p.report([], lambda texts: [[1] for _ in texts], lambda ids: ["a" for _ in ids]),
        ),
    ],
)
def test_methods_that_became_functions_of_the_tools_work_and_warn(name, call):
    with pytest.warns(DeprecationWarning, match=f"use gpu_align.recipes.{name}"):
        assert call(RecipePack({"b": 1}, [])) is not None


def test_the_core_drafts_without_the_tools():
    code = """
import sys
sys.modules["gpu_align.tools"] = None
from gpu_align import RecipePack
from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorOptions
RecipePack.load()
drafter = PredictedOutputTokenPredictor([5, 6, 7])
drafter.reset([1], PredictorOptions(num_draft_tokens=2))
drafter.push_tokens([5])
assert drafter.predict_tokens() == [6, 7]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)

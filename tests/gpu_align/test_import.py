"""What the library may touch: torch, triton and numpy; no engine, no tokenizer, Numba only on the CPU.

Where Triton has no wheels (macOS, Windows), all but the kernels is imported and runs, on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_align import RecipePack

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


ROOT = Path(__file__).parents[2]

#: In one process, which prints a line for each part.
CODE = """
import importlib, json, os, pkgutil, sys, torch
import gpu_align
from gpu_align import Drafter
from gpu_align.tools import main

imported = refused = 0
for module in pkgutil.walk_packages(gpu_align.__path__, "gpu_align."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        imported += 1
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] == "triton", (module.name, error)
        source = open(module.module_finder.find_spec(module.name).origin, encoding="utf-8").read()
        assert "@triton.jit" in source or "tl.constexpr" in source, module.name
        refused += 1
assert imported > 4 * refused > 0

sizes = dict(max_slots=2, max_context_len=64, max_prediction_len=64, vocab_size=100, num_draft_tokens=4)
drafter = Drafter(**sizes, device="cpu")
drafter.add(1, prediction=[12, 13, 14, 15, 16, 17], prompt_len=0)
token_ids, total_len = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
token_ids[1, :2] = torch.tensor([12, 13])
draft = drafter.propose(token_ids, total_len, torch.tensor([1]), torch.tensor([2], dtype=torch.int32))
print(draft.token_ids.tolist(), draft.length.tolist())

sys.argv = ["gpu-align", "doctor", "--json", "doctor.json"]
main()
findings = {each["what"]: each["ok"] for each in json.load(open("doctor.json"))["findings"]}
print(findings["triton"], findings["drafting on cpu"])

os.environ["TRITON_INTERPRET"] = "1"
try:
    Drafter(**sizes, device="cpu", backend="triton")
except ImportError as error:
    print(error)
"""


def test_all_but_kernels_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "[[14, 15, 16, 17]] [4]\n" in done.stdout
    assert "None True\n" in done.stdout
    assert (
        "backend: expected Triton, which has wheels for Linux on x86_64 and aarch64, found none"
        in done.stdout
    )

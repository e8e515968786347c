"""What the library may touch: torch, triton and numpy; no engine, no tokenizer, Numba only on the CPU.

Where Triton has no wheels (macOS, Windows), all but the kernels is imported and runs, on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.modules import ROOT, python

PACKAGE = ROOT / "gpu_align"
#: The packages that are loaded, but for Python's own and those loaded so far.
LOADED = """
import sys
def packages(): return {name.partition(".")[0] for name in sys.modules}
known = packages() | sys.stdlib_module_names
"""


def test_importing_needs_the_core_dependencies_only():
    """Nor does it try Numba, which takes longer to import than the library: a drafter on the CPU does that."""
    code = """
from gpu_align import *
from gpu_align.tools.policies import *
from gpu_align.predictors import *
import gpu_align.drafter.survival, gpu_align.ops.lcs
print(packages() - known)
"""
    assert python(f"import numpy, torch, triton\n{LOADED}{code}") == ("{'gpu_align'}", "")


@pytest.mark.parametrize(
    ("module", "unused"),
    [("gpu_align.tools.policies", {"torch"}), ("gpu_align.tools.cli", {"torch", "numpy", "yaml"})],
)
def test_importing_is_quick(module, unused):
    """`--help` and completion answer at once."""
    assert python(f"{LOADED}import {module}\nprint(packages() & {unused})") == ("set()", "")


def test_data_files_are_packaged():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["gpu_align"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    read = {*PACKAGE.rglob("*.json"), PACKAGE / "py.typed"}
    assert read <= packaged
    assert any(path.name == "survival.json" for path in read)


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
drafter.token_ids[1, :2], drafter.total_len[1] = torch.tensor([12, 13]), 2
draft = drafter.propose(torch.tensor([1]), torch.tensor([2], dtype=torch.int32))
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
    told, _ = python(CODE, folder=tmp_path, TRITON_INTERPRET="0")
    assert "[[14, 15, 16, 17]] [4]\n" in told
    assert "None True\n" in told
    assert "backend: expected Triton, which has wheels for Linux on x86_64 and aarch64, found none" in told

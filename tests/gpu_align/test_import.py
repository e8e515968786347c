"""What the library may touch: torch, triton and numpy; no engine, no tokenizer, and Numba only on the CPU."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpu_align"


@pytest.mark.parametrize(
    "module",
    ["gpu_align", "gpu_align.policies", "gpu_align.predictors", "gpu_align.ops.lcs", "gpu_align.ops.draft"],
)
def test_importing_needs_the_core_dependencies_only(module):
    refused = [
        "vllm",
        "transformers",
        "vllm_integration",
        "typer",
        "rich",
        "rapidfuzz",
        "numba",
        "mistral_common",
        "yaml",
    ]
    code = (
        f"import sys\nfor name in {refused}: sys.modules[name] = None\n"
        f"from {module} import *\nloaded = [n for n in {refused} if sys.modules.get(n)]\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_importing_does_not_try_numba():
    """Which takes longer to import than the library: a drafter on the CPU does it when it is built."""
    code = (
        "from gpu_align import *; import sys, gpu_align.policies, gpu_align.ops.step; "
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_library_never_imports_vllm():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "vllm" for name in names), f"{path}:{node.lineno}"


def test_data_files_are_packaged():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["gpu_align"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    read = {*PACKAGE.rglob("*.json"), PACKAGE / "py.typed"}
    assert read <= packaged
    assert any(path.name == "survival.json" for path in read)

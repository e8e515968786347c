"""Device functions take what belongs together as one named tuple: few arguments, few results."""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "gpu_align" / "ops" / "kernels"
MAX_ARGUMENTS, MAX_RESULTS = 10, 6


def too_large(source: str) -> list[str]:
    """Device functions with more arguments or results than allowed; kernels, whose entries are flat, aside."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.endswith("_kernel"):
            continue
        results = [
            len(part.value.elts)
            for part in ast.walk(node)
            if isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple)
        ]
        if len(node.args.args) > MAX_ARGUMENTS or max(results, default=1) > MAX_RESULTS:
            found.append(node.name)
    return found


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_device_functions_are_small_in_their_signatures(path: Path) -> None:
    assert too_large(path.read_text()) == []


def test_one_that_is_too_large_is_found() -> None:
    arguments = ", ".join(f"a{i}" for i in range(MAX_ARGUMENTS + 1))
    results = ", ".join("a0" for _ in range(MAX_RESULTS + 1))
    source = f"def _f({arguments}):\n    return a0\n\ndef _g(a0):\n    return {results}\n"
    assert too_large(source) == ["_f", "_g"]
    assert too_large(f"def _entry_kernel({arguments}):\n    pass\n") == []

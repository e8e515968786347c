"""Kernel and reference mirror each other: what an operation offers the others has one name and one contract."""

import ast
from pathlib import Path

import pytest

from tests.modules import python

OPS = Path(__file__).parents[3] / "gpu_align" / "ops"
FOLDERS = sorted(path.parent.name for path in OPS.glob("*/kernel.py"))

#: What only one side offers, and why. Beside these: entries, a kernel ``x_kernel`` of which ``x_reference`` has
#: the loop; what loads and allocates; classes.
ALONE = {
    "align": {
        "match_length": "a kernel compares all lanes at once",
        "have_keys": "`has_key` of many positions and all edits",
        "has_key": "`have_keys`",
    },
    "choose": {"worth": "of one candidate; a kernel weighs all lanes"},
}
#: Parameters that one side has: constexprs, the lanes of a draft, where a text ends, and where a reference writes.
OWN = {"K", "BLOCK_K", "HAS_SHAPES", "o_k", "num_output", "space", "margin", "class_id", "draft"}


def functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def entries(name: str) -> bool:
    return name.endswith(("_kernel", "_reference")) or name.startswith(("load_", "allocate_"))


def parameters(function: ast.FunctionDef) -> list[str]:
    """Without what only says what a value is: `m_token` and `is_token`."""
    names = [argument.arg for argument in function.args.args if argument.arg not in OWN]
    return [
        name.removeprefix("m_").removeprefix("b_").removeprefix("is_").removeprefix("p_") for name in names
    ]


def faults(kernel: str, reference: str, alone: set[str]) -> list[str]:
    """Public functions that only one side has and that are not `alone`, and shared names with other parameters."""
    k, r = functions(kernel), functions(reference)
    offered = {name for name in {*k} ^ {*r} if not name.startswith("_") and not entries(name)}
    found = [f"{name}: no twin" for name in sorted(offered - alone)]
    found += [f"{name}: is in neither, or in both" for name in sorted(alone - offered)]
    for name in sorted(name for name in {*k} & {*r} if not entries(name)):
        if parameters(k[name]) != parameters(r[name]):
            found.append(f"{name}: {parameters(k[name])} and {parameters(r[name])}")
    return found


def nested_targets(source: str) -> list[int]:
    """Lines that assign to a tuple in a tuple."""
    tuples = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Tuple))
    stores = (node for node in tuples if isinstance(node.ctx, ast.Store))
    return [node.lineno for node in stores if any(isinstance(each, ast.Tuple) for each in node.elts)]


def test_a_kernel_assigns_to_flat_tuples() -> None:
    """Triton before 3.9 compiles no others."""
    assert nested_targets("a, b = c\nd, (e, f) = g, h") == [2]
    found = {name: nested_targets((OPS / name / "kernel.py").read_text("utf-8")) for name in FOLDERS}
    assert not any(found.values()), found


@pytest.mark.parametrize("folder", FOLDERS)
def test_kernel_and_reference_offer_the_same(folder: str) -> None:
    kernel, reference = ((OPS / folder / f"{side}.py").read_text("utf-8") for side in ("kernel", "reference"))
    assert faults(kernel, reference, {*ALONE.get(folder, {})}) == []


#: Device functions take what belongs together as one named tuple. Kernels, whose entries are flat, aside.
MAX_ARGUMENTS, MAX_RESULTS = 10, 6


@pytest.mark.parametrize("path", sorted(OPS.glob("*/kernel.py")), ids=lambda path: path.parent.name)
def test_device_functions_are_small_in_their_signatures(path: Path) -> None:
    for node in functions(path.read_text(encoding="utf-8")).values():
        if not node.name.endswith("_kernel"):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            results = [len(value.elts) for value in returned if isinstance(value, ast.Tuple)]
            assert len(node.args.args) <= MAX_ARGUMENTS, node.name
            assert max(results, default=1) <= MAX_RESULTS, node.name


def test_no_number_stands_for_two_things() -> None:
    """Kernels take numbers by name, wherever they are defined: a name is defined once."""
    owners: dict[str, str] = {}
    for path in [OPS / "layout.py", *(OPS / folder / "__init__.py" for folder in FOLDERS)]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for name in [
                part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            ]:
                assert owners.setdefault(name, str(path)) == str(path), name


def test_a_changed_number_makes_another_binary() -> None:
    """Of a kernel, of a device function of another operation, and of a rule that names a lower operation's."""
    code = """
import importlib, sys
def key(operation, **numbers):
    for name in [name for name in sys.modules if name.startswith("gpu_align.ops")]:
        del sys.modules[name]
    vars(importlib.import_module(f"gpu_align.ops.{operation}")).update(numbers)
    return importlib.import_module("gpu_align.ops.step.kernel").step_kernel.cache_key
unchanged = key("match")
changed = {key("layout", MAX_EDITS=8), key("align", WINDOW=14), key("match", MAX_MATCH=32)}
print(unchanged == key("match"), len({*changed, unchanged}))
"""
    assert python(code, TRITON_INTERPRET="0")[0] == "True 4"

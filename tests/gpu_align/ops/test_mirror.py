"""Kernel and reference mirror each other: the same functions under the same names, in the same order."""

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).parents[3] / "gpu_align" / "ops"
FILES = sorted(path.name for path in (OPS / "reference").glob("*.py") if path.name != "__init__.py")

#: Functions and classes without a twin, by file, and why. Beside these: what loads and stores registers
#: (``load_…``, ``store_…``), and the entries, a kernel ``x_kernel`` of which ``x_reference`` has the loop.
ALONE = {
    "draft.py": {
        "TablePointers": "the reference has the tables as NumPy sees them",
        "at_lane": "the reference indexes",
        "bucket_number": "the reference has a table",
        "allocate_candidates": "a kernel has registers",
    },
    "draft_budget.py": {"count_with": "a search of a kernel; the reference sorts"},
    "lcs.py": {
        "row_offsets": "bits of a kernel's words",
        "four_bits": "bits of a kernel's words",
        "row_words": "bits of a kernel's words",
        "row_lengths": "bits of a kernel's words",
        "match_bits": "bits of a kernel's words",
        "first_slot": "a hash table of a kernel",
        "count_ones": "Python has `bit_count`",
        "holds": "what a kernel compares with all words at once",
        "requests": "a kernel has a program a request",
        "ones": "a row as one integer of Python",
        "fold": "a row as one integer of Python",
        "table": "the history of a wavefront as one table",
        "walk": "`lcs_walk_kernel`",
        "lcs_walk_kernel": "`walk`",
        "lcs_code_kernel": "numbers the tokens for `lcs_wavefront_kernel`",
        "lcs_wavefront_kernel": "`fold` and `table`",
        "lcs_length_reference": "a launch of the three kernels",
        "lcs_prefix_row_reference": "a launch of the three kernels",
        "lcs_edit_script_reference": "a launch of the three kernels",
    },
    "realign.py": {
        "Edits": "in the reference a row of the state",
        "ends_like": "`match_length` over all lanes at once",
        "at_cursor": "the reference changes rows in place",
    },
    "recipe_lookup.py": {
        "RecipePointers": "the reference has the table as NumPy sees it",
        "Lookup": "a kernel loads before it looks",
        "literal_keys": "all keys of `find_literal` at once",
        "begin_lookup": "the loads of `find_literal`",
        "shape_items": "all items of `find_shape` at once",
        "then": "all keys of `find_shape` as a scan",
        "shape_keys": "all keys of `find_shape` at once",
        "pack_of": "`look_up` over all ways at once",
        "find_literal": "`literal_keys` and `begin_lookup`",
        "look_up": "`pack_of`",
    },
    "step.py": {
        "begin_context": "`clear_context` and the first part of `insert_context`",
        "remainder": "faster than a division",
        "read_tokens": "the end of `write_draft`",
        "read_confidence": "the end of `step`",
        "StepReference": "the launcher is `gpu_align.ops.step.StepLaunch`",
        "is_valid_batch": "a kernel clamps",
    },
    "suffix_match.py": {
        "Bucket": "two results of one load",
        "count_before": "NumPy has `searchsorted`",
        "common_run": "a part of `match_length`",
        "insert_block": "`insert_context` over a block",
        "insert_blocks": "the first part of `insert_context`",
        "insert_rest": "the rest of `insert_context`, behind what takes longer",
        "insert_context": "the three before",
        "shift_of": "the kernel's launcher passes it",
        "enter": "a kernel takes the largest keys in turn",
        "index_keys_kernel": "`gpu_align.ops.suffix_match.build_index` has the loop in NumPy",
        "index_kernel": "`gpu_align.ops.suffix_match.build_index` has the loop in NumPy",
    },
}


#: Device functions take what belongs together as one named tuple. Kernels, whose entries are flat, aside.
MAX_ARGUMENTS, MAX_RESULTS = 10, 6


@pytest.mark.parametrize("path", sorted((OPS / "kernels").glob("*.py")), ids=lambda path: path.stem)
def test_device_functions_are_small_in_their_signatures(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.endswith("_kernel"):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            results = [len(value.elts) for value in returned if isinstance(value, ast.Tuple)]
            assert len(node.args.args) <= MAX_ARGUMENTS, node.name
            assert max(results, default=1) <= MAX_RESULTS, node.name


def names(source: str) -> list[str]:
    """Functions and classes of a module, in order and `bare`."""
    nodes = ast.parse(source).body
    return [bare(node.name) for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def bare(name: str) -> str:
    """A name without what only says on which side it is, `Candidates` like `CandidateArrays`."""
    for suffix in ("_kernel", "_reference", "Arrays", "Pointers", "s"):
        name = name.removesuffix(suffix)
    return name.lstrip("_")


def faults(kernels: str, reference: str, alone: set[str]) -> list[str]:
    """What has no twin and is not `alone`, what is `alone` and has one, and twins in another order."""
    k, r = names(kernels), names(reference)
    skipped = {name for name in k if name.startswith(("load_", "store_"))} | {"load_request"}
    known = {bare(name) for name in alone}
    twins = [name for name in k if name in r]
    found = [f"{name}: no twin" for name in sorted({*k} ^ {*r}) if name not in skipped | known]
    found += [f"{name}: has a twin" for name in sorted(known & {*twins})]
    found += [f"{name}: is in neither" for name in sorted(known - {*k} - {*r})]
    if twins != [name for name in r if name in k]:
        found.append(f"order: expected {twins}")
    return found


@pytest.mark.parametrize("name", FILES)
def test_each_function_has_its_twin(name: str) -> None:
    kernels, reference = (
        (OPS / side / name).read_text(encoding="utf-8") for side in ("kernels", "reference")
    )
    assert faults(kernels, reference, set(ALONE.get(name, {}))) == []


@pytest.mark.parametrize(
    ("kernels", "reference", "expected"),
    [
        ("def f(): pass\ndef g(): pass", "def f(): pass", ["g: no twin"]),
        ("def f(): pass", "def f(): pass\ndef g(): pass", ["g: no twin"]),
        ("def f(): pass\ndef g(): pass", "def g(): pass\ndef f(): pass", ["order: expected ['f', 'g']"]),
        ("def a(): pass", "def a(): pass", ["a: has a twin"]),
        ("def f_kernel(): pass\nclass X: pass\ndef a(): pass", "def f_reference(): pass\nclass XArrays: pass", []),
        ("", "", ["a: is in neither"]),
    ],
)  # fmt: skip
def test_what_has_no_twin_is_named(kernels: str, reference: str, expected: list[str]) -> None:
    alone = {"a"} if expected in ([], ["a: has a twin"], ["a: is in neither"]) else set()
    assert faults(kernels, reference, alone) == expected

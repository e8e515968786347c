"""The drafter's mechanisms, what takes their place without them, and how many lines of code each takes.

A process that measures what the drafter is without one of them calls `install` before it imports ``gpu_align``;
importing this imports nothing of the library. Each name is replaced at the moment its module binds it, by an
assignment, a ``def`` or an ``import``, so that everything that the module derives from it is derived from the new
value. The library knows nothing of it.

Numba's disk cache goes by the library's sources and would return code of another process with other constants:
such a process needs an empty ``NUMBA_CACHE_DIR`` of its own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
#: Where lines are counted: what drafts; all that is installed; and what tests and measures it.
DRAFTER = ("gpu_align/ops", "gpu_align/recipes", "gpu_align/drafter.py", "gpu_align/config.py")
SCOPES = {
    "drafter": DRAFTER,
    "installed": ("gpu_align", "vllm_integration"),
    "all": ("gpu_align", "vllm_integration", "tests", "benchmarks"),
}
#: The same for names that mean something else outside of the drafter and the tests of its operations.
LOCAL_SCOPES = {"drafter": DRAFTER, "installed": DRAFTER, "all": (*DRAFTER, "tests/gpu_align/ops")}

_OPS = "gpu_align.ops"
_RULES, _ALIGN, _MATCH = f"{_OPS}.rules", f"{_OPS}.align", f"{_OPS}.match"
_CHOOSE, _COMPOSE, _LAYOUT = f"{_OPS}.choose", f"{_OPS}.compose", f"{_OPS}.layout"
#: More tokens than any output has.
_NEVER = 1 << 30


#: Module → name → what it is instead. A function is compiled as the module compiles its own, if it does.
Overrides = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Mechanism:
    """One thing that the drafter does, and the drafter without it: what it does instead."""

    instead: str
    #: Of the library's names, in the process that learns and replays.
    overrides: Overrides = field(default_factory=dict)
    #: Of `DrafterConfig`, when learning and when drafting.
    config: Mapping[str, Any] = field(default_factory=dict)
    recipes: bool = True
    #: A regular expression of what only this mechanism has a name for; "" where it is a number alone.
    names: str = ""
    #: Whether these names mean something else outside of the drafter and the tests of its operations.
    local: bool = False


#: The drafter as it is.
BASELINE = "everything"
MECHANISMS: dict[str, Mechanism] = {
    BASELINE: Mechanism("the drafter as it is"),
    "own context": Mechanism(
        "candidates in the prediction alone",
        config={"use_context": False},
        names=r"context_index|insert_context|uses?_context|in_context|CONTEXT_START|FIRST_CONTEXT"
        r"|min_context_match|(?<![A-Z]_)WAYS",
    ),
    "global resync": Mechanism(
        "in sync again near the anchor only", {_ALIGN: {"GLOBAL_EVERY": _NEVER}}, names="GLOBAL_"
    ),
    "global resync at every 8th token": Mechanism("at every token", {_ALIGN: {"GLOBAL_EVERY": 1}}),
    "local resync": Mechanism(
        "in sync again by the global resync only",
        {_ALIGN: {"LOCAL_MATCH": _NEVER}},
        names="LOCAL_",
    ),
    "margin": Mechanism(
        "one bucket for all margins",
        {_CHOOSE: {"MARGIN_EDGES": ()}},
        names=r"margin|MARGIN|runner_up|leader|reach\b",
    ),
    "four best matches": Mechanism(
        "the best one of each source",
        {_MATCH: {"NUM_MATCHES": 1}},
        names="NUM_MATCHES|enter|best_matches",
        local=True,
    ),
    "alignment buckets": Mechanism(
        "one bucket for all of the prediction",
        {_RULES: {"alignment_bucket": lambda ahead, deficit: 0}},
        names="alignment_bucket|deficit|DEFICIT|ALIGNMENT_|NUM_ALIGNMENTS",
    ),
    "adherence": Mechanism(
        "one bucket, and no match is ignored",
        {_RULES: {"adherence_of": lambda num_in_sync, num_output: 2}},  # `ADHERENCE_CLOSE`
        names="adherence|ADHERENCE|LOST_SHARE|LOOSE_SHARE|num_in_sync|NUM_IN_SYNC|lost_classes",
    ),
    "min_survival_lost": Mechanism(
        "`min_survival` for all drafts", config={"min_survival_lost": 0.0}, names="min_survival_lost|lost_classes"
    ),
    "edit replay": Mechanism(
        "no edit is replayed",
        {_COMPOSE: {"MAX_REPLAYS": 0}},
        names="edit(?!_script)|EDIT|Edit|REPLAY|replay|AT_START|DIVERGED_AT|diverged_at|has_key|common_end",
        local=True,
    ),
    "trust in edits": Mechanism(
        "any remembered edit is replayed",
        {f"{_COMPOSE}.reference": {"_trusts_edits": lambda edits: True}},
        names="trusts_edits|SEEN_BEFORE|seen_before|trusted",
        local=True,
    ),
    "LCS row": Mechanism(
        "after a divergence the cursor stays at the anchor",
        {f"{_ALIGN}.reference": {"extend_rows": lambda row, prediction, anchor, output, begin: row}},
        names=r"extend_row|lcs_row|cursor_of|score_at|count_ones|MATCH_WEIGHT|holds|WINDOW|EVERY_BIT|ROW|half_window",
        local=True,
    ),
    "LCS window of 62": Mechanism("of 31 tokens", {_LAYOUT: {"WINDOW": 31}}),
    "cursor window": Mechanism(
        "the cursor alone",
        {_MATCH: {"CURSOR_AHEAD": 0}},
        names="CURSOR_AHEAD",
    ),
    "exact prefix": Mechanism(
        "an exact prefix is a match like any other",
        {_RULES: {"is_exact_prefix": lambda alignment, num_output: False}},
        names="exact_prefix|EXACT_PREFIX",
    ),
    "indentation shift": Mechanism(
        "no draft is moved",
        {f"{_COMPOSE}.reference": {"indentation_shift": lambda request, recipes, choice: 0}},
        names="indent|line_layout|shifted|LINE_END|NUM_RUNS",
    ),
    "repetition": Mechanism(
        "a draft ends with the context",
        {_RULES: {"wraps_around": lambda matched, period: False}},
        names=r"wraps_around|period",
    ),
    "recipes": Mechanism(
        "no recipes, no draft is moved",
        recipes=False,
        names="recipe|RECIPE|Recipe|[Mm]isses|miss_log|packs?[.]py",
    ),
}  # fmt: skip


def without(name: str) -> Mechanism:
    """The drafter without the mechanism of this name, or without several joined by ``+``."""
    parts = [MECHANISMS[part] for part in name.split("+")]
    overrides: dict[str, dict[str, Any]] = {}
    for part in parts:
        for module, values in part.overrides.items():
            overrides.setdefault(module, {}).update(values)
    return Mechanism(
        "; ".join(part.instead for part in parts),
        overrides,
        {key: value for part in parts for key, value in part.config.items()},
        all(part.recipes for part in parts),
        "|".join(part.names for part in parts if part.names),
        any(part.local for part in parts),
    )


def count_lines(mechanism: Mechanism) -> dict[str, int]:
    """Code lines that go with a mechanism in each of `SCOPES`: kernels, references, host code, commands, tests.

    ::

        every line of a file, a function or a class whose name contains one of the mechanism's names,
        and of all other code each line that contains one of them

    Blank lines, comments and docstrings are no code. A mechanism without names has 0.
    """
    names, counts = re.compile(mechanism.names or "(?!)"), {}
    for scope, parts in (LOCAL_SCOPES if mechanism.local else SCOPES).items():
        paths = {path for part in parts for path in _python_files(ROOT / part)}
        counts[scope] = sum(
            _count(
                path.read_text(encoding="utf-8"), names, whole=bool(names.search(str(path.relative_to(ROOT))))
            )
            for path in paths
        )
    return counts


def _python_files(path: Path) -> Iterable[Path]:
    return path.rglob("*.py") if path.is_dir() else [path]


def _count(source: str, names: re.Pattern[str], whole: bool = False) -> int:
    code, definitions = _parsed(source)
    inside = [lines for name, lines in definitions if names.search(name)]
    return sum(
        whole or names.search(line) is not None or any(number in lines for lines in inside)
        for number, line in code
    )


@cache
def _parsed(source: str) -> tuple[list[tuple[int, str]], list[tuple[str, range]]]:
    """The lines of code with their numbers, and those of functions and classes by name."""
    docstrings: set[int] = set()
    definitions = []
    for node in ast.walk(ast.parse(source)):
        lines = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions.append((node.name, lines))
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings |= {*lines}
    stripped = (
        (number, line.partition("#")[0].strip()) for number, line in enumerate(source.splitlines(), 1)
    )
    return [(number, line) for number, line in stripped if line and number not in docstrings], definitions


def install(overrides: Overrides) -> None:
    """Override names of modules that are imported from now on."""
    if imported := sorted(overrides.keys() & sys.modules.keys()):
        raise ValueError(
            f"overrides: expected modules that are not imported yet, found {', '.join(imported)}"
        )
    sys.meta_path.insert(0, _Finder(overrides))


class _Finder(MetaPathFinder):
    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._overrides:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._overrides[fullname])
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, overrides: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._overrides = overrides

    def exec_module(self, module: ModuleType) -> None:
        names = _Namespace(module.__dict__, self._overrides)
        code = self.get_code(module.__name__)
        assert code is not None
        exec(code, module.__dict__, names)
        if unbound := sorted(names.left):
            raise ValueError(
                f"{module.__name__}: expected the names {', '.join(unbound)}, found none of them"
            )


class _Namespace(dict[str, Any]):
    """A module's names while its file is executed. What is stored under an overridden name is the override."""

    def __init__(self, names: dict[str, Any], overrides: Mapping[str, Any]) -> None:
        super().__init__()
        self._names = names
        self._overrides = overrides
        self.left = set(overrides)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._overrides:
            self.left.discard(name)
            value = self._overrides[name]
            if isinstance(value, FunctionType) and "njit" in self._names:
                value = self._names["njit"](value)
        self._names[name] = value  # where it is looked up, too: nothing is held here

    def __delitem__(self, name: str) -> None:
        del self._names[name]

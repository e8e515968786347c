"""The gain of each mechanism of the drafter: ``python -m benchmarks.quality.ablation``.

Takes one mechanism away at a time, learns the survival table again without it on the tuning split, and replays the
test split at K = 64. Compares tokens a step at equal rejections: the curve through the settings without the
mechanism, read at the rejections per accepted draft that the whole drafter has by default. Nothing of it is random
or depends on time.

Each row is measured in a process of its own, which replaces constants and functions of the library: each name when
its module binds it, so that what the module derives from it changes, too. The library has no switches for it.
Importing this module imports nothing of the library.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_OPS = "gpu_align.ops"
_ALIGN, _MATCH = f"{_OPS}.align", f"{_OPS}.match"
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


#: The drafter as it is.
BASELINE = "everything"
MECHANISMS: dict[str, Mechanism] = {
    BASELINE: Mechanism("the drafter as it is"),
    "own context": Mechanism("candidates in the prediction alone", config={"use_context": False}),
    "global resync": Mechanism("in sync again near the anchor only", {_ALIGN: {"GLOBAL_EVERY": _NEVER}}),
    "global resync at every 8th token": Mechanism("at every token", {_ALIGN: {"GLOBAL_EVERY": 1}}),
    "local resync": Mechanism("in sync again by the global resync only", {_ALIGN: {"LOCAL_MATCH": _NEVER}}),
    "margin": Mechanism("one bucket for all margins", {_CHOOSE: {"MARGIN_EDGES": ()}}),
    "four best matches": Mechanism("the best one of each source", {_MATCH: {"NUM_MATCHES": 1}}),
    "alignment buckets": Mechanism(
        "one bucket for all of the prediction", {_CHOOSE: {"alignment_bucket": lambda ahead, deficit: 0}}
    ),
    "adherence": Mechanism(
        "one bucket, and no match is ignored",
        {_CHOOSE: {"adherence_of": lambda num_in_sync, num_output: 2}},  # `ADHERENCE_CLOSE`
    ),
    "min_survival_lost": Mechanism("`min_survival` for all drafts", config={"min_survival_lost": 0.0}),
    "edit replay": Mechanism("no edit is replayed", {_COMPOSE: {"MAX_REPLAYS": 0}}),
    "LCS row": Mechanism(
        "after a divergence the cursor stays at the anchor",
        {f"{_ALIGN}.reference": {"extend_rows": lambda row, prediction, anchor, output, begin: row}},
    ),
    "LCS window of 62": Mechanism("of 31 tokens", {_LAYOUT: {"WINDOW": 31}}),
    "cursor window": Mechanism("the cursor alone", {_MATCH: {"CURSOR_AHEAD": 0}}),
    "exact prefix": Mechanism(
        "an exact prefix is a match like any other",
        {_CHOOSE: {"is_exact_prefix": lambda alignment, num_output: False}},
    ),
    "indentation shift": Mechanism(
        "no draft is moved",
        {f"{_COMPOSE}.reference": {"indentation_shift": lambda request, recipes, choice: 0}},
    ),
    "recipes": Mechanism("no recipes, no draft is moved", recipes=False),
}


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
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._overrides else None
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
        if names.left:
            raise ValueError(
                f"{module.__name__}: expected the names {sorted(names.left)}, found none of them"
            )


class _Namespace(dict[str, Any]):
    """A module's names while its file is executed. What is stored under an overridden name is the override."""

    def __init__(self, names: dict[str, Any], overrides: Mapping[str, Any]) -> None:
        super().__init__()
        self._names, self._overrides, self.left = names, overrides, set(overrides)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._overrides:
            self.left.discard(name)
            value = self._overrides[name]
            if isinstance(value, FunctionType) and "njit" in self._names:
                value = self._names["njit"](value)
        self._names[name] = value  # where it is looked up, too: nothing is held here

    def __delitem__(self, name: str) -> None:
        del self._names[name]


#: Records over which tokens a step are compared.
GROUPS = ("test", "five")
#: What was measured without one mechanism, as the JSON file has it.
Row = dict[str, Any]


def settings() -> list[dict[str, Any]]:
    """The default and the settings around it: a curve is read at the default's rejections."""
    from gpu_align.simulate import SWEEP

    return [{}, *(s for s in SWEEP if 2 <= s["length_factor"] <= 12 and s["min_survival"] <= 0.2)]


def change(row: Row, baseline: Row, group: str) -> float | None:
    """By what part tokens a step change at the rejections per accepted draft of the baseline's default.

    None where no setting without the mechanism rejects as little.
    """
    from benchmarks.quality.checks import curve, height, point
    from benchmarks.quality.runs import Counts

    found = [[point(Counts(**each[group])) for each in r["settings"]] for r in (row, baseline)]
    reached, present = (height(curve(points), found[1][0].rejected_per_accepted) for points in found)
    return None if reached is None or present is None else round(reached / present - 1, 5)


#: The process of a row: overrides are installed before anything of the library is imported.
_PROCESS = """
import json, sys
from benchmarks.quality import ablation
job = json.load(sys.stdin)
ablation.install(ablation.MECHANISMS[job["mechanism"]].overrides)
print(json.dumps(ablation.measured(job)))
"""


def measure(name: str, job: Mapping[str, Any], folder: Path) -> Row:
    """Measure the drafter without this in a process of its own; a learned table that is in `folder` is taken."""
    missing = MECHANISMS[name]
    # What is learned is the same where only drafting differs.
    learned = name if missing.overrides or missing.config else BASELINE
    table = folder / f"{re.sub('[^a-z0-9]+', '-', learned.lower())}.json"
    with tempfile.TemporaryDirectory() as numba_cache:
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS],
            input=json.dumps({**job, "mechanism": name, "table": str(table)}),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            # Numba's disk cache goes by the sources, and with overrides the library is not what its sources say.
            env={**os.environ, **({"NUMBA_CACHE_DIR": numba_cache} if missing.overrides else {})},
        )
    return {"mechanism": name, "instead": missing.instead, **json.loads(done.stdout)}


def measured(job: Mapping[str, Any]) -> Row:
    """In that process: learn a survival table without the mechanism, and replay the corpus with it."""
    import torch

    from benchmarks.learn import survival
    from benchmarks.quality import cases
    from benchmarks.quality.checks import K
    from benchmarks.quality.runs import Counts, Entry, Run, read_entries, run_records
    from gpu_align import DrafterConfig

    torch.set_num_threads(1)
    missing, table = MECHANISMS[job["mechanism"]], Path(job["table"])
    if not table.is_file():
        records = survival.training_records(Path(job["tune"]))[:: job["one_in"]]
        survival.write_table(survival.learn_table(records, DrafterConfig(**missing.config)), table)
    config = {**missing.config, "survival_table": str(table)}
    known = pickle.loads(Path(job["known"]).read_bytes()) if missing.recipes else {}
    entries = read_entries(Path(job["corpus"]))[:: job["one_in"]]

    def replayed(setting: Mapping[str, Any], entries: Sequence[Entry]) -> list[Any]:
        run = Run("gpu_align", K, tuple(setting.items()))
        found = {}
        for tokens in {entry.tokens for entry in entries}:
            records = [entry.record for entry in entries if entry.tokens == tokens]
            found[tokens] = iter(run_records(run, records, known.get(tokens)))
        return [next(found[entry.tokens]) for entry in entries]

    rows = []
    for setting in job["settings"]:
        pairs = replayed({**setting, **config}, entries)
        five = [pair for entry, pair in zip(entries, pairs, strict=True) if entry.in_five]
        rows.append(
            {"setting": setting, "test": Counts.of(pairs).as_json(), "five": Counts.of(five).as_json()}
        )
    perfect = replayed(config, cases.perfect(cases.real(entries)))
    least = sum(pair.steps == cases.least_steps(pair.output_tokens, K) for pair in perfect)
    unrelated = replayed(config, cases.unrelated(cases.hopeless(entries)))
    return {
        "settings": rows,
        "perfect": {"records": len(perfect), "least_steps": least},
        "unrelated": Counts.of(unrelated).as_json(),
    }


def check_names() -> None:
    """Import the library with all overrides at once: raises where it no longer has a name of them."""
    merged: dict[str, dict[str, Any]] = {}
    for missing in MECHANISMS.values():
        for module, values in missing.overrides.items():
            merged.setdefault(module, {}).update(values)
    install(merged)
    importlib.import_module("benchmarks.learn.survival")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: the corpus could not be made)."""
    if argv is None and sys.argv[1:] == ["--check"]:  # before anything of the library is imported
        check_names()
        return 0
    from benchmarks import tables
    from benchmarks.quality.runs import knowledge, make_corpora, quality_command, read_entries

    parser = quality_command("benchmarks.quality.ablation", __doc__, "test", "ablation")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="measure these alone")
    parser.add_argument(
        "--check",
        action="store_true",
        help="alone: only see that the library has every name that is replaced",
    )
    options = parser.parse_args(argv)
    names = [name for name in MECHANISMS if name == BASELINE or options.only is None or name in options.only]
    if code := make_corpora({"test": options.corpus, "tune": options.tune}):
        return code
    with tempfile.TemporaryDirectory() as folder:
        known_file = Path(folder) / "known.pickle"
        job = {
            "corpus": str(options.corpus), "tune": str(options.tune), "known": str(known_file),
            "one_in": options.one_in, "settings": settings(),
        }  # fmt: skip
        # The shipped recipes in the tokens of the records; earlier outputs are known to other drafters.
        tokens = sorted({entry.tokens for entry in read_entries(options.corpus)[:: options.one_in]})
        known = knowledge(options.tune, tokens, options.jobs)
        known_file.write_bytes(pickle.dumps({name: replace(k, earlier=()) for name, k in known.items()}))
        # The baseline's table is that of all rows that learn the same.
        rows = [measure(BASELINE, job, Path(folder))]
        with ThreadPoolExecutor(options.jobs) as pool:
            rows += pool.map(lambda name: measure(name, job, Path(folder)), names[1:])
    for row in rows:
        row["change"] = {group: change(row, rows[0], group) for group in GROUPS}
        print(row["mechanism"], *(f"{group} {row['change'][group]}" for group in GROUPS), sep=", ")
    made_by = "python -m benchmarks.quality.ablation --json benchmarks/results/ablation.json"
    tables.write_json(options.json, {"made_by": made_by, "one_in": options.one_in, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

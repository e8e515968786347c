"""The gain of each mechanism of the drafter: ``python -m benchmarks.quality.ablation``.

Takes one mechanism away at a time, learns the survival table again without it on the tuning split, and replays the
test split at K = 64. Compares tokens a step at equal rejections: the curve through the settings without the
mechanism, read at the rejections per accepted draft that the whole drafter has by default. Nothing of it is random
or depends on time.

Each row is measured in a process of its own, with a copy of the library in which a line is another one, or a
function returns at once. The library has no switches for it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables
from benchmarks.learn import survival
from benchmarks.quality import cases, runs
from benchmarks.quality.checks import K, curve, height, point
from benchmarks.quality.runs import JOBS, Counts, Entry, Run
from gpu_align import DrafterConfig
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import SWEEP


@dataclass(frozen=True)
class Mechanism:
    """One thing that the drafter does, and the drafter without it: what it does instead."""

    instead: str
    #: Of the library: a file of `gpu_align.ops`, a pattern of a line of it, and what stands there instead.
    change: tuple[str, str, str] | None = None
    #: Of `DrafterConfig`, when learning and when drafting.
    config: Mapping[str, Any] = field(default_factory=dict)
    recipes: bool = True


def _returns(file: str, name: str, value: str) -> tuple[str, str, str]:
    """A function that returns this at once."""
    return file, rf"(def {name}\(.*:\n)", rf"\1    return {value}\n"


#: More tokens than any output has.
_NEVER = 1 << 30
_RESYNC, _MATCH, _CHOOSE = "align/__init__.py", "match/__init__.py", "choose/__init__.py"
#: The drafter as it is.
BASELINE = "everything"
MECHANISMS: dict[str, Mechanism] = {
    BASELINE: Mechanism("the drafter as it is"),
    "own context": Mechanism("candidates in the prediction alone", config={"use_context": False}),
    "global resync": Mechanism(
        "in sync again near the anchor only", (_RESYNC, "GLOBAL_MATCH = 8, 8", f"GLOBAL_MATCH = {_NEVER}, 8")
    ),
    "local resync": Mechanism(
        "in sync again by the global resync only",
        _returns("align/reference.py", "_local_ends", "0"),
    ),
    "margin": Mechanism(
        "one bucket for all margins",
        (_CHOOSE, r"MARGIN_EDGES = \(.*\)", "MARGIN_EDGES = ()"),
    ),
    "four best matches": Mechanism(
        "the best one of each source",
        (_MATCH, "NUM_MATCHES = AT_CURSOR = 4", "NUM_MATCHES, AT_CURSOR = 1, 4"),
    ),
    "common": Mechanism("equal matches by position", _returns("match/reference.py", "_common_before", "0")),
    "alignment buckets": Mechanism(
        "one bucket for all of the prediction",
        _returns(_CHOOSE, "alignment_bucket", "0"),
    ),
    "adherence": Mechanism(
        "one bucket, and no match is ignored",
        _returns(_CHOOSE, "adherence_of", "2"),
    ),
    "min_survival_lost": Mechanism("`min_survival` for all drafts", config={"min_survival_lost": 0.0}),
    "edit replay": Mechanism(
        "no edit is replayed", ("compose/__init__.py", "MAX_REPLAYS = 4", "MAX_REPLAYS = 0")
    ),
    "LCS row": Mechanism(
        "after a divergence the cursor stays at the anchor",
        ("align/reference.py", r"row = align\.extend_row\(.*\)", "pass"),
    ),
    "exact prefix": Mechanism(
        "an exact prefix is a match like any other",
        _returns(_CHOOSE, "is_exact_prefix", "False"),
    ),
    "indentation shift": Mechanism(
        "no draft is moved",
        _returns("compose/reference.py", "indentation_shift", "0"),
    ),
    "recipes": Mechanism("no recipes, no draft is moved", recipes=False),
}


def changed(file: str, pattern: str, new: str) -> str:
    """The text of that file with `new` for the only match of the pattern."""
    path = tables.ROOT / "gpu_align" / "ops" / file
    text, times = re.subn(pattern, new, path.read_text(encoding="utf-8"))
    if times != 1:
        raise ValueError(f"{file}: expected {pattern!r} once, found it {times} times")
    return text


#: What was measured without one mechanism, as the JSON file has it.
Row = dict[str, Any]


def change(row: Row, baseline: Row) -> float | None:
    """By what part tokens a step change at the rejections per accepted draft of the baseline's default.

    None where no setting without the mechanism rejects as little.
    """
    found = [[point(Counts(**each["test"])) for each in r["settings"]] for r in (row, baseline)]
    reached, present = (height(curve(points), found[1][0].rejected_per_accepted) for points in found)
    return None if reached is None or present is None else round(reached / present - 1, 5)


#: The process of a row. Its folder, which has the copy of the library, goes before all others.
_PROCESS = """
import json, sys
from benchmarks.quality import ablation
print(json.dumps(ablation.measured(json.load(sys.stdin))))
"""


def measure(name: str, job: Mapping[str, Any]) -> Row:
    """Measure the drafter without this in a process of its own."""
    missing = MECHANISMS[name]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "row.py")
        script.write_text(_PROCESS, encoding="utf-8")
        if missing.change:
            shutil.copytree(tables.ROOT / "gpu_align", Path(folder, "gpu_align"))
            file = Path(folder, "gpu_align", "ops", missing.change[0])
            file.write_text(changed(*missing.change), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, script], input=json.dumps({**job, "mechanism": name, "folder": folder}),
            stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": str(tables.ROOT)},
        )  # fmt: skip
    return {"mechanism": name, "instead": missing.instead, **json.loads(done.stdout)}


def measured(job: Mapping[str, Any]) -> Row:
    """In that process: learn a survival table without the mechanism, and replay the corpus with it."""
    torch.set_num_threads(1)
    missing, table = MECHANISMS[job["mechanism"]], Path(job["folder"], "survival.json")
    records = survival.training_records()[:: job["one_in"]]
    survival.write_table(survival.learn_table(records, DrafterConfig(**missing.config)), table)
    config = {**missing.config, "survival_table": str(table)}
    known = pickle.loads(Path(job["known"]).read_bytes()) if missing.recipes else {}
    entries = runs.read_entries("test")[:: job["one_in"]]

    def replayed(setting: Mapping[str, Any], entries: Sequence[Entry]) -> list[Any]:
        by_tokens: dict[str, list[Any]] = {}
        for entry in entries:
            by_tokens.setdefault(entry.tokens, []).append(entry.record)
        run = Run(OURS, K, tuple(setting.items()))
        parts = (runs.run_records(run, those, known.get(tokens)) for tokens, those in by_tokens.items())
        return [*chain.from_iterable(parts)]

    rows = [
        {"setting": setting, "test": Counts.of(replayed({**setting, **config}, entries)).as_json()}
        for setting in job["settings"]
    ]
    perfect = replayed(config, cases.perfect([entry for entry in entries if entry.is_real]))
    least = sum(pair.steps == cases.least_steps(pair.output_tokens, K) for pair in perfect)
    unrelated = replayed(config, cases.unrelated(cases.hopeless(entries)))
    return {
        "settings": rows,
        "perfect": {"records": len(perfect), "least_steps": least},
        "unrelated": Counts.of(unrelated).as_json(),
    }


def main() -> None:
    parser = runs.quality_command("benchmarks.quality.ablation", __doc__, "ablation")
    said = "only see that the library has every line and function that is replaced"
    parser.add_argument("--check", action="store_true", help=said)
    options = parser.parse_args()
    if options.check:
        for missing in MECHANISMS.values():
            compile(changed(*missing.change) if missing.change else "", missing.instead, "exec")
        return
    runs.make_corpora("test", "tune")
    # The default and the settings around it: a curve is read at the default's rejections.
    around = [s for s in SWEEP if 2 <= s["length_factor"] <= 12 and s["min_survival"] <= 0.2]
    tokens = sorted({entry.tokens for entry in runs.read_entries("test")[:: options.one_in]})
    with tempfile.NamedTemporaryFile() as known, ThreadPoolExecutor(JOBS) as pool:
        known.write(pickle.dumps(runs.knowledge(tokens)))
        known.flush()
        job = {"known": known.name, "one_in": options.one_in, "settings": [{}, *around]}
        rows = [*pool.map(lambda name: measure(name, job), MECHANISMS)]
    for row in rows:
        row["change"] = change(row, rows[0])
        print(row["mechanism"], row["change"], sep=", ")
    made_by = "python -m benchmarks.quality.ablation --json benchmarks/results/ablation.json"
    tables.write_json(options.json, {"made_by": made_by, "one_in": options.one_in, "rows": rows})


if __name__ == "__main__":
    main()

"""What each mechanism of the drafter adds: ``python -m benchmarks.quality.ablation``.

Takes one mechanism away at a time, learns the survival table again without it on the tuning split, and replays the
test split at K = 64. Compares tokens a step at equal rejections: the curve through the settings without the
mechanism, read at the rejections per accepted draft that the whole drafter has by default. Each row is measured in
a process of its own, in which constants and functions of the library are replaced (`mechanisms` has the list).
Nothing of it is random or depends on time.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks import tables
from benchmarks.learn import survival
from benchmarks.quality import cases
from benchmarks.quality.checks import K, curve, height, point
from benchmarks.quality.mechanisms import BASELINE, MECHANISMS, count_lines, without
from benchmarks.quality.runs import (
    Counts,
    Entry,
    Knowledge,
    Run,
    knowledge,
    make_corpora,
    quality_command,
    read_entries,
    run_records,
)
from gpu_align import DrafterConfig
from gpu_align.simulate import SWEEP
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import PairResult

#: The default and the settings around it: a curve is read at the default's rejections.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    *(s for s in SWEEP if 2 <= s["length_factor"] <= 12 and s["min_survival"] <= 0.2),
)
#: Records over which tokens a step are compared.
GROUPS = ("test", "five")

#: What was measured without one mechanism, as the JSON file has it.
Row = dict[str, Any]


def counts_of(row: Row, group: str) -> list[Counts]:
    """A row's counts over a group, one of each setting, the default first."""
    return [Counts(**setting[group]) for setting in row["settings"]]


def change(row: Row, baseline: Row, group: str) -> float | None:
    """By what part tokens a step change at the rejections per accepted draft of the baseline's default.

    None where no setting without the mechanism rejects as little.
    """
    rejected = point(counts_of(baseline, group)[0]).rejected_per_accepted
    reached, present = (height(curve(map(point, counts_of(r, group))), rejected) for r in (row, baseline))
    return None if reached is None or present is None else reached / present - 1


#: The process of a row: overrides are installed before anything of the library is imported.
_PROCESS = """
import json, sys
from benchmarks.quality import mechanisms
job = json.load(sys.stdin)
mechanisms.install(mechanisms.without(job["mechanism"]).overrides)
from benchmarks.quality.ablation import measured
print(json.dumps(measured(job)))
"""


def measure(name: str, job: Mapping[str, Any], folder: Path) -> Row:
    """Measure the drafter `without` this in a process of its own; a learned table that is in `folder` is taken."""
    missing = without(name)
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
    torch.set_num_threads(1)
    missing, table = without(job["mechanism"]), Path(job["table"])
    if not table.is_file():
        records = survival.training_records(Path(job["tune"]))[:: job["one_in"]]
        survival.write_table(survival.learn_table(records, DrafterConfig(**missing.config)), table)
    config = {**missing.config, "survival_table": str(table)}
    known = pickle.loads(Path(job["known"]).read_bytes()) if missing.recipes else {}
    entries = read_entries(Path(job["corpus"]))[:: job["one_in"]]
    settings = []
    for setting in job["settings"]:
        pairs = replayed({**setting, **config}, entries, known)
        five = (pair for entry, pair in zip(entries, pairs, strict=True) if entry.in_five)
        sums = {"test": Counts.of(pairs).as_json(), "five": Counts.of(five).as_json()}
        settings.append({"setting": setting, **sums})
    perfect = replayed(config, cases.perfect(cases.real(entries)), known)
    least = sum(pair.steps == cases.least_steps(pair.output_tokens, K) for pair in perfect)
    unrelated = replayed(config, cases.unrelated(cases.hopeless(entries)), known)
    return {
        "settings": settings,
        "perfect": {"records": len(perfect), "least_steps": least},
        "unrelated": Counts.of(unrelated).as_json(),
    }


def replayed(
    setting: Mapping[str, Any], entries: Sequence[Entry], known: Mapping[str, Knowledge]
) -> list[PairResult]:
    """Replay all entries with our drafter; results in their order."""
    run = Run(OURS, K, tuple(setting.items()))
    found: dict[str, Iterator[PairResult]] = {}
    for tokens in {entry.tokens for entry in entries}:
        records = [entry.record for entry in entries if entry.tokens == tokens]
        found[tokens] = iter(run_records(run, records, known.get(tokens)))
    return [next(found[entry.tokens]) for entry in entries]


def as_json(rows: Mapping[str, Row], one_in: int) -> dict[str, Any]:
    """What the documentation is filled from: the rows in the order of `MECHANISMS`, combinations behind them."""
    baseline = rows.get(BASELINE)
    order = [name for name in MECHANISMS if name in rows] + [name for name in rows if name not in MECHANISMS]
    for row in rows.values():
        row["lines"] = count_lines(without(row["mechanism"]))
        if baseline is not None:
            found = {group: change(row, baseline, group) for group in GROUPS}
            row["change"] = {group: c if c is None else round(c, 5) for group, c in found.items()}
    return {
        "made_by": "python -m benchmarks.quality.ablation",
        "one_in": one_in,
        "rows": [rows[name] for name in order],
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: the corpus could not be made, 2: bad arguments)."""
    parser = quality_command("benchmarks.quality.ablation", __doc__, "test", "ablation")
    said = "measure these rows, keep the others of the JSON file, count lines anew; A+B takes away both"
    parser.add_argument("--only", nargs="*", metavar="NAME", help=said)
    options = parser.parse_args(argv)
    names = list(MECHANISMS) if options.only is None else options.only
    if unknown := [part for name in names for part in name.split("+") if part not in MECHANISMS]:
        print(f"error: expected names of {', '.join(MECHANISMS)}; found {unknown[0]}", file=sys.stderr)
        return 2
    if names and (code := make_corpora({"test": options.corpus, "tune": options.tune})):
        return code
    rows: dict[str, Row] = {}
    if options.only is not None and options.json.is_file():
        rows = {row["mechanism"]: row for row in json.loads(options.json.read_text())["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "corpus": str(options.corpus), "tune": str(options.tune), "known": str(Path(folder) / "known.pickle"),
            "one_in": options.one_in, "settings": SETTINGS,
        }  # fmt: skip
        if names:
            _write_known(options, Path(folder) / "known.pickle")
        lock = Lock()

        def add(name: str) -> None:
            row = measure(name, job, Path(folder))
            with lock:
                rows[name] = row
                tables.write_json(options.json, as_json(rows, options.one_in))
                print(f"{len(rows)} rows: {name}", file=sys.stderr)

        # The baseline's table is that of all rows that learn the same.
        if BASELINE in names:
            add(BASELINE)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(add, [name for name in names if name != BASELINE]))
    tables.write_json(options.json, found := as_json(rows, options.one_in))
    for row in found["rows"]:
        print(
            row["mechanism"],
            *(f"{group} {row['change'][group]}" for group in GROUPS if "change" in row),
            sep=", ",
        )
    return 0


def _write_known(options: argparse.Namespace, path: Path) -> None:
    """The shipped recipes in the tokens of the records; earlier outputs are what other drafters know."""
    tokens = sorted({entry.tokens for entry in read_entries(options.corpus)[:: options.one_in]})
    known = knowledge(options.tune, tokens, options.jobs)
    path.write_bytes(pickle.dumps({name: replace(k, earlier=()) for name, k in known.items()}))


if __name__ == "__main__":
    raise SystemExit(main())

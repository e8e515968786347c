"""The drafter without one mechanism, in a process of its own; `benchmarks.quality.ablation` starts it.

Reads a job as JSON from the standard input and writes what it measured as JSON to the standard output. The
overrides are installed before anything of the library is imported. Then a survival table is learned without the
mechanism, and the corpus is replayed with it.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quality.mechanisms import without
from benchmarks.quality.overrides import install

if TYPE_CHECKING:
    from benchmarks.quality.runs import Entry, Knowledge
    from gpu_align.tools.simulate.replay import PairResult


def main() -> None:
    """Read the job, write what was measured."""
    job = json.load(sys.stdin)
    missing = without(job["mechanism"])
    install(missing.overrides)

    import torch

    from benchmarks.quality import cases
    from benchmarks.quality.checks import K
    from benchmarks.quality.runs import read_entries

    torch.set_num_threads(1)
    table = Path(job["table"])
    if not table.is_file():
        learn(table, Path(job["tune"]), job["one_in"], missing.config)
    config = {**missing.config, "survival_table": str(table)}
    known = pickle.loads(Path(job["known"]).read_bytes()) if missing.recipes else {}
    entries = read_entries(Path(job["corpus"]))[:: job["one_in"]]
    settings = []
    for setting in job["settings"]:
        pairs = replay({**setting, **config}, entries, known)
        five = (pair for entry, pair in zip(entries, pairs, strict=True) if entry.in_five)
        settings.append({"setting": setting, "test": counts(pairs), "five": counts(five)})
    perfect = replay(config, cases.perfect(cases.real(entries)), known)
    least = sum(pair.steps == cases.least_steps(pair.output_tokens, K) for pair in perfect)
    unrelated = replay(config, cases.unrelated(cases.hopeless(entries)), known)
    measured = {
        "settings": settings,
        "perfect": {"records": len(perfect), "least_steps": least},
        "unrelated": counts(unrelated),
    }
    print(json.dumps(measured))


def learn(table: Path, tune: Path, one_in: int, config: Mapping[str, Any]) -> None:
    """Learn a survival table on the tuning split."""
    from benchmarks.learn import survival
    from gpu_align import DrafterConfig

    records = survival.training_records(tune)[::one_in]
    survival.write_table(survival.learn_table(records, DrafterConfig(**config)), table)


def replay(
    setting: Mapping[str, Any], entries: Sequence[Entry], known: Mapping[str, Knowledge]
) -> list[PairResult]:
    """Replay all entries with our drafter; results in their order."""
    from benchmarks.quality.checks import K
    from benchmarks.quality.runs import Run, run_records
    from gpu_align.tools.simulate.policies import OURS

    run = Run(OURS, K, tuple(setting.items()))
    found: dict[str, Iterator[PairResult]] = {}
    for tokens in {entry.tokens for entry in entries}:
        records = [entry.record for entry in entries if entry.tokens == tokens]
        found[tokens] = iter(run_records(run, records, known.get(tokens)))
    return [next(found[entry.tokens]) for entry in entries]


def counts(pairs: Iterable[PairResult]) -> dict[str, int]:
    """The sums of these results."""
    from benchmarks.quality.runs import Counts

    return Counts.of(pairs).as_json()


if __name__ == "__main__":
    main()

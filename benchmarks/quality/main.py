"""Draft quality, all of it: ``python -m benchmarks.quality``.

Replays the test split of the corpus with every drafter at K = 64, 32 and 16, our own one all along its trade-off,
with the recipes that it comes with; then perfect, unrelated and slightly wrong predictions, and ten kinds of text
with predictions of every quality. Prints what has to hold; the tables are those of the pages, which
docs/_scripts/fill_numbers.py makes from the JSON file. Nothing of it is random or depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.quality import cases, checks, kinds, plot
from benchmarks.quality.checks import Check, K
from benchmarks.quality.runs import (
    CACHED,
    CLAIRVOYANT,
    WITHOUT_RECIPES,
    Counts,
    Entry,
    Run,
    cached_corpus,
    knowledge,
    make_ready,
    our_settings,
    quality_command,
    read_entries,
    run_all,
    total,
)
from gpu_align.simulate import load_tokenizer, runnable_policy_names
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import PairResult

SIZES = (64, 32, 16)
#: Far from the curve and slow, or of interest at one K only.
ONLY_AT_64 = ("cursor", "myers", "input_lookup_node_llama_cpp", "prompt_lookup_transformers", CLAIRVOYANT)
#: Kinds that `cases` adds to the corpus; only our drafter at K = 64 replays them, and a bound one of them.
CASES = ("perfect", "one_line", "unrelated_case", "nothing")


def planned_runs() -> list[Run]:
    """Every drafter with every setting at every K."""
    runs = []
    for k in SIZES:
        settings = (*our_settings(k), dict(WITHOUT_RECIPES))
        runs += [Run(OURS, k, tuple(setting.items())) for setting in settings]
        names = [*runnable_policy_names(with_recipes=True), *CACHED, CLAIRVOYANT]
        runs += [Run(name, k) for name in names if name != OURS and (k == K or name not in ONLY_AT_64)]
    return list(dict.fromkeys(runs))


def with_cases(entries: Sequence[Entry]) -> list[Entry]:
    """The corpus, then the cases of `CASES`."""
    real = cases.real(entries)
    strangers = cases.unrelated(cases.hopeless(entries))
    return [
        *entries,
        *cases.perfect(real),
        *cases.one_line_edits(real, load_tokenizer("tekken")),
        *strangers,
        *cases.without_prediction(strangers),
    ]


def replays(run: Run, entry: Entry) -> bool:
    """Whether a run is over an entry."""
    if entry.kind not in CASES:
        return True
    return run == Run(OURS, K) or (run == Run(CLAIRVOYANT, K) and entry.kind == "one_line")


def checks_of(
    test: Mapping[Run, Counts],
    five: Mapping[Run, Counts],
    pairs_of: Callable[[Run, str], list[PairResult]],
) -> list[Check]:
    """All rows with a verdict."""
    ours = Run(OURS, K)
    unrelated, nothing = (Counts.of(pairs_of(ours, kind)) for kind in ("unrelated_case", "nothing"))
    return [
        *checks.peer_checks(test),
        *checks.five_checks(five),
        checks.perfect_check(pairs_of(ours, "perfect")),
        *checks.one_line_checks(pairs_of(ours, "one_line"), pairs_of(Run(CLAIRVOYANT, K), "one_line")),
        *checks.unrelated_checks(unrelated, nothing),
        checks.reliability_check(test[ours].reliability),
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something to compare with could not be fetched)."""
    parser = quality_command("benchmarks.quality", __doc__, "test", "quality")
    said = "kinds of text, qualities of prediction; made if not there"
    parser.add_argument("--kinds", type=Path, default=cached_corpus("kinds-test"), help=said)
    parser.add_argument("--images", type=Path, default=Path("docs/img"), help="folder for the pictures")
    parser.add_argument("--strict", action="store_true", help="exit code 3 if a check fails")
    options = parser.parse_args(argv)
    corpora = {"test": options.corpus, "tune": options.tune, "kinds-test": options.kinds}
    if code := make_ready(corpora):
        return code
    corpus = read_entries(options.corpus)[:: options.one_in]
    entries = with_cases(corpus)
    known = knowledge(options.tune, sorted({e.tokens for e in entries}), options.jobs)
    results = run_all(planned_runs(), entries, options.jobs, replays, known)
    rows = kinds.measure(read_entries(options.kinds)[:: options.one_in], options.jobs, known)
    found = as_json(results, entries, rows)
    verdicts = ([*list(c.values())[:3], tables.verdict(c["passed"])] for c in found["checks"])
    print(tables.table(["check", "found", "wanted", ""], verdicts, "llll"))
    tables.write_json(options.json, found)
    plot.draw_stored(found, options.images)
    failed = sum(not check["passed"] for check in found["checks"])
    print(f"{len(found['checks']) - failed} of {len(found['checks'])} checks hold")
    return 3 if failed and options.strict else 0


def as_json(
    results: Mapping[Run, Mapping[int, PairResult]],
    entries: Sequence[Entry],
    rows: Mapping[str, Mapping[Run, Counts]],
) -> dict[str, Any]:
    """The numbers of the documentation: integers, so that ratios are computed where they are shown."""
    test = {run: total(found, entries, lambda e: e.kind not in CASES) for run, found in results.items()}
    five = {run: total(found, entries, lambda e: e.in_five) for run, found in results.items()}

    def pairs_of(run: Run, kind: str) -> list[PairResult]:
        return [pair for index, pair in sorted(results[run].items()) if entries[index].kind == kind]

    return {
        "made_by": "python -m benchmarks.quality --json benchmarks/results/quality.json",
        "runs": [
            {
                "policy": run.policy,
                "setting": dict(run.setting),
                "num_draft_tokens": run.num_draft_tokens,
                "five": five[run].as_json(),
                "test": test[run].as_json(),
            }
            for run in test
        ],
        "reliability": [
            {
                "low": d.low,
                "drafts": d.drafts,
                "confidence": _rounded(d.confidence),
                "accepted": _rounded(d.accepted),
            }
            for d in test[Run(OURS, K)].reliability.deciles()
        ],
        "checks": [check._asdict() for check in checks_of(test, five, pairs_of)],
        "rows": kinds.as_json(rows),
    }


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 4)

"""Draft quality, all of it: ``python -m benchmarks.quality``.

Replays the test split of the corpus with every drafter at K = 64, 32 and 16, our own one all along its trade-off,
with the recipes that it comes with; then perfect, unrelated and slightly wrong predictions, and ten kinds of text
with predictions of every quality. Prints what has to hold; the tables are those of the pages, which
docs/_scripts/fill_numbers.py makes from the JSON file. Nothing of it is random or depends on time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import tables
from benchmarks.corpus.kinds import KINDS, MODEL, QUALITIES
from benchmarks.quality import build_suffix_peer, cases, checks, plot, runs
from benchmarks.quality.checks import K
from benchmarks.quality.replays import deciles
from benchmarks.quality.runs import CACHED, CLAIRVOYANT, WITHOUT_RECIPES, Counts, Entry, Knowledge, Run
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import PairResult, load_tokenizer, runnable_policy_names

SIZES = (64, 32, 16)
#: Far from the curve and slow, or of interest at one K only.
LEFT_OUT = ("cursor", "myers", "input_lookup_node_llama_cpp", "prompt_lookup_transformers")
ONLY_AT_64 = (*LEFT_OUT, CLAIRVOYANT)
#: Kinds that `cases` adds to the corpus; only our drafter at K = 64 replays them, and a bound one of them.
CASES = ("perfect", "one_line", "unrelated_case", "nothing")


def planned_runs() -> list[Run]:
    """Every drafter with every setting at every K."""
    planned = []
    for k in SIZES:
        settings = (*runs.our_settings(k), dict(WITHOUT_RECIPES))
        planned += [Run(OURS, k, tuple(setting.items())) for setting in settings]
        names = [*runnable_policy_names(with_recipes=True), *CACHED, CLAIRVOYANT]
        planned += [Run(name, k) for name in names if name != OURS and (k == K or name not in ONLY_AT_64)]
    return list(dict.fromkeys(planned))


def with_cases(entries: Sequence[Entry]) -> list[Entry]:
    """The corpus, then the cases of `CASES`."""
    real = [entry for entry in entries if entry.is_real]
    strangers = cases.unrelated(cases.hopeless(entries))
    return [
        *entries,
        *cases.perfect(real),
        *cases.one_line_edits(real, load_tokenizer("tekken")),
        *strangers,
        *(cases.like(entry, [], "nothing") for entry in strangers),
    ]


def replays(run: Run, entry: Entry) -> bool:
    """Whether a run is over an entry."""
    if entry.kind not in CASES:
        return True
    return run == Run(OURS, K) or (run == Run(CLAIRVOYANT, K) and entry.kind == "one_line")


def main() -> None:
    options = runs.quality_command("benchmarks.quality", __doc__, "quality").parse_args()
    build_suffix_peer.make_ready()
    runs.make_corpora("test", "tune", "kinds-test")
    entries = with_cases(runs.read_entries("test")[:: options.one_in])
    known = runs.knowledge(sorted({e.tokens for e in entries}))
    results = runs.run_all(planned_runs(), entries, replays, known)
    rows = measure_kinds(runs.read_entries("kinds-test")[:: options.one_in], known)
    found = as_json(results, entries, rows)
    for check in found["checks"]:
        print(check["name"], check["value"], check["wanted"], tables.verdict(check["passed"]), sep=", ")
    tables.write_json(options.json, found)
    if options.one_in == 1:
        plot.draw_stored(found)
    holding = sum(check["passed"] for check in found["checks"])
    print(f"{holding} of {len(found['checks'])} checks hold")


def as_json(
    results: Mapping[Run, Mapping[int, PairResult]],
    entries: Sequence[Entry],
    rows: Mapping[str, Any],
) -> dict[str, Any]:
    """The numbers of the documentation: integers, so that ratios are computed where they are shown."""
    test = {run: runs.total(found, entries, lambda e: e.kind not in CASES) for run, found in results.items()}
    five = {run: runs.total(found, entries, lambda e: e.in_five) for run, found in results.items()}

    def pairs_of(run: Run, kind: str) -> list[PairResult]:
        return [pair for index, pair in sorted(results[run].items()) if entries[index].kind == kind]

    ours = Run(OURS, K)
    unrelated, nothing = (Counts.of(pairs_of(ours, kind)) for kind in ("unrelated_case", "nothing"))
    reliability = deciles(test[ours].by_tenth)
    rows_of_checks = [
        *checks.peer_checks(test),
        checks.perfect_check(pairs_of(ours, "perfect")),
        *checks.one_line_checks(pairs_of(ours, "one_line"), pairs_of(Run(CLAIRVOYANT, K), "one_line")),
        *checks.unrelated_checks(unrelated, nothing),
        checks.reliability_check(reliability),
    ]
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
        "reliability": reliability,
        "checks": [check._asdict() for check in rows_of_checks],
        "rows": rows,
    }


# Kinds of text and qualities of the prediction, of ``kinds-test``: a row each against every peer.

#: The label of all real changes together, where the rows are by quality of the prediction.
ORIGINAL = "original"
#: Rows, in their order.
LABELS = (*KINDS, MODEL, ORIGINAL, *QUALITIES)
#: The peer that comes nearest at the rejections of our default.
NAMED_PEER = "suffix_decoding_4_deep"
#: Runs whose counts are kept in the JSON file.
SHOWN = (OURS, NAMED_PEER, "suffix_decoding_deep", "prompt_lookup", "openai", CLAIRVOYANT)


def measure_kinds(entries: Sequence[Entry], known: Mapping[str, Knowledge]) -> dict[str, Any]:
    """The numbers of the documentation, by label: counts at the default, and the leads over every peer."""
    peers = [name for name in runnable_policy_names() if name != OURS and name not in LEFT_OUT]
    planned = [Run(OURS, K, tuple(setting.items())) for setting in runs.our_settings(K)]
    planned += [Run(name, K) for name in (*peers, *CACHED, CLAIRVOYANT)]
    results, found = runs.run_all(planned, entries, known=known), {}
    for label in LABELS:

        def is_of(entry: Entry, label: str = label) -> bool:
            return entry.kind == (entry.text if label == ORIGINAL else label)

        sums = {run: runs.total(pairs, entries, is_of) for run, pairs in results.items()}
        if not sums[Run(OURS, K)].steps:
            continue  # of a quick look
        found[label] = {
            "runs": {name: sums[Run(name, K)].as_json() for name in SHOWN if Run(name, K) in sums},
            "leads": [
                {
                    "peer": lead.peer,
                    "tokens_per_step": round(lead.point.tokens_per_step, 3),
                    "rejected_per_accepted": round(lead.point.rejected_per_accepted, 4),
                    "ratio": None if lead.ratio is None else round(lead.ratio, 4),
                }
                # The smallest first, after those that ours has no setting for.
                for lead in sorted(
                    checks.leads(sums, K), key=lambda lead: (lead.ratio is not None, lead.ratio or 0.0)
                )
            ],
        }
    return found


if __name__ == "__main__":
    main()

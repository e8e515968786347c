"""Draft quality by kind of text and by quality of the prediction: a row each against every peer.

The records are those of ``kinds-test`` (`benchmarks.corpus.kinds`). ``python -m benchmarks.quality.kinds``
measures these rows alone; ``python -m benchmarks.quality`` does it with everything else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.corpus.kinds import KINDS, MODEL, QUALITIES
from benchmarks.quality.checks import MAX_GAP, Check, K, Lead, leads
from benchmarks.quality.runs import (
    BOUNDS,
    CACHED,
    Counts,
    Entry,
    Knowledge,
    Run,
    knowledge,
    make_ready,
    our_settings,
    read_entries,
    run_all,
    total,
)
from benchmarks.tables import command, table, write_json
from gpu_align.simulate import runnable_policy_names
from gpu_align.tools.simulate.policies import OURS

#: One record in so many is replayed at a K other than `K`, where no peer may be above our curve.
ONE_IN_AT_OTHER_K = 3
SIZES = (K, 32, 16)
#: Far below the others at every rejection, and slow.
LEFT_OUT = ("myers", "cursor", "input_lookup_node_llama_cpp", "prompt_lookup_transformers", "recipe_pack")
#: The label of all real changes together, where the rows are by quality of the prediction.
ORIGINAL = "original"
#: Rows, in their order.
LABELS = (*KINDS, MODEL, ORIGINAL, *QUALITIES)
#: The peer that comes nearest at the rejections of our default.
NAMED_PEER = "suffix_decoding_4_deep"
#: Runs whose counts are kept in the JSON file.
SHOWN = (OURS, NAMED_PEER, "suffix_decoding_deep", "prompt_lookup", "openai", BOUNDS[0])


def planned_runs() -> list[Run]:
    """Ours with every setting and every peer, at every K."""
    peers = [name for name in runnable_policy_names() if name != OURS and name not in LEFT_OUT]
    runs = [Run(OURS, k, tuple(setting.items())) for k in SIZES for setting in our_settings(k)]
    runs += [Run(name, k) for k in SIZES for name in peers]
    runs += [Run(name, K) for name in (*CACHED, BOUNDS[0])]
    return list(dict.fromkeys(runs))


def labels_of(entry: Entry) -> tuple[str, ...]:
    """The rows that a record counts in."""
    return (entry.kind, ORIGINAL) if entry.kind == entry.text else (entry.kind,)


def measure(
    entries: Sequence[Entry], jobs: int, known: Mapping[str, Knowledge]
) -> dict[str, dict[Run, Counts]]:
    """Label → run → its sums."""
    thin = {id(entry) for entry in entries[::ONE_IN_AT_OTHER_K]}

    def chosen(run: Run, entry: Entry) -> bool:
        return run.num_draft_tokens == K or id(entry) in thin

    results = run_all(planned_runs(), entries, jobs, chosen, known)
    found: dict[str, dict[Run, Counts]] = {}
    for label in LABELS:
        sums = {
            run: total(pairs, entries, lambda entry, label=label: label in labels_of(entry))
            for run, pairs in results.items()
        }
        found[label] = {run: counts for run, counts in sums.items() if counts.steps}
    return {label: sums for label, sums in found.items() if sums}


def nearest(counts: Mapping[Run, Counts], num_draft_tokens: int) -> list[Lead]:
    """Ours over each peer, the smallest first, with those before it that ours has no setting for."""
    found = leads(counts, num_draft_tokens)
    return sorted(found, key=lambda lead: (lead.ratio is not None, lead.ratio or 0.0))


def checks_of(found: Mapping[str, Mapping[Run, Counts]]) -> list[Check]:
    """At K = 64 ten per cent over the best peer, at other K no peer above ours; and what confidence promises."""
    checks = []
    for label, counts in found.items():
        for k in SIZES:
            for lead in nearest(counts, k)[:1]:
                check = lead.check(f"{label}, K={k}: over every peer", f"x {lead.ratio or 0:.3f}")
                checks.append(check._replace(value=f"{check.value} over {lead.named}"))
        gap = counts[Run(OURS, K)].reliability.worst_gap()
        checks.append(
            Check(f"{label}: confidence, worst decile", f"{gap:.3f}", f"at most {MAX_GAP}", gap <= MAX_GAP)
        )
    return checks


def as_json(found: Mapping[str, Mapping[Run, Counts]]) -> dict[str, Any]:
    """What the documentation is filled from, by label: counts at the default, and the leads over every peer."""
    return {
        label: {
            "gap": round(counts[Run(OURS, K)].reliability.worst_gap(), 4),
            "chance_gap": round(counts[Run(OURS, K)].reliability.chance_gap(), 4),
            "runs": {name: counts[Run(name, K)].as_json() for name in SHOWN if Run(name, K) in counts},
            "leads": [
                {
                    "peer": lead.peer,
                    "num_draft_tokens": k,
                    "tokens_per_step": round(lead.point.tokens_per_step, 3),
                    "rejected_per_accepted": round(lead.point.rejected_per_accepted, 4),
                    "ratio": None if lead.ratio is None else round(lead.ratio, 4),
                }
                for k in SIZES
                for lead in nearest(counts, k)
            ],
        }
        for label, counts in found.items()
    }


def shown(rows: Mapping[str, Any]) -> str:
    """A row a label: ours beside the nearest peer, and the least lead over any at each K."""
    found = []
    for label, row in rows.items():
        speeds = (
            f"{c['output_tokens'] / c['steps']:.2f}" for c in (row["runs"][n] for n in (OURS, NAMED_PEER))
        )
        first = {lead["num_draft_tokens"]: lead for lead in reversed(row["leads"])}
        least = (
            f"{lead['ratio'] or 0:.3f} {lead['peer']}" for lead in (first[k] for k in SIZES if k in first)
        )
        found.append([label, row["runs"][OURS]["records"], *speeds, "; ".join(least), row["gap"]])
    return table(["", "records", "ours", NAMED_PEER, "least lead at K = 64; 32; 16", "confidence off"], found)


def quality_command(module: str, doc: str | None, corpus: str, out: str) -> argparse.ArgumentParser:
    """The options of all measurements: a set of the corpus, the results, how many records and processes."""
    parser, cache = command(module, doc), Path(".cache")
    made = "made if not there"
    parser.add_argument("--corpus", type=Path, default=cache / f"corpus-{corpus}.jsonl.gz", help=made)
    said = f"what is learned or known beforehand; {made}"
    parser.add_argument("--tune", type=Path, default=cache / "corpus-tune.jsonl.gz", help=said)
    parser.add_argument("--json", type=Path, default=cache / f"{out}.json", help="the results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="every Nth record: a quick look")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something could not be fetched)."""
    parser = quality_command("benchmarks.quality.kinds", __doc__, "kinds-test", "kinds")
    options = parser.parse_args(argv)
    if code := make_ready({"kinds-test": options.corpus, "tune": options.tune}):
        return code
    entries = read_entries(options.corpus)[:: options.one_in]
    rows = as_json(measure(entries, options.jobs, knowledge(options.tune, ["tekken"], 1)))
    print(shown(rows))
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Draft quality by kind of text and by quality of the prediction: a row each against every peer.

The records are those of ``kinds-test`` (`benchmarks.corpus.kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    our_settings,
    run_all,
    total,
)
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

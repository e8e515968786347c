"""Draft quality by kind of text and by quality of the prediction: a row each against every peer.

The records are those of ``kinds-test`` (`benchmarks.corpus.kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.corpus.kinds import KINDS, MODEL, QUALITIES
from benchmarks.quality.checks import K, leads
from benchmarks.quality.runs import (
    CACHED,
    CLAIRVOYANT,
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

#: Far below the others at every rejection, and slow.
LEFT_OUT = ("myers", "cursor", "input_lookup_node_llama_cpp", "prompt_lookup_transformers", "recipe_pack")
#: The label of all real changes together, where the rows are by quality of the prediction.
ORIGINAL = "original"
#: Rows, in their order.
LABELS = (*KINDS, MODEL, ORIGINAL, *QUALITIES)
#: The peer that comes nearest at the rejections of our default.
NAMED_PEER = "suffix_decoding_4_deep"
#: Runs whose counts are kept in the JSON file.
SHOWN = (OURS, NAMED_PEER, "suffix_decoding_deep", "prompt_lookup", "openai", CLAIRVOYANT)


def planned_runs() -> list[Run]:
    """Ours with every setting, and every peer."""
    peers = [name for name in runnable_policy_names() if name != OURS and name not in LEFT_OUT]
    runs = [Run(OURS, K, tuple(setting.items())) for setting in our_settings(K)]
    return [*runs, *(Run(name, K) for name in (*peers, *CACHED, CLAIRVOYANT))]


def labels_of(entry: Entry) -> tuple[str, ...]:
    """The rows that a record counts in."""
    return (entry.kind, ORIGINAL) if entry.kind == entry.text else (entry.kind,)


def measure(
    entries: Sequence[Entry], jobs: int, known: Mapping[str, Knowledge]
) -> dict[str, dict[Run, Counts]]:
    """Label → run → its sums."""
    results = run_all(planned_runs(), entries, jobs, known=known)
    found: dict[str, dict[Run, Counts]] = {}
    for label in LABELS:
        sums = {
            run: total(pairs, entries, lambda entry, label=label: label in labels_of(entry))
            for run, pairs in results.items()
        }
        found[label] = {run: counts for run, counts in sums.items() if counts.steps}
    return {label: sums for label, sums in found.items() if sums}


def as_json(found: Mapping[str, Mapping[Run, Counts]]) -> dict[str, Any]:
    """The numbers of the documentation, by label: counts at the default, and the leads over every peer."""
    return {
        label: {
            "runs": {name: counts[Run(name, K)].as_json() for name in SHOWN if Run(name, K) in counts},
            "leads": [
                {
                    "peer": lead.peer,
                    "tokens_per_step": round(lead.point.tokens_per_step, 3),
                    "rejected_per_accepted": round(lead.point.rejected_per_accepted, 4),
                    "ratio": None if lead.ratio is None else round(lead.ratio, 4),
                }
                # The smallest first, after those that ours has no setting for.
                for lead in sorted(
                    leads(counts, K), key=lambda lead: (lead.ratio is not None, lead.ratio or 0.0)
                )
            ],
        }
        for label, counts in found.items()
    }

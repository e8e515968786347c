"""Misses and merge: the same outputs again, after the pack has been told what was refuted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.recipes.groups import Output
from benchmarks.recipes.runs import K, encode, token_texts
from gpu_align import RecipePack
from gpu_align.recipes.misses import Misses

NUM_ROUNDS = 5


def rounds(pack: RecipePack, outputs: Sequence[Output]) -> list[dict[str, Any]]:
    """What a pack drafts alone, as learned and after each of `NUM_ROUNDS` merges; and its entries."""
    found = []
    for _ in range(NUM_ROUNDS + 1):
        misses = Misses(pack.tokenizer)
        [report] = pack.report(outputs, encode, token_texts, K, misses=misses).tasks.values()
        rejected = report.drafted - report.accepted
        found.append(
            {**report.as_json(), "steps": report.steps, "rejected": rejected, "entries": len(pack.observed)}
        )
        pack = pack.merge(misses)
    return found
